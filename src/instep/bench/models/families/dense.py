"""Families of attention and dense layers."""

from __future__ import annotations

from instep.bench.models.families.family import HEADS, SIZES, TIED, VOCABULARY, WINDOW, Family

GPT = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}
GPT_SIZES = GPT | {"n_positions": 128, "n_embd": 256, "n_layer": 2, "n_head": 4}
FALCON = GPT | {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "parallel_attn": True,
    "bias": False,
    "alibi": False,
}
SCALES = {"embedding_multiplier": 2.0, "logits_scaling": 8.0, "residual_multiplier": 0.5}
GEMMA = HEADS | TIED | WINDOW | {"query_pre_attn_scalar": 64}
GEMMA_4 = {
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
}
GEMMA_3N = {
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
    "laurel_rank": 16,
    "activation_sparsity_pattern": [0.0, 0.0],
}

FAMILIES = {
    "llama": Family("LlamaConfig", SIZES),
    "llama-tied": Family("LlamaConfig", SIZES | TIED | {"attention_bias": True, "mlp_bias": True}),
    "qwen2": Family("Qwen2Config", SIZES | TIED),
    "qwen2-untied": Family("Qwen2Config", SIZES),
    "qwen3": Family("Qwen3Config", HEADS | TIED),
    "mistral": Family("MistralConfig", HEADS | {"sliding_window": None}),
    "ministral3": Family("Ministral3Config", HEADS),
    "gemma": Family("GemmaConfig", HEADS | TIED),
    "gemma2": Family("Gemma2Config", GEMMA),
    "gemma3-text": Family("Gemma3TextConfig", GEMMA),
    "gemma3n-text": Family("Gemma3nTextConfig", HEADS | TIED | WINDOW | GEMMA_3N),
    "gemma4-text": Family("Gemma4TextConfig", HEADS | TIED | WINDOW | GEMMA_4),
    "vaultgemma": Family("VaultGemmaConfig", GEMMA),
    "phi": Family("PhiConfig", SIZES),
    "phi3": Family("Phi3Config", SIZES),
    "falcon-7b": Family("FalconConfig", FALCON | {"multi_query": True}),
    "falcon-40b": Family("FalconConfig", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt2": Family("GPT2Config", GPT_SIZES),
    "gpt-bigcode": Family("GPTBigCodeConfig", GPT_SIZES),
    "gptj": Family("GPTJConfig", GPT_SIZES | {"rotary_dim": 16}),
    "gpt-neox": Family("GPTNeoXConfig", SIZES),
    "bloom": Family("BloomConfig", GPT | {"hidden_size": 256, "n_layer": 2, "n_head": 4}),
    "opt": Family("OPTConfig", SIZES | {"ffn_dim": 256, "word_embed_proj_dim": 256}),
    "mpt": Family("MptConfig", GPT | {"d_model": 256, "n_heads": 4, "n_layers": 2}),
    "cohere": Family("CohereConfig", SIZES),
    "cohere2": Family("Cohere2Config", SIZES | WINDOW),
    "olmo": Family("OlmoConfig", SIZES),
    "olmo2": Family("Olmo2Config", SIZES),
    "olmo3": Family("Olmo3Config", SIZES | WINDOW),
    "granite": Family("GraniteConfig", SIZES | TIED | SCALES),
    "granite-swa": Family("GraniteSWAConfig", SIZES | TIED | SCALES | WINDOW),
    "glm": Family("GlmConfig", HEADS),
    "glm4": Family("Glm4Config", HEADS),
    "stablelm": Family("StableLmConfig", SIZES | {"use_qkv_bias": True}),
    "starcoder2": Family("Starcoder2Config", SIZES | TIED),
    "smollm3": Family("SmolLM3Config", SIZES | TIED),
    "nemotron": Family("NemotronConfig", HEADS),
    "exaone4": Family("Exaone4Config", SIZES | WINDOW),
    "ernie4.5": Family("Ernie4_5Config", HEADS | TIED),
    "seed-oss": Family("SeedOssConfig", HEADS | {"residual_dropout": 0.0}),
    "hunyuan": Family("HunYuanDenseV1Config", HEADS),
    "hyperclovax": Family("HyperCLOVAXConfig", HEADS),
    "apertus": Family("ApertusConfig", SIZES),
    "arcee": Family("ArceeConfig", HEADS),
    "helium": Family("HeliumConfig", HEADS),
    "jais2": Family("Jais2Config", HEADS),
    "cwm": Family("CwmConfig", HEADS | WINDOW),
}
