"""The canary: what an engine computes against what the trainer computes, since digests cannot see derived state (invariant 5)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.hanging import hang
from torch import nn

from instep import MemoryEngine, TransformersEngine, WeightSync
from instep.errors import ApplyError, CanaryError, EngineDirty, EngineTimeout, SourceError
from instep.protocol import Method

pytestmark = pytest.mark.usefixtures("segments", "deadlines")

CANARY = [5, 17, 3, 40]


def model_of(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """The trainer's, and the one that engines start from."""
    return model_of(1), model_of(0)


def engine_of(model: Any, name: str = "transformers") -> TransformersEngine:
    return TransformersEngine(copy.deepcopy(model), name=name)


def sabotage(engine: TransformersEngine) -> Any:
    """Derived state that does not follow the weights: the engine scales its logits. Returns what ends it."""
    return engine.model.lm_head.register_forward_hook(lambda module, args, output: output * 3)


def test_the_gap_of_a_whole_engine_is_nothing(models: tuple[Any, Any]) -> None:
    trainer, first = models
    engine = engine_of(first)
    with WeightSync(trainer, [engine], canary=CANARY, canary_bound=1e-3) as sync:
        receipt = sync.push("a")
    assert receipt.canary_gap is not None
    assert receipt.canary_gap < 1e-6
    assert f"canary gap {receipt.canary_gap:.2g}" in str(receipt)
    assert receipt.as_dict()["canary_gap"] == receipt.canary_gap


def test_an_engine_that_computes_something_else_must_not_generate(models: tuple[Any, Any]) -> None:
    trainer, first = models
    engine = engine_of(first)
    with WeightSync(trainer, [engine], canary=CANARY, canary_bound=0.01) as sync:
        scaled = sabotage(engine)
        with pytest.raises(CanaryError, match="transformers computes something else than the trainer: log-probabilities differ") as caught:
            sync.push("a")
        assert "the bound is 0.01" in str(caught.value)
        assert [state.serving for state in caught.value.engines] == ["dirty"]
        with pytest.raises(EngineDirty, match="log-probabilities differ"):
            engine.generate([[1]], max_tokens=1)
        assert [state.serving for state in sync.status()] == ["dirty"]
        with pytest.raises(CanaryError):
            sync.catch_up()
        scaled.remove()
        assert sync.push("b").canary_gap is not None
        assert engine.generate([[1]], max_tokens=1)[0].weight_version == "b"
        assert [state.serving for state in sync.status()] == ["old"]


def test_catch_up_heals_it_too(models: tuple[Any, Any]) -> None:
    trainer, first = models
    engine = engine_of(first)
    with WeightSync(trainer, [engine], canary=CANARY, canary_bound=0.01) as sync:
        scaled = sabotage(engine)
        with pytest.raises(CanaryError):
            sync.push("a")
        scaled.remove()
        assert sync.catch_up().version == "a"
    assert engine.generate([[1]], max_tokens=1)[0].weight_version == "a"


@pytest.mark.parametrize("require", ["all", "any"])
def test_only_the_engine_that_differs_is_refused(models: tuple[Any, Any], require: Any) -> None:
    trainer, first = models
    good, bad = engine_of(first, "good"), engine_of(first, "bad")
    sabotage(bad)
    with WeightSync(trainer, [bad, good], canary=CANARY, canary_bound=0.01, require=require) as sync:
        if require == "all":
            with pytest.raises(CanaryError) as caught:
                sync.push("a")
            assert {state.engine: state.serving for state in caught.value.engines} == {"bad": "dirty", "good": "new"}
        else:
            receipt = sync.push("a")
            assert [engine.engine for engine in receipt.engines] == ["good"]
            assert [(state.engine, state.serving) for state in receipt.failed] == [("bad", "dirty")]
            assert receipt.canary_gap is not None
            assert receipt.canary_gap < 0.01
    assert good.generate([[1]], max_tokens=1)[0].weight_version == "a"
    with pytest.raises(EngineDirty):
        bad.generate([[1]], max_tokens=1)


