"""Limits of a program in a sandbox, and the weakest level that is accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from instep.errors import ConfigError

Level = Literal["full", "partial", "none"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""The strongest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of a program in a sandbox. Raises `ConfigError` for values that make no sense.

    seconds: of wall-clock time. memory: bytes of address space; beyond it the program sees a `MemoryError`. output: bytes of stdout and
        stderr together. file: bytes of one file that it writes. disk: bytes of all its files, which are in memory and gone when it ends.
        network: whether it may connect to others over IP.
    sandbox: the weakest wall between program and machine that is accepted: `full` (namespaces of its own), `partial` (Landlock and a
        seccomp filter) or `none`. The strongest that the machine gives is taken, whatever is accepted.
    """

    seconds: float = 10.0
    memory: int = 1 << 30
    output: int = 1 << 16
    file: int = 1 << 26
    disk: int = 1 << 27
    network: bool = False
    sandbox: Level = "partial"

    def __post_init__(self) -> None:
        for name in ("seconds", "memory", "output", "file", "disk"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)!r}")
        if self.sandbox not in LEVELS:
            raise ConfigError(f"sandbox must be one of {', '.join(LEVELS)}, not {self.sandbox!r}")
