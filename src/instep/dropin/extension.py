"""What the worker extensions of all drop-ins have in common: one `Rounds`, and how its outcome crosses the engine's RPC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from instep.dropin.communicator import DEADLINE, Communicator, dtype_of
from instep.dropin.peers import of_worker
from instep.dropin.rounds import Rounds
from instep.engine.vllm_guard import refuse_while
from instep.engine.vllm_worker import WorkerExtension, receiver_for
from instep.errors import InstepError, PlanError, VersionConflict
from instep.protocol import WorkerReceipt

Status = dict[str, Any]
"""What a worker method returns: `ok`, `error` (text or None), `rank`, `version` (what the worker serves now), `committed` (by this call),
`dirty` (why the model must not run, or None)."""


class RoundsExtension(WorkerExtension):
    """`self` is vLLM's worker. A push from a `WeightSync` reaches it too."""

    instep_cast = False

    def finish_update(self, version: str | None = None) -> Status:
        """Commits the tensors that were sent since the last commit, under the label `version`, or none of them."""
        return answer(self, lambda rounds: rounds.finish(version))

    def check_weights_changed(self, since: str | None = None) -> bool | None:
        """Without `since`: whether every parameter is near zero, which the examples call so because their trainer sends zeros.

        since: a version that this engine served; whether its weights have another digest now. Raises `VersionConflict` for one that it
        did not serve, or whose digest only the trainer knows; one worker of several does not raise, and returns None.
        """
        rounds = rounds_of(self)
        if since is None:
            return all(torch.allclose(param, torch.zeros_like(param)) for param in rounds.receiver.host.model.parameters())
        history, now = rounds.receiver.history, rounds.receiver.version
        if since in history and now in (None, since):
            return False
        if history.get(since) and now and history[now]:
            return history[since] != history[now]
        if rounds.peers.size > 1:
            return None
        if since in history:
            raise VersionConflict(f"only the trainer knows the digests of {since!r} and {now!r}: their bytes came live (ipc, nccl)")
        served = ", ".join(list(history)[-8:]) or "its first weights alone"
        raise VersionConflict(f"this engine did not serve {since!r}; it served {served}")

    def instep_join(self, rank_offset: int, enter: Callable[[int], Communicator], timeout: float) -> None:
        """Takes this worker's place in a group; a round that an earlier trainer left is forgotten. enter: joins with a rank."""
        rounds = rounds_of(self)
        rounds.leave()
        rounds.peers.timeout = min(timeout, DEADLINE)  # they work on the same at the same time
        leave(self)
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        engine = getattr(parallel, "data_parallel_index", 0)
        vars(self)["model_update_group"] = enter(rank_offset + engine * parallel.world_size + self.rank)  # type: ignore[attr-defined]

    def instep_receive(self, rounds: Rounds, name: str, dtype: str | torch.dtype, shape: Any, *, last: bool | None) -> WorkerReceipt | None:
        """One broadcast of the trainer. The worker takes part in it whatever is wrong with what was announced. last: see `Rounds.add`."""
        group: Communicator | None = vars(self).get("model_update_group")
        if group is None:
            raise PlanError("this worker is in no group: no trainer can broadcast to it", next_step="call the init method first")

        def bring() -> torch.Tensor:
            try:
                room = torch.empty(tuple(shape), dtype=dtype_of(dtype), device=group.device)
            except Exception:
                group.skip()
                raise
            group.broadcast(room)
            return room

        return rounds.add(name, bring, last=last)


def answer(worker: Any, action: Callable[[Rounds], WorkerReceipt | None]) -> Status:
    """Runs a step of a round.

    vLLM loses step with the replies of an engine's workers after one of several raises: so they never do, and what went wrong is in the
    status. An engine's only worker raises.
    """
    receipt, error = None, None
    try:
        receipt = action(rounds_of(worker))
    except Exception as failure:
        if worker.vllm_config.parallel_config.world_size == 1:
            raise
        error = str(failure) if isinstance(failure, InstepError) else f"{type(failure).__name__}: {failure}"
    rounds: Rounds | None = vars(worker).get("instep_rounds")
    return {
        "ok": error is None,
        "error": error,
        "rank": worker.rank,
        "version": rounds.receiver.version if rounds else None,
        "committed": receipt is not None,
        "dirty": rounds.together.dirty() if rounds else None,
    }


def rounds_of(worker: Any) -> Rounds:
    """The worker's rounds. From their first use on it refuses to run a model that holds parts of two versions."""
    held = vars(worker)
    if "instep_rounds" not in held:
        rounds = Rounds(receiver_for(worker), of_worker(worker, DEADLINE), cast=worker.instep_cast)
        held["instep_rounds"] = rounds
        refuse_while(worker, rounds.together.dirty, rounds.settle)
    found: Rounds = held["instep_rounds"]
    return found


def leave(worker: Any) -> None:
    if (group := vars(worker).pop("model_update_group", None)) is not None:
        group.close()
