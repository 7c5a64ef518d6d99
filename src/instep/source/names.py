"""Names of tensors, as strings. No function here looks at a module."""

from __future__ import annotations

import re
from collections.abc import Iterable

from instep.errors import SourceError

WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names under which `torch.compile`, activation checkpointing and FSDP hold the module that they
wrap."""


def canonical(name: str) -> str:
    """Removes the segments that wrappers add to a name, wherever they stand:
    `model._orig_mod.layers.0._checkpoint_wrapped_module.norm.weight` becomes
    `model.layers.0.norm.weight`."""
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPER_SEGMENTS)


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Maps each canonical name to the given name, in the order given. Raises `SourceError` where
    two names become one."""
    given: dict[str, str] = {}
    for name in names:
        first = given.setdefault(canonical(name), name)
        if first != name:
            raise SourceError(
                f"{first} and {name} both become {canonical(name)} without their wrappers",
                tensor=canonical(name),
                next_step="rename one of the two modules: a push would lose one of the tensors",
            )
    return given


def natural_key(name: str) -> tuple[str | int, ...]:
    """Returns a sort key that puts layer 2 before layer 10."""
    return tuple(int(part) if index % 2 else part for index, part in enumerate(re.split(r"(\d+)", name)))
