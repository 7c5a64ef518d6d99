"""What this process is to a push: the only one, the rank that leads, or one that follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch

from instep.config import Config
from instep.errors import ConfigError
from instep.protocol import decode
from instep.ranks.channel import Channel
from instep.ranks.follow import Follower, Outcome, outcome_of
from instep.ranks.lead import RankedSource
from instep.ranks.liveness import Liveness
from instep.ranks.transports import RankedTransport
from instep.receipt import Receipt
from instep.shielded import to_the_end
from instep.source import Source, open_source
from instep.source.adapter import adapter_of
from instep.transport import host
from instep.transport.auto import AutoTransport


class Lead:
    """The role of the rank that has the engines, the source and the transport. channel: to the
    ranks that follow, if there may be any."""

    def __init__(self, source: Source, transport: AutoTransport, channel: Channel | None) -> None:
        self.source, self.transport, self.channel = source, transport, channel

    @asynccontextmanager
    async def leading(self, call: str, version: str, receipt: Callable[[], Receipt | None]) -> AsyncIterator[None]:
        """Context manager for one call, in which all ranks take part and hear how it has ended.
        receipt: returns the receipt once the call is over.

        Raises `TransportError` where a rank that is needed does not come in time.
        """
        channel = self.channel
        if channel is None:
            yield
            return
        try:
            channel.begin(call, version)
            if isinstance(self.source, RankedSource):  # otherwise no other rank is needed
                present = [decode(other, Liveness) for other in await to_the_end(lambda: asyncio.to_thread(channel.ask, "begin"))]
                channel.spread = any(other.host != host() for other in present)
                for rank, other in enumerate(present, 1):
                    channel.watch.see(rank, other)
            yield
        except BaseException as error:
            channel.end(outcome_of(error))
            raise
        channel.end(Outcome(receipt=receipt()))

    def close(self) -> None:
        self.transport.close()
        if isinstance(self.source, RankedSource):
            self.source.meeting.close()
        if self.channel is not None:
            self.channel.close()


def role(source: Any, config: Config, *, engines: bool) -> Lead | Follower:
    """Makes this rank's part of a `WeightSync`. engines: whether this rank was given any.

    Raises `ConfigError` for a rank that leads without engines, and for settings that several ranks
    cannot have.
    """
    rank, size = ranks()
    sharded = size > 0 and isinstance(source, torch.nn.Module) and _is_sharded(source)
    channel = Channel(rank, size, config.timeout, asks=sharded) if sharded or (size > 1 and (rank == 0 or not engines)) else None
    if rank > 0 and channel is not None:
        return Follower(channel, _module(source) if sharded else None)
    if not engines:
        raise ConfigError("a WeightSync needs at least one engine" + (" on rank 0 of the trainer" if size > 1 else ""))
    if config.canary and adapter_of(source) is not None:
        raise ConfigError("an engine scores with its base weights: an adapter has no canary", next_step="leave `canary` out")
    if not sharded:
        return Lead(open_source(source), AutoTransport(config.transport, config.timeout), channel)
    if config.canary:
        raise ConfigError("a sharded trainer cannot score a canary", next_step="leave `canary` out; digests prove the bytes")
    assert channel is not None
    ranked = RankedSource(_module(source), channel)
    return Lead(ranked, RankedTransport(config.transport, config.timeout, ranked, whole=config.gather_whole_model), channel)


def ranks() -> tuple[int, int]:
    """Returns this process's rank in torch's default group and the group's size; (0, 0) without a
    group."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0, 0
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _is_sharded(module: torch.nn.Module) -> bool:
    from instep.source.skeleton import is_sharded

    return is_sharded(module)


def _module(source: torch.nn.Module) -> Any:
    from instep.source.sharded import ShardedModule

    return ShardedModule(source)
