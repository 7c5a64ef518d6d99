"""What a real vLLM serves after a push that failed. One engine for the whole file: every failure must leave it usable."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import greedy, versions
from helpers.interrupts import Interrupts
from models import PROMPTS, tiny

from instep import MemoryEngine, WeightSync
from instep.engine.vllm.engine import VllmEngine
from instep.errors import ApplyError, DigestMismatch, EngineDirty, EngineTimeout, InstepError, PlanError, SyncError, VersionConflict
from instep.telemetry import Event

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def llm(engine: Callable[..., Any], checkpoints: Callable[[str, int], Path]) -> Any:
    return engine(checkpoints("llama", 1), worker_extension_cls="faulty.FaultyExtension")


@pytest.fixture
def weights() -> Weights:
    return dict(tiny("llama", 2).state_dict())


@pytest.fixture
def sync(llm: Any, weights: Weights) -> WeightSync:
    """Serves the first weights; every test starts from there, and heals what the one before it left."""
    sync = WeightSync(source=weights, engines=[llm], timeout=30)
    sync.push(f"start-{time.time_ns()}")
    weights.update(tiny("llama", 3).state_dict())
    return sync


def serves(llm: Any, reference: Callable[..., Any], seed: int) -> bool:
    return bool(greedy(llm, PROMPTS) == reference("llama", seed))


@pytest.mark.parametrize(("point", "value"), [("step", 0), ("step", 3), ("step", 9), ("finish", 0)])
def test_a_loader_that_fails_leaves_the_engine_refusing_until_the_next_push(
    llm: Any, sync: WeightSync, reference: Callable[..., Any], point: str, value: int
) -> None:
    """Invariants 1 and 2: never a mixture, never dead; dirty, said so, and healed by the next push."""
    llm.collective_rpc("inject", args=(point, value))
    with pytest.raises(ApplyError, match="told to fail") as failure:
        sync.push(f"bad-{point}-{value}")
    assert [state.serving for state in failure.value.engines] == ["dirty"]
    assert "DIRTY" in str(failure.value)
    assert "next:" in str(failure.value)
    with pytest.raises(EngineDirty, match="push a version"):
        greedy(llm, PROMPTS)
    assert [state.serving for state in sync.status()] == ["dirty"]
    sync.push(f"good-{point}-{value}")
    assert serves(llm, reference, 3)


def changed(weights: Weights, name: str, tensor: torch.Tensor | None) -> None:
    del weights[name]
    if tensor is not None:
        weights[name] = tensor


REFUSED: list[tuple[str, Callable[[Weights], None], str]] = [
    ("a tensor is missing", lambda w: changed(w, "model.norm.weight", None), "model.norm.weight"),
    ("a tensor is unknown", lambda w: w.update({"model.layers.0.surprise.weight": torch.zeros(2)}), "model.layers.0.surprise.weight"),
    ("a shape is too small", lambda w: changed(w, "model.layers.0.mlp.down_proj.weight", torch.zeros(64, 95).bfloat16()), "down_proj"),
    ("a shape is too large", lambda w: changed(w, "model.layers.0.self_attn.q_proj.weight", torch.zeros(256, 64).bfloat16()), "q_proj"),
    ("a dtype is another", lambda w: changed(w, "model.norm.weight", torch.ones(64)), "model.norm.weight"),
    ("half a fused layer", lambda w: changed(w, "model.layers.1.self_attn.k_proj.weight", None), "qkv_proj.weight"),
]


@pytest.mark.parametrize(("change", "name"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_wrong_tensors_are_refused_before_a_byte_moves(
    llm: Any, sync: WeightSync, weights: Weights, reference: Callable[..., Any], change: Callable[[Weights], None], name: str
) -> None:
    """Invariant 4: the message names the tensor and the engine, and the engine serves what it served."""
    change(weights)
    with pytest.raises(PlanError, match=name) as failure:
        sync.push("wrong")
    assert "vllm" in str(failure.value)
    assert serves(llm, reference, 2)


def test_nan_is_allowed_and_reported(llm: Any, sync: WeightSync, weights: Weights, reference: Callable[..., Any]) -> None:
    spoiled = weights["model.norm.weight"].clone()
    spoiled[3] = float("nan")
    good, weights["model.norm.weight"] = weights["model.norm.weight"], spoiled
    assert sync.push("with-nan").non_finite == ("model.norm.weight",)
    weights["model.norm.weight"] = good
    assert sync.push("without-nan").non_finite == ()
    assert serves(llm, reference, 3)


def test_versions_go_forward(llm: Any, sync: WeightSync, reference: Callable[..., Any]) -> None:
    """A version twice, an older one, a wrong base: refused, and the engine serves what it served."""
    sync.push("n1")
    sync.push("n2", base="n1")
    for version, base in [("n2", None), ("n1", None), ("n3", "n1")]:
        with pytest.raises(VersionConflict):
            sync.push(version, base=base)
    assert versions(llm, PROMPTS[0]) == [("n2", 0, 3)]
    assert serves(llm, reference, 3)


def test_bytes_that_change_on_the_way_are_refused(llm: Any, sync: WeightSync, reference: Callable[..., Any]) -> None:
    """Invariant 5: a digest that differs keeps the old version and its label."""

    def corrupt(event: Event) -> None:
        if event.kind == "phase" and event.phase == "prepare":
            segment = next(iter(sync._session.transport.candidates["shm"].segments.values()))
            segment.view[1000] ^= 1

    sync._session.sinks = [corrupt]
    with pytest.raises(DigestMismatch) as failure:
        sync.push("corrupted")
    assert [state.serving for state in failure.value.engines] == ["old"]
    assert serves(llm, reference, 2)


def test_the_trainer_may_step_as_soon_as_the_weights_are_copied(
    llm: Any, sync: WeightSync, weights: Weights, reference: Callable[..., Any]
) -> None:
    def step(event: Event) -> None:
        if event.kind == "phase" and event.phase == "prepare":
            for tensor in weights.values():
                tensor.add_(1.0)

    sync._session.sinks = [step]
    sync.push("stepped-meanwhile")
    assert serves(llm, reference, 3)


def test_a_worker_that_is_late_fails_within_the_deadline_and_is_taken_back(
    llm: Any, sync: WeightSync, reference: Callable[..., Any]
) -> None:
    """Invariant 3. A commit that answers after its deadline is found out by the next call, and not taken for another trainer's."""
    sync._session.fleet.members[0].timeout = 1.0
    llm.collective_rpc("inject", args=("hang:commit", 3.0))
    started = time.monotonic()
    with pytest.raises(EngineTimeout, match="commit within 1 s") as failure:
        sync.push("late")
    assert time.monotonic() - started < 2.9
    assert [state.serving for state in failure.value.engines] == ["unknown"]
    with pytest.raises(EngineDirty):
        greedy(llm, PROMPTS)
    sync._session.fleet.members[0].timeout = 30.0
    assert [(state.serving, state.version) for state in sync.status()] == [("old", "late")]
    assert serves(llm, reference, 3)
    sync.push("after-late")