def test_a_score_that_is_no_number_is_no_proof(models: tuple[Any, Any]) -> None:
    trainer, first = models
    engine = engine_of(first)
    engine.model.lm_head.register_forward_hook(lambda module, args, output: output * float("nan"))
    with WeightSync(trainer, [engine], canary=CANARY) as sync, pytest.raises(CanaryError, match="by up to nan"):
        sync.push("a")


@pytest.mark.parametrize("require", ["all", "any"])
def test_an_engine_that_does_not_answer_the_canary(models: tuple[Any, Any], require: Any) -> None:
    trainer, first = models
    stuck, other = engine_of(first, "stuck"), engine_of(first, "other")

    async def never(token_ids: list[int]) -> list[float]:
        await hang()
        return []

    stuck.score = never  # type: ignore[method-assign]
    with WeightSync(trainer, [stuck, other], canary=CANARY, require=require) as sync:
        if require == "all":
            with pytest.raises(EngineTimeout, match="stuck did not answer canary within 60 s"):
                sync.push("a")
        else:
            receipt = sync.push("a")
            assert [engine.engine for engine in receipt.engines] == ["other"]
            assert [state.engine for state in receipt.failed] == ["stuck"]


def test_the_trainers_word_is_of_the_moment_of_the_copy(models: tuple[Any, Any]) -> None:
    """Steps after the copy change the trainer's own log-probabilities, not what the engine is held to."""
    trainer, first = copy.deepcopy(models[0]), models[1]

    def step(event: Any) -> None:
        if event.phase == "prepare":
            with torch.no_grad():
                for parameter in trainer.parameters():
                    parameter.mul_(2)

    engine = engine_of(first)
    with WeightSync(trainer, [engine], canary=CANARY, canary_bound=1e-3, sinks=[step]) as sync:
        assert sync.push("a").canary_gap is not None


class StuckEngine(TransformersEngine):
    """Hangs in the calls named in `stuck`."""

    stuck: frozenset[str] = frozenset()

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        if method in self.stuck:
            await hang()
        return await super().call(method, payload)


def test_a_version_keeps_its_own_canary(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the trainer said of a later version, which reached nobody, is not asked of an engine that catches up with the current one."""
    trainer = copy.deepcopy(models[0])
    good, late = engine_of(models[1], "good"), StuckEngine(copy.deepcopy(models[1]), "late")
    with WeightSync(trainer, [good, late], canary=CANARY, canary_bound=1e-3, require="any") as sync:
        late.stuck = frozenset({"commit"})
        assert [state.engine for state in sync.push("a").failed] == ["late"]
        late.stuck = frozenset({"abort", "hello"})  # so that the first version has to be kept for it
        with torch.no_grad():
            trainer.lm_head.weight.mul_(-4)
        monkeypatch.setattr(good.receiver, "open_reader", lambda manifest, me: raise_(OSError("no shared memory")))
        with pytest.raises(ApplyError, match="good: OSError: no shared memory"):
            sync.push("b")
        late.stuck = frozenset()
        receipt = sync.catch_up()
    assert (receipt.version, [engine.engine for engine in receipt.engines]) == ("a", ["late"])
    assert receipt.canary_gap is not None


def raise_(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("source", ["state dict", "no language model"])
def test_a_canary_that_the_trainer_cannot_score_is_refused(source: str) -> None:
    module = nn.Linear(3, 2)
    given = module.state_dict() if source == "state dict" else module
    engine = MemoryEngine(module.state_dict())
    with WeightSync(given, [engine], canary=CANARY) as sync, pytest.raises(SourceError, match="no forward that scores the canary"):
        sync.push("a")
    assert engine.version is None
    assert "prepare" not in engine.calls
    with WeightSync(given, [engine]) as sync:
        receipt = sync.push("a")
    assert receipt.canary_gap is None
    assert "canary gap" not in str(receipt)
