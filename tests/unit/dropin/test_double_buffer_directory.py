"""Two buffers in a directory: whatever happens to the writer, a whole version is there."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.toys import attention, checkpoint
from helpers.two_buffers import current, filled, put
from safetensors import safe_open

from instep.dropin.torchrl import directory
from instep.dropin.torchrl.directory import Buffer, buffer, newest, write
from instep.errors import ConfigError, SourceError, TransportError
from instep.source import open_source

NEW = attention(1)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def test_tied_names_are_written_once(place: Path) -> None:
    put(place, NEW | {"lm_head.weight": NEW["model.embed_tokens.weight"]}, "v1")
    with safe_open(buffer(place, 1), framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    found = current(place)
    assert {meta.name: meta.alias_of for meta in found.metadata()}["lm_head.weight"] == "model.embed_tokens.weight"
    found.close()


def test_what_a_reader_has_opened_does_not_change(place: Path) -> None:
    """The buffer that it reads from is filled again two versions later."""
    put(place, filled(1), "v1")
    opened = current(place)
    for version in (2, 3, 4):
        put(place, filled(version), f"v{version}")
    assert opened.version == "v1"
    assert {float(value) for _, tensor in opened.tensors() for value in tensor.unique()} == {1.0}
    opened.close()
    assert sorted(path.name for path in place.iterdir()) == ["buffer-0.safetensors", "buffer-1.safetensors", "lock", "newest"]


def test_both_buffers_are_whole_versions(place: Path) -> None:
    for version in range(1, 5):
        put(place, filled(version), f"v{version}")
    found = [Buffer(buffer(place, slot)) for slot in (0, 1)]
    assert [each.version for each in found] == ["v4", "v3"]
    assert [{float(tensor.max()) for _, tensor in each.tensors()} for each in found] == [{4.0}, {3.0}]


def steps_of(monkeypatch: pytest.MonkeyPatch, at: Callable[[str], None]) -> None:
    """Has `at` called after each thing that a writer does to the directory."""
    import safetensors.torch

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            at(name)
            return result

        return call

    monkeypatch.setattr(safetensors.torch, "save_file", watched("save", safetensors.torch.save_file))
    monkeypatch.setattr(Path, "replace", watched("replace", Path.replace))
    monkeypatch.setattr(Path, "write_text", watched("write", Path.write_text))
    monkeypatch.setattr(directory, "flush", watched("flush", directory.flush))


STEPS = ["save", "flush", "replace", "flush", "write", "flush", "replace", "flush"]


def test_the_steps_of_a_writer(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests below stop it after every one of them."""
    seen: list[str] = []
    steps_of(monkeypatch, seen.append)
    put(place, filled(1), "v1")
    assert seen == STEPS


@pytest.mark.parametrize("written", [0, 1, 2, 3])
@pytest.mark.parametrize("step", range(len(STEPS)), ids=lambda step: f"{step}-{STEPS[step]}")
def test_a_writer_that_dies_leaves_a_whole_version(place: Path, step: int, written: int) -> None:
    """A process that ends without any clean-up, after each of its steps, and when there were none, one, two or more versions before."""
    for version in range(1, written + 1):
        put(place, filled(version), f"v{version}")
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        left = [step]

        def die(_: str) -> None:
            left[0] -= 1
            if left[0] < 0:
                os._exit(7)

        steps_of(pytest.MonkeyPatch(), die)
        put(place, filled(99), "v99")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    switched = step >= STEPS.index("replace", 3)
    expected = 99 if switched else written
    if expected:
        found = current(place)
        assert found.version == f"v{expected}"
        assert {float(value) for _, tensor in found.tensors() for value in tensor.unique()} == {float(expected)}
    else:
        assert newest(place) is None
    put(place, filled(100), "v100")  # and its successor goes on
    assert current(place).version == "v100"
    assert sorted(path.name for path in place.iterdir() if path.suffix == ".new") == []


def test_a_mark_that_names_no_buffer(place: Path) -> None:
    put(place, NEW, "v1")
    (place / "newest").write_text("2")
    with pytest.raises(SourceError, match="should say 0 or 1, it says '2'"):
        newest(place)


def test_weights_that_change_while_they_are_written(place: Path) -> None:
    put(place, filled(1), "v1")
    weights = filled(2)
    source = open_source(weights)
    original = source.tensors

    def stepping() -> Any:
        for name, tensor in original():
            weights["layer.0.weight"].add_(1)
            yield name, tensor

    source.tensors = stepping  # type: ignore[method-assign]
    with pytest.raises(SourceError, match="changed its weights"):
        write(place, source, "v2")
    assert current(place).version == "v1"


def test_a_second_writer_is_refused_while_one_writes(place: Path) -> None:
    place.mkdir()
    with directory.locked(place), pytest.raises(ConfigError, match="another trainer is writing"):
        put(place, NEW, "v1")
    put(place, NEW, "v1")
    assert current(place).version == "v1"


def test_a_disk_without_room_leaves_what_was_there(place: Path) -> None:
    put(place, filled(1), "v1")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(TransportError, match=r"cannot write .*(?i:too large)"):
            put(place, filled(2), "v2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert current(place).version == "v1"
    put(place, filled(3), "v3")
    assert current(place).version == "v3"


def test_experts_that_the_trainer_keeps_in_one_tensor(place: Path) -> None:
    """Views of one storage, which the file format refuses as they are."""
    weights = checkpoint(1, layers=1, moe=True)
    packed = torch.stack([weights[f"model.layers.0.mlp.experts.{index}.up_proj.weight"] for index in range(3)])
    for index in range(3):
        weights[f"model.layers.0.mlp.experts.{index}.up_proj.weight"] = packed[index]
    put(place, weights, "v1")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in current(place).tensors())