@pytest.mark.parametrize("require", ["all", "any"])
def test_a_stuck_engine_does_not_hold_up_the_other(llm: Any, weights: Weights, reference: Callable[..., Any], require: Any) -> None:
    """Two engines, one hangs in prepare: with "all" nobody commits, with "any" vLLM serves the new version."""
    stuck = MemoryEngine(weights, name="stuck")
    with WeightSync(source=weights, engines=[llm, stuck], require=require, timeout=30) as sync:
        sync.push(f"both-{require}")
        weights.update(tiny("llama", 3).state_dict())
        for member in sync._session.fleet.members:
            member.timeout = 2.0
        stuck.inject("prepare", "hang")
        started = time.monotonic()
        if require == "all":
            with pytest.raises(SyncError, match="stuck did not answer prepare"):
                sync.push("one-stuck-all")
        else:
            receipt = sync.push("one-stuck-any")
            assert [engine.engine for engine in receipt.engines] == ["vllm"]
            assert [state.engine for state in receipt.failed] == ["stuck"]
        assert time.monotonic() - started < 4.0
        assert serves(llm, reference, 2 if require == "all" else 3)


def test_errors_of_every_kind_are_instep_errors(llm: Any, sync: WeightSync) -> None:
    """A worker's method never raises across vLLM's RPC, so the engine keeps step with its workers (invariant 7)."""
    for method in ("nonsense", "commit", "prepare"):
        reply = llm.collective_rpc("instep_call", args=(method, b"\xff not msgpack"))
        assert isinstance(reply[0], bytes)
    with pytest.raises(InstepError):
        sync.push("bad name with spaces")
    sync.push("still-in-step")


def test_weights_that_vllm_reloads_itself_lose_the_label_until_the_next_push(
    llm: Any, sync: WeightSync, checkpoints: Callable[[str, int], Path], reference: Callable[..., Any]
) -> None:
    sync.push("ours")
    assert versions(llm, PROMPTS[0])[0][0] == "ours"
    llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoints("llama", 2))})
    llm.reset_prefix_cache()
    assert versions(llm, PROMPTS[0])[0][0] == "unknown"
    assert "serves weights that no push brought: CPUWorker.reload_weights changed the weights" in str(sync.status()[0])
    receipt = sync.catch_up()
    assert [engine.engine for engine in receipt.engines] == ["vllm"]
    assert serves(llm, reference, 3)
    assert versions(llm, PROMPTS[0])[0][0] == "ours"
    llm.collective_rpc("reload_weights")
    sync.push("ours-again")
    assert serves(llm, reference, 3)
    assert sync.status()[0].changed is None


@pytest.mark.parametrize("at_once", [True, False])
def test_a_push_that_is_cancelled_leaves_a_vllm_that_generates(llm: Any, reference: Callable[..., Any], at_once: bool) -> None:
    """... whatever it waited for: all of one version, under its label, and the next push works."""
    engine, ended = VllmEngine(llm), set()
    engine.at_once = at_once
    source = dict(tiny("llama", 2).state_dict())
    with WeightSync(source, [engine], timeout=30) as sync:
        for at in itertools.count(1, 3):
            old, new = f"old-{at_once}-{at}", f"new-{at_once}-{at}"
            source.update(tiny("llama", 2).state_dict())
            sync.push(old)
            source.update(tiny("llama", 3).state_dict())
            interrupts = Interrupts(at, "cancel")
            with suppress(asyncio.CancelledError):
                interrupts.run(lambda: sync.apush(new))  # noqa: B023
            (state,) = sync.status()
            assert state.version in (old, new)
            assert serves(llm, reference, 3 if state.version == new else 2)
            assert versions(llm, PROMPTS[0]) == [(state.version, 0, 3)]
            ended.add(state.version == new)
            if not interrupts.done:
                break
    assert ended == {False, True}
