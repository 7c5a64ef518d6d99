"""Families with a vision tower before a language model. Both are trained, so both are pushed."""

from __future__ import annotations

from instep.bench.models.families.dense import GEMMA
from instep.bench.models.families.experts import EXPERTS, LLAMA_4
from instep.bench.models.families.family import HEADS, SIZES, TIED, Family, Pictures
from instep.bench.models.families.recurrent import LINEAR, SHARED

TOWER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "vision_use_head": False,
    "patch_size": 14,
}
SQUARE = {"size": {"height": 28, "width": 28}}
IMAGE = 150
"""The id of the token that stands for a piece of an image, and of others of its kind after it."""

QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 151,
    "vision_start_token_id": 152,
    "vision_end_token_id": 153,
}


def qwen(processor: str, video: str, patch: int = 14) -> Pictures:
    """An image becomes one to four tokens, each of 2 x 2 patches."""
    side = 2 * patch
    pixels = {"shortest_edge": side * side, "longest_edge": 4 * side * side}
    return Pictures(
        words={
            "image_token": (IMAGE, "<|image_pad|>"),
            "video_token": (151, "<|video_pad|>"),
            "vision_start_token": (152, "<|vision_start|>"),
            "vision_end_token": (153, "<|vision_end|>"),
        },
        prompt=(152, IMAGE, 153),
        processor=processor,
        image_processor="Qwen2VLImageProcessor",
        image={"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "size": pixels},
        video_processor=video,
    )


QWEN_2 = SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8]}}
QWEN_3_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
QWEN_3 = HEADS | {"rope_parameters": QWEN_3_ROPE | {"mrope_section": [16, 8, 8]}}
QWEN_3_EXPERTS = EXPERTS | {"moe_intermediate_size": 64, "norm_topk_prob": True}
"""No two dimensions of an expert are equal: transformers looks at them to know what is
transposed."""
QWEN_35 = LINEAR | {"rope_parameters": QWEN_3_ROPE | {"mrope_section": [4, 2, 2], "partial_rotary_factor": 0.25}}
QWEN_TOWER = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN_2_TOWER = QWEN_TOWER | {"embed_dim": 64, "mlp_ratio": 2, "hidden_size": 256}
QWEN_25_TOWER = QWEN_TOWER | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "out_hidden_size": 256,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}
QWEN_3_TOWER = QWEN_TOWER | {
    "patch_size": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "out_hidden_size": 256,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
QWEN_35_TOWER = QWEN_3_TOWER | {"deepstack_visual_indexes": []}
QWEN_3_PICTURES = qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16)

