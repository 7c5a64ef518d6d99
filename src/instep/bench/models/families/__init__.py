"""Tiny configurations of many families, by name. Only this module and those beside it know
families' names."""

from __future__ import annotations

from instep.bench.models.families import dense, experts, latent, recurrent, vision
from instep.bench.models.families.family import Family

KINDS = {
    "attention and dense layers": dense.FAMILIES,
    "experts": experts.FAMILIES,
    "latent attention": latent.FAMILIES,
    "state spaces, linear attention, short convolutions": recurrent.FAMILIES,
    "vision and language": vision.FAMILIES,
}
"""Families by the kind of their layers."""

FAMILIES: dict[str, Family] = {name: family for families in KINDS.values() for name, family in families.items()}


def kind(name: str) -> str:
    """Returns the heading under which a family stands."""
    return next(kind for kind, families in KINDS.items() if name in families)
