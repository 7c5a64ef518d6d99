"""Lists of tensors travel once: a later push names the one that the worker has, and another trainer has it traced no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.toys import attention

from instep import MemoryEngine, WeightSync
from instep.errors import PlanError
from instep.plan.routes import signature
from instep.protocol import Method, PrepareRequest, Request, TensorMeta, decode
from instep.receiver import state
from instep.receiver import trace as tracing
from instep.receiver.request import Lists

pytestmark = pytest.mark.usefixtures("segments")
WIDE = {name: tensor.to(torch.float64) for name, tensor in attention(1).items()}


class Listening(MemoryEngine):
    """Notes how many tensors each request to prepare lists."""

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        self.listed: list[int] = []

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        if method == "prepare":
            self.listed.append(len(decode(decode(payload, Request).body, PrepareRequest).manifest.tensors))
        return await super().call(method, payload)


def serves(engine: MemoryEngine, weights: dict[str, torch.Tensor]) -> bool:
    return engine.fingerprint() == MemoryEngine({name: tensor.bfloat16() for name, tensor in weights.items()}).fingerprint()


def test_the_list_that_was_traced_is_not_sent_again() -> None:
    source, engine = attention(1), Listening(attention(0))
    with WeightSync(source, [engine]) as sync:
        for version in ("a", "b"):
            sync.push(version)
    assert engine.listed == [0, 0]
    assert serves(engine, source)


def test_a_list_in_other_dtypes_is_sent_once() -> None:
    source, engine = dict(WIDE), Listening(attention(0))
    with WeightSync(source, [engine], cast=True) as sync:
        for version in ("a", "b", "c"):
            sync.push(version)
    assert engine.listed == [len(source), 0, 0]
    assert serves(engine, source)


@pytest.mark.parametrize("source", [attention(1), WIDE], ids=["as traced", "cast"])
def test_a_worker_that_has_lost_the_list_gets_it_in_the_same_push(source: Any) -> None:
    engine = Listening(attention(0))
    with WeightSync(source, [engine], cast=True) as sync:
        sync.push("a")
        engine.receivers[0].lists = Lists()
        engine.receivers[0].signature = None
        sync.push("b")
    assert engine.version == "b"
    assert serves(engine, source)


def test_another_trainer_of_the_same_tensors_has_nothing_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    trace = tracing.trace
    monkeypatch.setattr(state, "trace", lambda host, tensors: traced.append(len(tensors)) or trace(host, tensors))
    engine = MemoryEngine(attention(0), tp=2)
    for seed in (1, 2, 3):
        with WeightSync(attention(seed), [engine]) as sync:
            sync.push(f"v{seed}")
    assert len(traced) == 2  # one for each worker
    assert engine.fingerprint() == MemoryEngine(attention(3), tp=2).fingerprint()
    with WeightSync(WIDE, [engine], cast=True) as sync:
        sync.push("wide")
    assert len(traced) == 4


def test_weights_that_something_else_has_changed_are_traced_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    trace = tracing.trace
    monkeypatch.setattr(state, "trace", lambda host, tensors: traced.append(len(tensors)) or trace(host, tensors))
    engine = MemoryEngine(attention(0))
    for seed in (1, 2):
        with WeightSync(attention(seed), [engine]) as sync:
            sync.push(f"v{seed}")
        engine.receivers[0].withdraw("the engine loaded other weights")
    assert len(traced) == 2


def test_a_list_that_is_not_the_one_that_was_signed_is_refused() -> None:
    metas = [TensorMeta("w", "float32", (2,))]
    with pytest.raises(PlanError, match="not the one that was signed"):
        Lists()._listed(signature(metas), [TensorMeta("w", "float32", (3,))])


def test_digests_that_are_not_one_for_each_tensor_are_refused() -> None:
    from instep.plan.sums import named, vector

    metas = [TensorMeta("a", "float32", (2,)), TensorMeta("b", "float32", (2,)), TensorMeta("tied", "float32", (2,), "a")]
    assert named(vector({"a": 7, "b": 1 << 63}, metas), metas) == {"a": 7, "b": 1 << 63}
    assert named(vector({}, metas), metas) == {}
    for data in (b"12345678", b"1", bytes(24)):
        with pytest.raises(PlanError, match="are not one number for each of 2 tensors"):
            named(data, metas)
