"""A mixture whose router vLLM keeps in float32, beside a trainer in bfloat16: it is widened, which rounds nothing and needs no leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import greedy
from models import PROMPTS, save

from instep import WeightSync
from instep.errors import PlanError


def mixture(seed: int) -> Any:
    from transformers import AutoModelForCausalLM, Glm4MoeConfig

    torch.manual_seed(seed)
    config = Glm4MoeConfig(
        vocab_size=150, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=128, initializer_range=0.2, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape) * 0.1)
    return model


@pytest.fixture(scope="module")
def llm(engine: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Loaded from disk, with the weights of seed 2."""
    return engine(save(mixture(2), tmp_path_factory.mktemp("mixture")), load_format="auto")


def test_float32_parts_of_an_engine_take_the_values_of_a_bfloat16_trainer(llm: Any) -> None:
    from_disk, model = greedy(llm, PROMPTS), mixture(3)
    with WeightSync(source=model, engines=[llm]) as sync:
        sync.push("away")
        assert greedy(llm, PROMPTS) != from_disk
        model.load_state_dict(mixture(2).state_dict())
        for version in ("back", "again"):
            sync.push(version)
            assert greedy(llm, PROMPTS) == from_disk
        plan = sync._session.fleet.members[0].plan
    assert plan is not None
    assert plan.widened["model.layers.1.mlp.gate.e_score_correction_bias"] == "float32"
    assert (plan.rounded, plan.casts) == ({}, plan.widened)


def test_only_what_would_be_rounded_is_named(llm: Any) -> None:
    """The router's bias in half precision is widened, the norm in float32 would be rounded."""
    source = dict(mixture(2).state_dict())
    for name in source:
        source[name] = source[name].half() if name.endswith("e_score_correction_bias") else source[name]
    source["model.norm.weight"] = source["model.norm.weight"].float()
    before = greedy(llm, PROMPTS)
    with (
        WeightSync(source=source, engines=[llm]) as sync,
        pytest.raises(
            PlanError, match=r"1 tensors would be rounded, the first is model\.norm\.weight: float32 in the source, bfloat16 in the engine"
        ),
    ):
        sync.push("v1")
    assert greedy(llm, PROMPTS) == before
