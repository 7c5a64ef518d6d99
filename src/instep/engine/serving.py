"""The interface that an actor needs of a serving engine: tokens in, tokens out. All of it runs
on the event loop that started the engine.

`vllm/serving.py` has it for vLLM. A test may bring its own.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from instep.engine import Engine


class Sampled(Struct, frozen=True, kw_only=True):
    """What an engine sampled for one request.

    logprobs: of the sampled tokens, natural logarithm, of the distribution that they were drawn
    from.
    versions: (version, start, end) of the tokens of each version; None where the engine does not
    tell.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort", "error", "repetition"]
    stop_reason: int | str | None = None
    versions: list[tuple[str, int, int]] | None = None


class KVCacheInfo(Struct, frozen=True):
    """The size of the KV cache, as the engine measured it at its start.

    tokens: that fit. concurrency: requests of `max_model_len` tokens that fit. max_num_seqs:
    requests that one step may hold.
    """

    tokens: int
    concurrency: float
    max_model_len: int
    max_num_seqs: int

    @property
    def samples(self) -> int:
        """How many samples an actor takes at a time. All must fit, and they are at most twice
        those of one step: while some wait for a tool, no place is empty, and prompts stay with
        whoever has time for them."""
        return max(1, min(int(self.concurrency), 2 * self.max_num_seqs))


class ModelDims(Struct, frozen=True):
    """Sizes that follow from the model's configuration, for accounts of FLOPs and bytes, with Open
    Instruct's names.

    sliding_window: tokens, of `num_sliding_window_layers`.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_attn_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    num_sliding_window_layers: int = 0
    device_name: str = "cpu"


class Serving(Protocol):
    """An engine that serves requests."""

    weights: Engine
    """What a `WeightSync` pushes to."""
    tokenizer: Any
    """The engine's own; None where it has none."""
    kv_cache: KVCacheInfo
    dims: ModelDims

    async def generate(self, token_ids: Sequence[int], sampling: dict[str, Any], request_id: str, salt: str | None) -> Sampled:
        """Samples one request. sampling: as `Sampling.vllm_kwargs` makes it. salt: only requests
        with the same salt share cached prefixes.

        Cancelled, it stops working on it. Raises `EngineLost` where a process of the engine is
        gone.
        """

    async def abort(self, request_id: str) -> None:
        """Makes `generate` answer with the tokens that it has."""

    async def collective_rpc(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        """Calls a method of the workers' own extension. Returns one result per worker."""

    async def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache. Returns whether it is empty now: blocks that running
        requests use stay."""

    async def check(self) -> None:
        """Raises `EngineLost` if the engine cannot go on."""

    async def serve(self, sock: socket.socket) -> None:
        """Serves OpenAI's HTTP interface on a listening socket until it is cancelled."""

    async def aclose(self) -> None:
        """Ends the engine's processes."""
