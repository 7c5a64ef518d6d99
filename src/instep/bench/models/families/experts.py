"""Families with layers of experts behind a router."""

from __future__ import annotations

from instep.bench.models.families.family import HEADS, SIZES, TIED, WINDOW, Family

LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
"""The names of DeepSeek and of those that followed it: a dense layer first, then experts."""

SECOND_LAYER = {"mlp_layer_types": ["dense", "sparse"]}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1}
LLAMA_4 = HEADS | {
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 128,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 128,
}

FAMILIES = {
    "mixtral": Family("MixtralConfig", HEADS | LOCAL),
    "qwen2-moe": Family("Qwen2MoeConfig", SIZES | EXPERTS | {"shared_expert_intermediate_size": 128}),
    "qwen3-moe": Family("Qwen3MoeConfig", HEADS | EXPERTS | {"norm_topk_prob": True}),
    "olmoe": Family("OlmoeConfig", SIZES | EXPERTS),
    "flex-olmo": Family("FlexOlmoConfig", SIZES | {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": Family("GraniteMoeConfig", SIZES | LOCAL),
    "granitemoe-shared": Family("GraniteMoeSharedConfig", SIZES | LOCAL | {"shared_intermediate_size": 128}),
    "phimoe": Family("PhimoeConfig", HEADS | LOCAL | {"attention_bias": True, "lm_head_bias": True}),
    "gpt-oss": Family("GptOssConfig", HEADS | LOCAL | WINDOW | {"rope_parameters": YARN}),
    "llama4-text": Family("Llama4TextConfig", LLAMA_4),
    "ernie4.5-moe": Family("Ernie4_5_MoeConfig", HEADS | TIED | ERNIE | {"moe_intermediate_size": 128}),
    "glm4-moe": Family("Glm4MoeConfig", HEADS | ROUTED | {"attention_bias": True, "use_qk_norm": True}),
    "dots1": Family("Dots1Config", HEADS | ROUTED | {"first_k_dense_replace": 1}),
    "hunyuan-moe": Family("HunYuanMoEV1Config", HEADS | {"num_experts": 4, "moe_topk": 2}),
    "minimax-m2": Family(
        "MiniMaxM2Config",
        HEADS | LOCAL | {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "afmoe": Family(
        "AfmoeConfig",
        HEADS
        | EXPERTS
        | WINDOW
        | {
            "num_shared_experts": 1,
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "exaone-moe": Family("ExaoneMoeConfig", SIZES | EXPERTS | WINDOW | SECOND_LAYER),
    "mellum": Family("MellumConfig", HEADS | EXPERTS | WINDOW),
    "hy-v3": Family(
        "HYV3Config",
        HEADS | EXPERTS | SECOND_LAYER | {"first_k_dense_replace": 1, "expert_hidden_dim": 128, "route_norm": True},
    ),
}
