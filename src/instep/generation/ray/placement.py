"""Places engines in a cluster. Pure functions over numbers; `engines.py` asks Ray for the
result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from instep.errors import ConfigError

SHARE = 0.5
"""The part of a GPU for an engine that shares it with a trainer."""


@dataclass(frozen=True)
class Place:
    """The resources of one engine's actor. bundle: its index in the placement group; None
    without one."""

    cpus: float
    gpus: float
    bundle: int | None = None


def bundles(num_engines: int, workers: int) -> list[dict[str, float]]:
    """Returns one bundle for each engine. A bundle is on one node, so that no engine spreads
    over nodes."""
    return [{"GPU": float(workers), "CPU": float(workers)} for _ in range(num_engines)]


def node_order(nodes: Mapping[int, str]) -> list[int]:
    """Sorts bundles by node, in the order in which nodes first appear, so that neighbouring
    engines are on one node.

    nodes: the node of each bundle.
    """
    first: dict[str, int] = {}
    for bundle in sorted(nodes):
        first.setdefault(nodes[bundle], bundle)
    return sorted(nodes, key=lambda bundle: (first[nodes[bundle]], bundle))


def places(num_engines: int, workers: int, nodes: Mapping[int, str] | None, *, shared: bool, gpus: float | None = None) -> list[Place]:
    """Returns one place for each engine.

    nodes: of the placement group's bundles; None where the cluster has no GPU: then engines run on
    CPUs, one for each worker.
    shared: the group is a trainer's, of which an engine takes `gpus` of a GPU, half if None, and no
    CPU.

    Raises `ConfigError` where they do not fit into the group.
    """
    if nodes is None:
        return [Place(cpus=workers, gpus=0.0)] * num_engines
    if len(nodes) < num_engines:
        raise ConfigError(f"{num_engines} engines do not go into {len(nodes)} bundles")
    if shared and workers > 1:
        raise ConfigError("engines that share their GPUs with a trainer have one worker each: tensor_parallel_size must be 1")
    gpus = (SHARE if gpus is None else gpus) if shared else float(workers)
    return [Place(0.0 if shared else workers, gpus, bundle) for bundle in node_order(nodes)[:num_engines]]
