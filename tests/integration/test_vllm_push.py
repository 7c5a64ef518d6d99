"""A vLLM that started with random weights serves, after a push, what a vLLM that loads the checkpoint from disk serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import greedy, keeps_plain_weights, versions
from models import PROMPTS, tiny

from instep import PairSource, WeightSync
from instep.engine.vllm.engine import VllmEngine
from instep.verify import verify

FAMILIES = ("qwen3", "llama", "qwen3_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, engine: Callable[..., Any], checkpoints: Callable[[str, int], Path]) -> tuple[str, Any]:
    return request.param, engine(checkpoints(request.param, 1))


def test_pushes_follow_the_trainer_bit_for_bit(served: tuple[str, Any], reference: Callable[..., Any]) -> None:
    """Push, push other weights, push the first again: tokens and log-probabilities are those of a fresh engine each time, under the new
    label, and prompts seen before are not answered from a stale prefix cache."""
    family, llm = served
    first, second = tiny(family, 2), tiny(family, 3)
    assert greedy(llm, PROMPTS) != reference(family, 2)
    # A random router is full of near ties that the two implementations round apart: no canary there, the oracle below is stricter.
    canary = PROMPTS[0] if family != "qwen3_moe" else None
    with WeightSync(source=(model := first), engines=[llm], canary=canary, canary_bound=0.2) as sync:
        receipt = sync.push("one")
        assert greedy(llm, PROMPTS) == reference(family, 2)
        assert versions(llm, PROMPTS[0]) == [("one", 0, 3)]
        assert canary is None or (receipt.canary_gap is not None and receipt.canary_gap < 0.2)

        originals = {name: param.detach().clone() for name, param in model.named_parameters()}
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(second.get_parameter(name))
        sync.push("two")
        assert greedy(llm, PROMPTS) == reference(family, 3)

        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(originals[name])
        sync.push("three", base="two")
        assert greedy(llm, PROMPTS) == reference(family, 2)
        assert versions(llm, PROMPTS[0]) == [("three", 0, 3)]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_commit_is_one_call_to_vllm_or_one_for_each_step(
    served: tuple[str, Any], reference: Callable[..., Any], at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the plug-in in vLLM's process a commit goes step by step, to the same end."""
    family, llm = served
    called: list[str] = []
    utility = VllmEngine._utility

    def noted(self: VllmEngine, method: str, *args: Any) -> Any:
        called.append(method)
        return utility(self, method, *args)

    monkeypatch.setattr(VllmEngine, "_utility", noted)
    engine = VllmEngine(llm)
    assert engine.at_once
    engine.at_once = at_once
    with WeightSync(source=tiny(family, 2), engines=[engine]) as sync:
        for version in (f"first-{at_once}", f"second-{at_once}"):
            called.clear()
            sync.push(version)
            assert called == (["instep_commit"] if at_once else ["pause_scheduler", "resume_scheduler"])
            assert greedy(llm, PROMPTS) == reference(family, 2)
            assert versions(llm, PROMPTS[0]) == [(version, 0, 3)]


def test_a_checkpoint_directory_is_a_source(
    served: tuple[str, Any], checkpoints: Callable[[str, int], Path], reference: Callable[..., Any]
) -> None:
    family, llm = served
    with WeightSync(source=checkpoints(family, 3), engines=[llm]) as sync:
        sync.push("from-disk")
    assert greedy(llm, PROMPTS) == reference(family, 3)


def test_pairs_that_share_one_buffer_are_a_source(served: tuple[str, Any], reference: Callable[..., Any]) -> None:
    """Held in the first round and streamed in the second one."""
    family, llm = served
    with WeightSync(PairSource(), [llm]) as sync:
        for seed in (3, 2):
            weights = tiny(family, seed).state_dict()
            room = torch.empty(max(value.numel() for value in weights.values()), dtype=torch.bfloat16)
            pairs = ((name, room[: value.numel()].view(value.shape).copy_(value)) for name, value in weights.items())
            sync.push(f"pairs-{seed}", pairs=pairs)
            assert greedy(llm, PROMPTS) == reference(family, seed)


def test_what_is_served_is_told_from_another_checkpoint(served: tuple[str, Any], checkpoints: Callable[[str, int], Path]) -> None:
    """Also where vLLM keeps weights in another order: its experts on the CPU."""
    family, llm = served
    with WeightSync(source=checkpoints(family, 3), engines=[llm]) as sync:
        sync.push("compared")
    same, other = (asyncio.run(verify(checkpoints(family, seed), llm)) for seed in (3, 2))
    assert (same.version, same.differing) == ("compared", {})
    assert same.equal > 0
    plain = keeps_plain_weights()
    packed = (".experts.",) if plain else (".experts.", "_proj.", "lm_head.", ".gate.")
    assert all(any(part in name for part in packed) for name in same.unread)
    assert bool(same.unread) == (not plain or family == "qwen3_moe")
    assert other.differing


def test_stock_reload_of_experts_is_wrong(reference: Callable[..., Any]) -> None:
    """vLLM's own reload leaves expert weights unpacked on the CPU; the tests above show that a push packs them."""
    assert reference("qwen3_moe", 2, "stock_reload") != reference("qwen3_moe", 2)


def test_stock_reload_of_a_tied_packed_head_is_wrong_and_a_push_right(reference: Callable[..., Any]) -> None:
    """Where the head keeps a packed copy of a tied weight, vLLM's own reload leaves it at the old weights."""
    assert reference("qwen3", 2, "packed_stock_reload") != reference("qwen3", 2, "packed_fresh")
    assert reference("qwen3", 2, "packed_push") == reference("qwen3", 2, "packed_fresh")
