"""The direct path against a real vLLM: a linear method that keeps plain weights, as on a GPU, so that layers are promoted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import AMX, Generated, greedy
from models import PROMPTS, tiny

from instep import WeightSync


@pytest.fixture(scope="module")
def llm(engine: Callable[..., Any], checkpoints: Callable[[str, int], Path]) -> Any:
    return engine(checkpoints("qwen3", 1), worker_extension_cls="plain_layers.PlainExtension")


def alike(found: Generated, wanted: Generated) -> bool:
    """Bit for bit, but where the reference computes with packed weights: its kernel rounds otherwise."""
    if not AMX:
        return found == wanted
    same = [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    return same and all(scores == pytest.approx(others, abs=1e-4) for (_, scores), (_, others) in zip(found, wanted, strict=True))


def test_promoted_layers_are_copied_straight_into_live_storage(llm: Any, reference: Callable[..., Any]) -> None:
    """From the first push on, without a reload session: every layer is read back bit for bit, and no address moves."""
    model = tiny("qwen3", 2)
    before = llm.collective_rpc("addresses")
    with WeightSync(source=model, engines=[llm], canary=PROMPTS[0]) as sync:
        (first,) = sync.push("one").engines
        assert (first.reload, first.initial) == ({}, 0)
        assert first.compared == len(first.direct) >= 9
        assert alike(greedy(llm, PROMPTS), reference("qwen3", 2))
        model.load_state_dict(tiny("qwen3", 3).state_dict())
        receipt = sync.push("two")
        assert alike(greedy(llm, PROMPTS), reference("qwen3", 3))
        assert llm.collective_rpc("addresses") == before
        (engine,) = receipt.engines
        assert engine.reload == {}
        assert len(engine.direct) >= 9
        assert engine.read_back == receipt.tensors
