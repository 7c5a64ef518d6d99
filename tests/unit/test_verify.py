"""What `verify` says of an engine beside a source, and that it changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from helpers.toys import checkpoint

from instep import MemoryEngine, WeightSync
from instep.errors import EngineLost, PlanError, VersionConflict
from instep.source import open_source
from instep.verify import Verified, verify

pytestmark = pytest.mark.usefixtures("segments")

START, NEXT = checkpoint(0), checkpoint(1)


def verified(source: Any, engine: Any, **arguments: Any) -> Verified:
    return asyncio.run(verify(source, engine, **arguments))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("shape", [{}, {"moe": True}, {"tied": True}], ids=["dense", "moe", "tied"])
def test_an_engine_that_was_never_pushed_to_is_compared_with_what_it_loaded(tp: int, shape: dict[str, Any]) -> None:
    weights = checkpoint(0, **shape)
    found = verified(weights, MemoryEngine(weights, tp=tp))
    assert (found.equal, found.differing, found.unread) == (len(weights), {}, {})
    assert found.nbytes == sum(tensor.nbytes for tensor in weights.values())


@pytest.mark.parametrize("tp", [1, 2])
def test_after_a_push_the_engine_holds_the_new_weights_and_not_the_old(tp: int) -> None:
    engine = MemoryEngine(START, tp=tp)
    with WeightSync(NEXT, [engine]) as sync:
        sync.push("v1")
    assert verified(NEXT, engine).equal == len(NEXT)
    old = verified(START, engine)
    assert (old.version, old.equal) == ("v1", 0)
    assert old.differing.keys() == START.keys()


@pytest.mark.parametrize("tp", [1, 2])
def test_one_wrong_element_is_found_in_its_tensor(tp: int) -> None:
    engine = MemoryEngine(START, tp=tp)
    with WeightSync(NEXT, [engine]) as sync:
        sync.push("v1")
    engine.hosts[-1].model.get_parameter("model.layers.0.mlp.gate_up_proj.weight")[-1, -1] += 1
    found = verified(NEXT, engine)
    assert list(found.differing) == ["model.layers.0.mlp.up_proj.weight"]
    assert "digest" in found.differing["model.layers.0.mlp.up_proj.weight"]
    assert "no push has shown" not in found.differing["model.layers.0.mlp.up_proj.weight"]


def test_a_copy_that_one_worker_has_otherwise_is_found() -> None:
    engine = MemoryEngine(START, tp=2)
    engine.hosts[1].model.get_parameter("model.norm.weight")[0] += 1
    assert "different bytes" in verified(START, engine).differing["model.norm.weight"]


def test_where_no_push_has_shown_how_a_layer_is_kept_a_difference_says_so() -> None:
    found = verified(NEXT, MemoryEngine(START))
    vectors = {name for name, tensor in NEXT.items() if tensor.ndim < 2}
    assert {name for name, why in found.differing.items() if "no push has shown" not in why} == vectors


def test_weights_are_rounded_to_what_the_engine_stores() -> None:
    wide = {name: tensor.float() for name, tensor in START.items()}
    assert verified(wide, MemoryEngine(START)).equal == len(START)


def test_a_tensor_that_is_stored_in_two_dtypes_is_compared_in_both() -> None:
    tied = {name: tensor for name, tensor in START.items() if name != "lm_head.weight"}
    embedding = tied["model.embed_tokens.weight"]
    engine = MemoryEngine(tied | {"lm_head.weight": embedding.float()})
    source = tied | {"lm_head.weight": embedding}
    assert verified(source, engine).equal == len(tied)
    engine.hosts[0].model.get_parameter("lm_head.weight")[0, 0] *= 1 + 2**-20
    assert list(verified(source, engine).differing) == ["model.embed_tokens.weight"]


def test_a_layer_in_another_layout_is_counted_and_named() -> None:
    engine = MemoryEngine(NEXT)
    with WeightSync(START, [engine]) as sync:
        sync.push("v1")
    packed = engine.hosts[0].model.get_parameter("model.layers.0.self_attn.o_proj.weight")
    packed.data = packed.data.flatten()
    found = verified(START, engine)
    assert (found.equal, found.differing) == (len(START) - 1, {})
    assert "a layout of its own" in found.unread["model.layers.0.self_attn.o_proj.weight"]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_parameter_with_the_same_elements_in_another_order_is_no_difference(tp: int) -> None:
    """As vLLM's kernels for experts keep them. One element more or less is a difference again."""
    weights = checkpoint(0, moe=True)
    engine = MemoryEngine(weights, tp=tp)
    experts = [host.model.get_parameter("model.layers.0.mlp.experts.w13_weight") for host in engine.hosts]
    for packed in experts:
        packed.copy_(packed.flatten().flip(0).view(packed.shape).clone())
    found = verified(weights, engine)
    assert found.differing == {}
    assert {name.rpartition(".experts.")[0] for name in found.unread} == {"model.layers.0.mlp"}
    assert len(found.unread) == 6
    assert all("w13_weight in a layout of its own, with the same elements" in why for why in found.unread.values())
    experts[-1].view(-1)[5] += 1
    found = verified(weights, engine)
    assert len(found.differing) == 6
    assert found.unread == {}