GEMMA_3_PICTURES = Pictures(
    words={
        "image_token": (IMAGE, "<image_soft_token>"),
        "boi_token": (151, "<start_of_image>"),
        "eoi_token": (152, "<end_of_image>"),
        "blank": (153, "\n\n"),
        "line": (154, "\n"),
        "lines_3": (155, "\n\n\n"),
        "lines_4": (156, "\n\n\n\n"),
    },
    prompt=(151,),
    processor="Gemma3Processor",
    image_processor="Gemma3ImageProcessor",
    image=SQUARE,
    settings={"image_seq_length": 4},
)
LLAVA_PICTURES = Pictures(
    words={"image_token": (IMAGE, "<image>")},
    prompt=(IMAGE,),
    processor="LlavaProcessor",
    image_processor="CLIPImageProcessor",
    image={"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
    settings={
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    },
)
PALIGEMMA_PICTURES = Pictures(
    words={"image_token": (IMAGE, "<image>"), "line": (108, "\n")},
    prompt=(),
    processor="PaliGemmaProcessor",
    image_processor="SiglipImageProcessor",
    image=SQUARE | {"image_seq_length": 4},
)
MISTRAL_3_PICTURES = Pictures(
    words={
        "image_token": (IMAGE, "[IMG]"),
        "image_break_token": (151, "[IMG_BREAK]"),
        "image_end_token": (152, "[IMG_END]"),
    },
    prompt=(IMAGE,),
    processor="PixtralProcessor",
    image_processor="PixtralImageProcessor",
    image={"size": {"longest_edge": 56}, "patch_size": {"height": 14, "width": 14}},
    settings={"patch_size": 14, "spatial_merge_size": 2},
)
INTERNVL_PICTURES = Pictures(
    words={
        "context_image_token": (IMAGE, "<IMG_CONTEXT>"),
        "start_image_token": (151, "<img>"),
        "end_image_token": (152, "</img>"),
        "video_token": (153, "<video>"),
    },
    prompt=(IMAGE,),
    processor="InternVLProcessor",
    image_processor="GotOcr2ImageProcessor",
    image=SQUARE | {"crop_to_patches": False, "max_patches": 1},
    video_processor="InternVLVideoProcessor",
    settings={"image_seq_length": 1},
)
IDEFICS_3_PICTURES = Pictures(
    words={
        "image_token": (IMAGE, "<image>"),
        "fake_image_token": (151, "<fake_token_around_image>"),
        "global_image_token": (152, "<global-img>"),
        "end_of_utterance_token": (153, "<end_of_utterance>"),
    },
    prompt=(IMAGE,),
    processor="Idefics3Processor",
    image_processor="Idefics3ImageProcessor",
    image={
        "size": {"longest_edge": 28},
        "max_image_size": {"longest_edge": 28},
        "do_image_splitting": False,
    },
    settings={"image_seq_len": 1},
)
LLAMA_4_PICTURES = Pictures(
    words={
        "image_token": (IMAGE, "<|image|>"),
        "boi_token": (151, "<|image_start|>"),
        "eoi_token": (152, "<|image_end|>"),
        "patch_token": (153, "<|patch|>"),
        "tile_x_separator_token": (154, "<|tile_x_separator|>"),
        "tile_y_separator_token": (155, "<|tile_y_separator|>"),
    },
    prompt=(IMAGE,),
    processor="Llama4Processor",
    image_processor="Llama4ImageProcessor",
    image=SQUARE | {"max_patches": 1},
    settings={"patch_size": 14, "pixel_shuffle_ratio": 0.5},
)

FAMILIES = {
    "gemma3": Family(
        "Gemma3Config",
        {
            "text_config": GEMMA,
            "vision_config": TOWER,
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": 151,
            "eoi_token_index": 152,
        },
        GEMMA_3_PICTURES,
    ),
    "qwen2-vl": Family(
        "Qwen2VLConfig",
        QWEN_IDS | {"text_config": QWEN_2, "vision_config": QWEN_2_TOWER},
        qwen("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    ),
    "qwen2.5-vl": Family(
        "Qwen2_5_VLConfig",
        QWEN_IDS | TIED | {"text_config": QWEN_2 | TIED, "vision_config": QWEN_25_TOWER},
        qwen("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    ),
    "qwen3-vl": Family(
        "Qwen3VLConfig",
        QWEN_IDS | TIED | {"text_config": QWEN_3 | TIED, "vision_config": QWEN_3_TOWER},
        QWEN_3_PICTURES,
    ),
    "qwen3-vl-moe": Family(
        "Qwen3VLMoeConfig",
        QWEN_IDS
        | {
            "text_config": QWEN_3 | QWEN_3_EXPERTS,
            "vision_config": QWEN_3_TOWER,
        },
        QWEN_3_PICTURES,
    ),
    "qwen3.5": Family(
        "Qwen3_5Config",
        QWEN_IDS | TIED | {"text_config": HEADS | TIED | QWEN_35, "vision_config": QWEN_35_TOWER},
        QWEN_3_PICTURES,
    ),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeConfig",
        QWEN_IDS | {"text_config": HEADS | QWEN_35 | EXPERTS | SHARED, "vision_config": QWEN_35_TOWER},
        QWEN_3_PICTURES,
    ),
    "llava": Family(
        "LlavaConfig",
        {
            "text_config": SIZES | {"model_type": "llama"},
            "vision_config": TOWER | {"model_type": "clip_vision_model"},
            "image_token_index": IMAGE,
            "image_seq_length": 4,
        },
        LLAVA_PICTURES,
    ),
    "paligemma": Family(
        "PaliGemmaConfig",
        {
            "text_config": HEADS | TIED | {"model_type": "gemma"},
            "vision_config": TOWER | {"model_type": "siglip_vision_model", "projection_dim": 256},
            "image_token_index": IMAGE,
            "projection_dim": 256,
            "hidden_size": 256,
        },
        PALIGEMMA_PICTURES,
    ),
    "mistral3": Family(
        "Mistral3Config",
        {
            "text_config": HEADS | {"model_type": "mistral", "sliding_window": None},
            "vision_config": TOWER | {"model_type": "pixtral", "image_size": 56, "head_dim": 32},
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
        },
        MISTRAL_3_PICTURES,
    ),
    "internvl": Family(
        "InternVLConfig",
        {
            "text_config": SIZES | {"model_type": "qwen2"},
            "vision_config": TOWER | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]},
            "image_token_id": IMAGE,
            "image_seq_length": 1,
            "tie_word_embeddings": False,
        },
        INTERNVL_PICTURES,
    ),
    "idefics3": Family(
        "Idefics3Config",
        {
            "text_config": SIZES | {"model_type": "llama"},
            "vision_config": TOWER,
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        IDEFICS_3_PICTURES,
    ),
    "llama4": Family(
        "Llama4Config",
        {
            "text_config": LLAMA_4,
            "vision_config": TOWER
            | {
                "vision_output_dim": 64,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
            },
            "image_token_index": 153,
            "boi_token_index": 151,
            "eoi_token_index": 152,
        },
        LLAMA_4_PICTURES,
    ),
}
