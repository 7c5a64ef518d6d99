"""Updates that a framework loads tensor by tensor: staged in the worker, then committed as a whole.

    begin ── load_weights ── load_weights ── ... ── finish
                nothing visible changes                 all of them, or none

The trainer gives no digests, so a commit proves that the engine holds what came to the worker. That
it is what the trainer had, a push alone proves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from instep.dropin.extension import RoundsExtension, rounds_of
from instep.dropin.rounds import Rounds
from instep.errors import InstepError, PlanError
from instep.protocol import WorkerReceipt
from instep.source.pairs import Pair


class StagedModel:
    """Takes the place of the engine's model for code that calls its `load_weights`. May be called
    as often as tensors come.

    unfit: why no update of this engine can be committed, or None.
    """

    def __init__(self, rounds: Rounds, unfit: Exception | None = None) -> None:
        self.rounds, self.unfit = rounds, unfit

    def load_weights(self, weights: Iterable[Pair]) -> set[str]:
        """Copies the tensors, which may be of any shape and dtype, and returns their names.

        Raises nothing: a sender waits until everything was taken. What is wrong with an update is
        raised where it ends.
        """
        taken = set()
        for name, tensor in weights:
            taken.add(name)
            if name in self.rounds.now.names:
                self.rounds.fail_too(PlanError(f"{name} came twice in one update", tensor=name))
            else:
                with suppress(InstepError):  # the round keeps its first error
                    self.rounds.add(name, partial(self._copy, tensor))
        return taken

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.unfit is not None:
            raise self.unfit
        return tensor.detach().clone(memory_format=torch.contiguous_format)


class StagedExtension(RoundsExtension):
    """vLLM's worker for frameworks whose receivers load into the model."""

    instep_cast = True

    def instep_stage(self, receive: Callable[[StagedModel], object], unfit: Exception | None = None) -> WorkerReceipt:
        """Has `receive` fill a model, and commits what came.

        unfit: see `StagedModel`. Raises `PlanError` for an update without any tensor, and whatever
        `receive` and `Rounds.finish` raise. Then old weights serve on, unless the engine is dirty.
        """
        rounds = rounds_of(self)
        rounds.begin()
        try:
            receive(StagedModel(rounds, unfit))
            if not rounds.now.names:
                raise PlanError("an update came without any tensor", next_step="send all tensors of the checkpoint that the engine loads")
        except Exception as error:
            rounds.drop(error)
            raise
        return rounds.finish()


class StagedWorker:
    """A worker for a framework's own method, which finds a `StagedModel` as
    `self.model_runner.model`. All other attributes are the worker's."""

    def __init__(self, worker: Any, model: StagedModel) -> None:
        self.instep_worker, self.model_runner = worker, SimpleNamespace(model=model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.instep_worker, name)
