"""Errors are part of the interface: each says what failed, what every engine serves now, and what to do next."""

from __future__ import annotations

import inspect

import pytest

from instep import errors
from instep.errors import (
    ApplyError,
    CanaryError,
    ConfigError,
    DigestMismatch,
    EngineBusy,
    EngineDirty,
    EngineLost,
    EngineState,
    EngineTimeout,
    GenerationError,
    InstepError,
    MissingExtra,
    PlanError,
    SourceError,
    SyncError,
    TransportError,
    VersionConflict,
    by_name,
)

UNTOUCHED = (SourceError, PlanError, VersionConflict, EngineBusy, TransportError)
OF_A_PUSH = (SyncError, EngineTimeout, EngineLost, ApplyError, DigestMismatch, CanaryError)
CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, InstepError)]

STATES = (
    (EngineState("a", "old", "v1"), "a: still serves v1"),
    (EngineState("b", "new", "v2"), "b: serves v2"),
    (
        EngineState("c", "dirty", "v1", "commit", "the loader failed"),
        "c: DIRTY: refuses to generate until a push succeeds (commit: the loader failed)",
    ),
    (EngineState("d", "unknown", "v1", "prepare", "no answer"), "d: does not answer; it served v1 when it last did (prepare: no answer)"),
    (EngineState("e", "old", None), "e: still serves its own first weights"),
    (EngineState("f", "unknown", None, "hello"), "f: does not answer; no version of it was heard of so far (hello)"),
)


def test_the_classes_are_those_that_are_tested_here() -> None:
    assert set(CLASSES) == {
        InstepError, ConfigError, MissingExtra, EngineDirty, GenerationError, *UNTOUCHED, *OF_A_PUSH
    }  # fmt: skip


@pytest.mark.parametrize("kind", OF_A_PUSH)
def test_a_failed_push_tells_all_of_it(kind: type[SyncError]) -> None:
    text = str(kind("vllm-1 did what it should not", version="v2", engines=tuple(state for state, _ in STATES)))
    lines = text.splitlines()
    assert lines[0] == "vllm-1 did what it should not"
    assert [line.strip() for line in lines[1:-1]] == [words for _, words in STATES]
    assert lines[-1].startswith("  next: ")


def test_a_failed_push_says_its_reason_once() -> None:
    states = (EngineState("a", "dirty", "v1", "commit", "a: it failed"), EngineState("b", "old", "v1", "prepare", "b: it failed too"))
    lines = str(SyncError("a: it failed", engines=states)).splitlines()
    assert lines[1:3] == [
        "  a: DIRTY: refuses to generate until a push succeeds (commit)",
        "  b: still serves v1 (prepare: b: it failed too)",
    ]


@pytest.mark.parametrize("kind", UNTOUCHED)
def test_an_error_before_the_commit_says_that_nothing_was_touched(kind: type[InstepError]) -> None:
    first, second = str(kind("w does not fit")).splitlines()
    assert first == "w does not fit"
    assert second.startswith("  next: ")
    assert "no engine was touched" in second or "engines keep what they serve" in second


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind is not ConfigError])
def test_a_next_step_of_its_own_comes_first(kind: type[InstepError]) -> None:
    error = kind("w does not fit", tensor="w", next_step="turn it around")
    assert error.tensor == "w"
    assert str(error).endswith("\n  next: turn it around")
    assert str(error).count("next:") == 1


def test_a_dirty_engine_says_how_it_is_healed() -> None:
    assert "next: push a version" in str(EngineDirty("half an update"))


@pytest.mark.parametrize("kind", CLASSES)
def test_a_kind_on_the_wire_is_the_class_of_that_name(kind: type[InstepError]) -> None:
    assert by_name(kind.__name__) is kind


@pytest.mark.parametrize("name", ["", "NoSuchError", "EngineState", "annotations", "Any", "__builtins__", "Exception", "WORDS", "by_name"])
def test_no_other_name_is_taken_from_the_wire(name: str) -> None:
    assert by_name(name) is ApplyError


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    lines = [line for line in (errors.__doc__ or "").splitlines() if line.startswith("    ")]
    drawn = {line.split()[0]: (len(line) - len(line.lstrip())) // 2 - 2 for line in lines}
    above = {kind: [one for one in kind.__mro__[1:] if one in CLASSES] for kind in CLASSES}
    assert drawn == {kind.__name__: len(above[kind]) for kind in CLASSES}
