"""Arguments of commands that compare or push: a checkpoint, which is a directory, a file or a
Hub id, and URLs of servers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from instep.config import VERSION
from instep.engine import Engine, connect
from instep.errors import ConfigError, InstepError
from instep.source.checkpoint import CheckpointSource
from instep.source.module import ModuleSource

CANARY = tuple(range(1, 9))
"""Token ids that every vocabulary has."""
CANARY_BOUND = 1.0
"""Largest accepted difference of two log-probabilities (natural log): kernels round differently, a
wrong layer is far off."""
Urls = Annotated[list[str], Parameter(consume_multiple=True)]
"""One or more after one flag."""
AGAIN = "`instep status URL` says what each server serves: restart those that are gone, then run this again"


class Checkpoint(CheckpointSource):
    """A checkpoint that can also score tokens. Its model is loaded in transformers for the first
    score."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def score(self, token_ids: list[int]) -> list[float] | None:
        return self._forward.score(token_ids)

    @cached_property
    def _forward(self) -> ModuleSource:
        try:
            from transformers import AutoModelForCausalLM

            return ModuleSource(AutoModelForCausalLM.from_pretrained(self.folder, dtype="auto").eval())
        except (ImportError, OSError, ValueError, KeyError) as error:
            text = f"--canary needs the model in transformers, and {self.folder} cannot be loaded: {type(error).__name__}: {error}"
            raise ConfigError(text, next_step="leave --canary away") from error

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint's files."""
        return sum(file.stat().st_size for file in self._files())


def connected(urls: Sequence[str]) -> list[Engine]:
    """Returns the servers' engines. Raises `ConfigError` for an invalid URL, and for one that is
    listed twice."""
    engines = [connect(url) for url in urls]
    if len({engine.name for engine in engines}) < len(engines):
        raise ConfigError("an engine is listed twice")
    return engines


def version_of(folder: Path) -> str:
    """Returns the directory's name without characters that a version cannot have. For a Hub id
    this is the revision."""
    text = re.sub(r"[^\x21-\x7e]+", "-", folder.resolve().name)[:128]
    return text if VERSION.fullmatch(text) else "checkpoint"


def advise(error: InstepError) -> None:
    """Replaces a next step with calls of a `WeightSync` by one for the command line."""
    if "sync." in (error.next_step or ""):
        error.next_step = AGAIN