def test_nothing_changes_and_the_next_push_is_as_fast_as_before() -> None:
    engine, weights = MemoryEngine(START), dict(START)
    with WeightSync(weights, [engine]) as sync:
        for seed in (1, 2):
            weights.update(checkpoint(seed))
            receipt = sync.push(f"v{seed}")
        before = engine.fingerprint()
        verified(weights, engine)
        verified({name: tensor.float() for name, tensor in weights.items()}, engine)
        assert (engine.fingerprint(), engine.version, engine.paused) == (before, "v2", False)
        weights.update(checkpoint(3))
        assert sync.push("v3").engines[0].direct == receipt.engines[0].direct != ()


def test_an_engine_between_two_versions_is_told_to_be_dirty() -> None:
    engine = MemoryEngine(START)
    engine.inject("tensor", tensor=3)
    with WeightSync(NEXT, [engine]) as sync, pytest.raises(Exception, match="told to fail"):
        sync.push("v1")
    found = verified(NEXT, engine)
    assert found.dirty
    assert found.differing


def test_the_canary_is_the_difference_of_two_log_probabilities() -> None:

    engine = MemoryEngine(START)
    scores = asyncio.run(engine.score([1, 2, 3]))

    class Source:
        def metadata(self) -> Any:
            return open_source(START).metadata()

        def tensors(self) -> Any:
            return iter(START.items())

        def stamp(self) -> Any:
            return 0

        def score(self, tokens: list[int]) -> list[float]:
            return [scores[0], scores[1] + 0.25]

    assert verified(Source(), engine, canary=[1, 2, 3]).canary_gap == pytest.approx(0.25, abs=1e-4)
    assert verified(START, engine, canary=[1, 2, 3]).canary_gap is None


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"cannot load \[9\]"):
        verified({**START, "model.norm.weight": torch.zeros(9, dtype=torch.bfloat16)}, MemoryEngine(START))


def test_an_engine_that_does_not_answer_is_an_error() -> None:
    engine = MemoryEngine(START)
    engine.dead = True
    with pytest.raises(EngineLost, match="is dead"):
        verified(START, engine)


def test_a_push_in_between_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MemoryEngine(START)
    call = engine.call

    async def pushed_to(method: Any, payload: bytes) -> Any:
        if method == "digest":
            engine.receivers[0].version = "v9"
        return await call(method, payload)

    monkeypatch.setattr(engine, "call", pushed_to)
    with pytest.raises(VersionConflict, match="'v9' while"):
        verified(START, engine)
