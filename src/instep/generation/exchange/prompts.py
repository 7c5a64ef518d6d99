"""Checks prompts: a record declares the types of its fields, and only this module checks them."""

from __future__ import annotations

import math
from operator import index
from typing import Any

from msgspec import Struct, ValidationError, convert, structs

from instep.errors import ConfigError
from instep.generation.sampling import Sampling
from instep.generation.text import clean
from instep.generation.types import Label, PromptId, PromptRequest

SAMPLES = 1 << 16
"""The largest number of samples of one prompt."""


def checked(request: PromptRequest) -> PromptRequest:
    """Returns the request, its token ids as a list of Python integers. Raises `ConfigError` that
    names a field of a wrong type."""
    name = clean(str(request.id))
    try:
        if set(map(type, request.prompt_token_ids)) != {int}:
            request = structs.replace(request, prompt_token_ids=[index(token) for token in request.prompt_token_ids])
    except TypeError as error:
        raise ConfigError(f"prompt {name}: prompt_token_ids is a list of token ids: {error}") from error
    if isinstance(request.tools, str):
        raise ConfigError(f"prompt {name}: tools is a tuple of names, not one name")
    parts: list[tuple[str, Any, type[Struct]]] = [("", request, PromptRequest), ("id.", request.id, PromptId)]
    parts += [("sampling.", request.sampling, Sampling), *((f"labels[{at}].", label, Label) for at, label in enumerate(request.labels))]
    for prefix, part, kind in parts:
        if wrong := _wrong(part, kind):
            raise ConfigError(f"prompt {name}: {prefix}{wrong}")
    if not min(request.prompt_token_ids) >= 0:
        raise ConfigError(f"prompt {name}: token ids are not negative")
    if request.sampling.n > SAMPLES:
        raise ConfigError(f"prompt {name}: sampling.n is {request.sampling.n}, and {SAMPLES} is the most")
    for label in request.labels:
        if not math.isfinite(label.weight):
            raise ConfigError(f"prompt {name}: the weight of label {label.verifier} is {label.weight}")
    if any(clean(text) != text for text in (request.id.prompt, *request.sampling.stop)):
        raise ConfigError(f"prompt {name}: its name or a stop string holds half of a surrogate pair")
    return request


def _wrong(part: Any, kind: type[Struct]) -> str | None:
    if not isinstance(part, kind):
        return f"is a {type(part).__name__}, not a {kind.__name__}"
    try:
        convert(structs.asdict(part), kind)
    except ValidationError as error:
        message, _, where = str(error).rpartition(" - at `$.")
        return f"{where.rstrip('`')}: {message}"
    return None
