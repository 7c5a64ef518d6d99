"""Settings of a `WeightSync`, checked before anything is touched."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from instep.errors import ConfigError

Require = Literal["all", "any"]
Caches = Literal["reset", "keep"]
TransportName = Literal["auto", "shm", "ipc", "nccl", "gloo", "http"]

VERSION = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of a `WeightSync`. Raises `ConfigError` for a value that cannot be used.

    require: `all` aborts a push before any commit unless every engine has prepared it; `any` goes
    on with those that have.
    caches: what happens to KV computed with the old weights. `reset` drops the prefix cache and
        recomputes requests in flight; `keep` leaves both, for in-flight updates that accept old KV.
    transport: how bytes travel. `auto` takes the fastest that reaches every engine, and logs which
    and why.
    cast: round the trainer's tensors to the dtypes that the engine stores. Without it that is a
        `PlanError`. A wider dtype, which has every value of the trainer's (bfloat16 to float32),
        rounds nothing and is always allowed.
    timeout: seconds that each phase may take on each engine.
    canary: token ids that engine and trainer both score after a commit.
    canary_bound: largest accepted difference of two log-probabilities (natural log).
    gather_whole_model: where a sharded trainer has to gather (for `nccl` and `gloo`), all at once
        before anything is sent, in the memory of the whole model on rank 0. Without it bucket by
        bucket.
    """

    require: Require = "all"
    caches: Caches = "reset"
    transport: TransportName = "auto"
    cast: bool = False
    timeout: float = 60.0
    canary: Sequence[int] | None = None
    canary_bound: float = 1.0
    gather_whole_model: bool = False

    def __post_init__(self) -> None:
        if self.require not in ("all", "any"):
            raise ConfigError(f"require must be 'all' or 'any', not {self.require!r}")
        if self.caches not in ("reset", "keep"):
            raise ConfigError(f"caches must be 'reset' or 'keep', not {self.caches!r}")
        if self.transport not in get_args(TransportName):
            raise ConfigError(f"transport must be one of {', '.join(get_args(TransportName))}, not {self.transport!r}")
        if not isinstance(self.timeout, int | float) or not 0 < self.timeout < math.inf:
            raise ConfigError(f"timeout must be a positive number of seconds, not {self.timeout!r}")
        if not self.canary_bound > 0:
            raise ConfigError(f"canary_bound must be positive, not {self.canary_bound!r}")
        if self.canary is not None:
            _check_canary(self.canary)


def _check_canary(tokens: Any) -> None:
    if not isinstance(tokens, Sequence) or not all(isinstance(token, int) for token in tokens):
        raise ConfigError(f"canary is a list of token ids, not {tokens!r}", next_step="give what a tokenizer's `encode` returns")
    if len(tokens) < 2:
        raise ConfigError("canary needs at least two token ids: the first is the context of the second")


def check_version(version: str) -> str:
    """Raises `ConfigError` unless `version` is 1 to 128 printable ASCII characters without
    spaces."""
    if not isinstance(version, str) or not VERSION.fullmatch(version):
        raise ConfigError(f"a version is a string of 1 to 128 printable ASCII characters without spaces, not {version!r}")
    return version
