"""Pushes to engines that store other dtypes than the trainer's: wider ones change no value, narrower ones need leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.call_by_call import serves, weights
from helpers.toys import ToyHost, checkpoint

from instep import MemoryEngine, WeightSync
from instep.errors import PlanError
from unit.dropin.test_dropin_rounds import alone, send
from unit.test_push import is_fresh

pytestmark = pytest.mark.usefixtures("segments")


def test_a_cast_rounds_as_pytorch_does() -> None:
    source = checkpoint(1, dtype=torch.float32)
    engine = MemoryEngine(checkpoint(0))
    with WeightSync(source, [engine], cast=True) as sync:
        receipt = sync.push("v1")
    assert is_fresh(engine, {name: tensor.bfloat16() for name, tensor in source.items()})
    assert receipt.nbytes == sum(tensor.nbytes for tensor in source.values()) // 2


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_wider_engine_gets_the_very_values_without_a_cast(transport: Any) -> None:
    source, engine = checkpoint(1), MemoryEngine(checkpoint(0, dtype=torch.float32), tp=2)
    with WeightSync(source, [engine], transport=transport) as sync:
        for version in "abc":
            for tensor in source.values():
                tensor.mul_(-1.5)
            receipt = sync.push(version)
            assert is_fresh(engine, {name: tensor.float() for name, tensor in source.items()})
    assert receipt.nbytes == 2 * sum(tensor.nbytes for tensor in source.values())
    assert not receipt.engines[0].unproved


def test_a_tied_trainer_reaches_an_engine_that_keeps_its_head_wider() -> None:
    source = checkpoint(1, tied=True)
    source["lm_head.weight"] = source["model.embed_tokens.weight"]
    start = checkpoint(0)
    engine = MemoryEngine(start | {"lm_head.weight": start["lm_head.weight"].float()})
    with WeightSync(source, [engine]) as sync:
        for version in "abc":
            source["lm_head.weight"].mul_(-1.5)
            receipt = sync.push(version).engines[0]
            assert is_fresh(engine, source | {"lm_head.weight": source["lm_head.weight"].float()})
    assert "lm_head" in receipt.direct
    assert not receipt.unproved


def test_engines_that_store_different_dtypes_cannot_share_a_push() -> None:
    engines = [MemoryEngine(checkpoint(0, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16)]
    with (
        WeightSync(checkpoint(1, dtype=torch.float32), engines, cast=True) as sync,
        pytest.raises(PlanError, match="in different dtypes, bfloat16 and float16"),
    ):
        sync.push("v1")


def test_a_new_engine_of_another_dtype_cannot_catch_up() -> None:
    engines = [MemoryEngine(checkpoint(0, dtype=dtype), name=str(dtype)) for dtype in (torch.bfloat16, torch.float32)]
    with WeightSync(checkpoint(1), engines[:1]) as sync:
        sync.push("v1")
        with pytest.raises(PlanError, match="in different dtypes, bfloat16 and float32"):
            sync.catch_up(engines[1])
    assert is_fresh(engines[1], checkpoint(0, dtype=torch.float32))


def test_tensors_that_come_one_by_one_are_widened_too(host: ToyHost) -> None:
    rounds = alone(host)
    for value in (1.5, -2.5):
        send(rounds, {name: tensor.bfloat16() for name, tensor in weights(value).items()})
        rounds.finish()
        assert serves(host, value)
