"""The loss of the demo, against the plain way to compute it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from instep.demo import grpo
from instep.demo.grpo import Group

GROUPS = [
    Group([1, 2, 3], [[4, 5], [6, 7, 8], [9]], [[-1.0, -2.0], [-0.5, -1.5, -2.5], [-3.0]], [0.0, 1.0, 0.5]),
    Group([10, 11], [[12], [13, 14]], [[-1.0], [-2.0, -0.1]], [1.0, 0.0]),
]


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def one_by_one(model: Any) -> torch.Tensor:
    """A forward pass for each completion, with its prompt and nothing else."""
    parts = []
    for group in GROUPS:
        for completion in group.completions:
            logits = model(torch.tensor([group.prompt + completion])).logits[0, len(group.prompt) - 1 : -1]
            parts.append(torch.log_softmax(logits.float(), -1)[range(len(completion)), completion])
    return torch.cat(parts)


def test_packed_groups_give_each_completion_the_log_probabilities_it_has_alone(model: Any) -> None:
    packed = grpo.token_logprobs(model, grpo.pack(GROUPS))
    torch.testing.assert_close(packed, one_by_one(model), atol=1e-5, rtol=0)


def test_packed_groups_give_the_same_gradient(model: Any) -> None:
    batch = grpo.pack(GROUPS)

    def gradient(logprobs: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        grpo.loss(logprobs, batch).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    packed, plain = gradient(grpo.token_logprobs(model, batch)), gradient(one_by_one(model))
    assert plain.abs().max() > 1e-3
    torch.testing.assert_close(packed, plain, atol=1e-6, rtol=1e-4)


def test_each_token_carries_what_belongs_to_its_completion() -> None:
    batch = grpo.pack(GROUPS)
    assert batch.targets.tolist() == [4, 5, 6, 7, 8, 9, 12, 13, 14]
    assert batch.logprobs.tolist() == pytest.approx([-1.0, -2.0, -0.5, -1.5, -2.5, -3.0, -1.0, -2.0, -0.1])
    first, second = grpo.advantages([0.0, 1.0, 0.5]).tolist(), grpo.advantages([1.0, 0.0]).tolist()
    expected = [first[0]] * 2 + [first[1]] * 3 + [first[2]] + [second[0]] + [second[1]] * 2
    assert batch.advantages.tolist() == pytest.approx(expected)


def test_advantages_are_normalised_within_a_group() -> None:
    values = grpo.advantages([0.0, 0.0, 1.0, 3.0])
    assert values.mean() == pytest.approx(0.0, abs=1e-6)
    assert values.std(correction=0) == pytest.approx(1.0, abs=1e-4)


def test_equal_rewards_teach_nothing() -> None:
    assert grpo.advantages([0.5] * 4).tolist() == [0.0] * 4
    assert not Group([1], [[2], [3]], [[-1.0], [-1.0]], [1.0, 1.0]).teaches
    assert GROUPS[0].teaches


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(1.0, 1.0, True), (1.5, 1.0, False), (1.5, -1.0, True), (0.5, 1.0, True), (0.5, -1.0, False)],
)
def test_the_clip_stops_a_token_only_once_it_has_moved_the_way_it_should(ratio: float, advantage: float, moves: bool) -> None:
    batch = grpo.pack([Group([1], [[2], [3]], [[-1.0], [-1.0]], [1.0, 0.0] if advantage > 0 else [0.0, 1.0])])
    logprobs = torch.tensor([-1.0, -1.0]) + torch.tensor([ratio, 1.0]).log()
    logprobs.requires_grad_()
    grpo.loss(logprobs, batch).backward()
    assert logprobs.grad is not None
    assert bool(logprobs.grad[0] != 0) == moves
    if moves:
        assert logprobs.grad[0].sign() == -advantage  # gradient descent raises what was better than its group
