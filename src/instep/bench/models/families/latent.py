"""Families with attention over a compressed cache (MLA): keys and values of all heads come from
one vector."""

from __future__ import annotations

from instep.bench.models.families.experts import ROUTED
from instep.bench.models.families.family import SIZES, TIED, Family

LATENT = SIZES | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
"""vLLM's kernels for MLA are made for these sizes alone."""

SECOND_LAYER = {"first_k_dense_replace": 1}

FAMILIES = {
    "deepseek-v2-dense": Family("DeepseekV2Config", LATENT | ROUTED | {"first_k_dense_replace": 2}),
    "deepseek-v2": Family("DeepseekV2Config", LATENT | ROUTED | SECOND_LAYER),
    "deepseek-v3": Family("DeepseekV3Config", LATENT | ROUTED | SECOND_LAYER | {"topk_method": "noaux_tc"}),
    "glm4-moe-lite": Family(
        "Glm4MoeLiteConfig",
        LATENT | ROUTED | SECOND_LAYER | {"mlp_layer_types": ["dense", "sparse"]},
    ),
    "minicpm3": Family(
        "MiniCPM3Config",
        LATENT | TIED | {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64},
    ),
    "longcat-flash": Family(
        "LongcatFlashConfig",
        LATENT
        | {
            "num_layers": 1,
            "ffn_hidden_size": 256,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 128,
            "zero_expert_type": "identity",
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
        },
    ),
    "ax-k1": Family("AXK1Config", LATENT | ROUTED | SECOND_LAYER),
}
