"""`instep doctor --self-test` against the embedded engine, and what it says of an engine that does not follow."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from instep.cli import checks, self_test
from instep.cli.doctor import doctor
from instep.errors import EngineState, EngineTimeout

RECEIPT = SimpleNamespace(nbytes=2_000_000, seconds={"publish": 0.5, "total": 1.0}, canary_gap=0.25)


def test_the_embedded_engine_passes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(self_test, "find_spec", lambda name: None)
    monkeypatch.setattr(checks, "CHECKS", ())
    assert doctor(self_test=True, json=True) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert list(found) == ["engine", "identity push", "one-step push"]
    assert "embedded" in found["engine"]["text"]
    assert "the same bits" in found["identity push"]["text"]


def test_an_identity_push_that_changes_a_bit_fails() -> None:
    assert self_test.judge_identity(([1, 2], [-0.5, -0.25]), ([1, 2], [-0.5, -0.25]), RECEIPT).level == "ok"
    finding = self_test.judge_identity(([1, 2], [-0.5, -0.25]), ([1, 2], [-0.5, -0.375]), RECEIPT)
    assert finding.level == "fail"
    assert "0.125" in finding.text


def test_outputs_that_do_not_follow_the_weights_fail() -> None:
    before = ([1, 2], [-0.5, -0.25])
    assert self_test.judge_step(before, ([1, 2], [-0.5, -0.375]), RECEIPT).level == "ok"
    assert self_test.judge_step(before, before, RECEIPT).level == "fail"


def test_a_failed_push_says_what_the_engine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __init__(self, **_: Any) -> None: ...

        def __enter__(self) -> Refusing:
            return self

        def __exit__(self, *_: object) -> None: ...

        def push(self, version: str) -> None:
            raise EngineTimeout("prepare took too long", version=version, engines=(EngineState("a", "old", "v1"),))

    monkeypatch.setattr("instep.WeightSync", Refusing, raising=False)
    subject = self_test.Subject("a", object(), lambda: ([1], [-0.5]))
    (finding,) = self_test.push_twice(object(), subject)
    assert finding.level == "fail"
    assert "a: still serves v1" in finding.text


def test_an_engine_that_does_not_start_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(self_test, "find_spec", lambda name: object())
    monkeypatch.setattr(self_test, "tiny_model", lambda: object())
    monkeypatch.setattr(self_test, "start_vllm", broken)
    (finding,) = self_test.self_test()
    assert (finding.name, finding.level) == ("engine", "fail")
    assert "no memory left" in finding.text


def test_what_a_reload_leaves_is_compared_with_an_initial_load() -> None:
    def found(**told: Any) -> list[checks.Finding]:
        engine = SimpleNamespace(**{"compared": 0, "initial": 0.0, "unproved": {}, **told})
        return self_test.judge_reload(SimpleNamespace(engines=(engine,)))

    assert found() == []
    (finding,) = found(compared=12, initial=0.25)
    assert (finding.level, finding.text) == ("ok", "12 layers are what an initial load makes of them, bit for bit; compared in 250 ms")
    (finding,) = found(compared=12, unproved={"layers.0.moe": "no kernel"})
    assert (finding.level, finding.text) == ("warn", "1 layers were not compared with an initial load: layers.0.moe (no kernel)")
