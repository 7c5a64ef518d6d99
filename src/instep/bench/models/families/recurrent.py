"""Families with state spaces, linear attention or short convolutions, alone or beside attention."""

from __future__ import annotations

from instep.bench.models.families.experts import EXPERTS, LOCAL
from instep.bench.models.families.family import HEADS, SIZES, TIED, VOCABULARY, Family

MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SHARED = {"shared_expert_intermediate_size": 128}
JAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_d_state": 16,
    "mamba_dt_rank": 16,
    "use_mamba_kernels": False,
}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}

FAMILIES = {
    "mamba": Family("MambaConfig", MAMBA | {"state_size": 8}),
    "falcon-mamba": Family("FalconMambaConfig", MAMBA | {"state_size": 8}),
    "mamba2": Family("Mamba2Config", MAMBA | {"state_size": 16, "num_heads": 4, "head_dim": 32, "n_groups": 1}),
    "falcon-h1": Family("FalconH1Config", HEADS | MAMBA_2 | {"mamba_d_ssm": 512}),
    "jamba": Family("JambaConfig", SIZES | JAMBA),
    "bamba": Family("BambaConfig", SIZES | MAMBA_2 | {"attn_layer_indices": [1]}),
    "zamba2": Family(
        "Zamba2Config",
        SIZES
        | {
            "layers_block_type": ["mamba", "hybrid"],
            "n_mamba_heads": 8,
            "mamba_d_state": 16,
            "num_key_value_heads": 4,
            "adapter_rank": 16,
        },
    ),
    "granitemoe-hybrid": Family(
        "GraniteMoeHybridConfig",
        SIZES | MAMBA_2 | LOCAL | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 128},
    ),
    "nemotron-h": Family(
        "NemotronHConfig",
        HEADS
        | {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "mlp"],
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "lfm2": Family("Lfm2Config", SIZES | TIED | CONVOLUTION | {"conv_dim": 256, "block_dim": 256}),
    "lfm2-moe": Family("Lfm2MoeConfig", SIZES | TIED | CONVOLUTION | EXPERTS | {"num_dense_layers": 1}),
    "qwen3-next": Family("Qwen3NextConfig", HEADS | LINEAR | EXPERTS | SHARED),
    "qwen3.5-text": Family("Qwen3_5TextConfig", HEADS | TIED | LINEAR),
    "qwen3.5-moe-text": Family("Qwen3_5MoeTextConfig", HEADS | LINEAR | EXPERTS | SHARED),
    "olmo-hybrid": Family("OlmoHybridConfig", SIZES | LINEAR),
    "minimax": Family("MiniMaxConfig", HEADS | LOCAL | {"layer_types": ["linear_attention", "full_attention"]}),
}
