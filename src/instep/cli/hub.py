"""Finds models by name: a directory, a file, or a model of the Hub."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from instep.errors import ConfigError
from instep.extras import needed_by

FILES = ("*.safetensors", "*.safetensors.index.json", "*.json")
CONFIGS = ("config.json", "params.json")
LOOKUP = 10.0
"""Seconds for the question whether the Hub has a model."""


def found(model: str, files: Sequence[str] = FILES) -> Path:
    """Returns the path of a directory, a file, or a Hub id in the Hub's cache, which is
    downloaded if missing.

    Raises `ConfigError` where there is nothing of that name.
    """
    if Path(model).exists():
        return Path(model)
    with needed_by(f"{model} is no directory, and a Hub id"):
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils.tqdm import disable_progress_bars
    if not sys.stderr.isatty():
        disable_progress_bars()
    unanswered = None
    try:
        HfApi().model_info(model, timeout=LOOKUP)  # a download has no deadline for it, or asks again and again
    except HFValidationError as error:
        raise ConfigError(f"there is no directory {model}") from error
    except Exception as error:  # of whatever HTTP library the client uses
        unanswered = error
    try:
        return Path(snapshot_download(model, allow_patterns=list(files), local_files_only=unanswered is not None))
    except (OSError, ValueError) as error:
        first = str(unanswered or error).strip().partition("\n")[0]
        raise ConfigError(f"{model} is no directory, and no model of that name can be had from the Hub, asked once: {first}") from error


def in_cache(model: str) -> bool:
    """Whether huggingface_hub's cache has the config of a Hub id. No server is asked."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(model, name), str) for name in CONFIGS)
    except HFValidationError:
        return False
