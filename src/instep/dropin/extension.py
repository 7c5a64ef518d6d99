"""What the worker extensions of all drop-ins have in common: one `Rounds`, and how its outcome
crosses the engine's RPC."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from instep.dropin.calls import by_all, peers_of, with_one_voice
from instep.dropin.communicator import DEADLINE, Communicator, dtype_of
from instep.dropin.handles import Handles, device_id, of_worker, rebuild_tensor
from instep.dropin.rounds import Rounds
from instep.engine.vllm.checkpoint import loaded_from
from instep.engine.vllm.guard import refuse_while
from instep.engine.vllm.worker import WorkerExtension, receiver_for
from instep.errors import PlanError, VersionConflict
from instep.protocol import WorkerReceipt


class RoundsExtension(WorkerExtension):
    """`self` is vLLM's worker. A push from a `WeightSync` reaches it too."""

    instep_cast = False

    @by_all
    def finish_update(self, version: str | None = None) -> WorkerReceipt:
        """Commits the tensors that were sent since the last commit, under the label `version`, or
        none of them."""
        return rounds_of(self).finish(version)

    def check_weights_changed(self, since: str | None = None) -> bool | None:
        """Without `since`: whether the last update is in place and brought other bytes than the one
        before, or every parameter is near zero, which is what the examples' trainer sends. Weights
        that came alone are put in place first.

        since: a version that this engine served; whether its weights have another digest now.
        Raises `VersionConflict` for one that it did not serve, or whose digest only the trainer
        knows.
        """
        return with_one_voice(self, lambda: changed(rounds_of(self), since))[0]

    def instep_join(self, rank_offset: int, enter: Callable[[int], Communicator], timeout: float) -> None:
        """Takes this worker's place in a group; a round that an earlier trainer left is forgotten.
        enter: joins with a rank."""
        rounds = rounds_of(self)
        rounds.leave()
        rounds.peers.timeout = min(timeout, DEADLINE)  # they work on the same at the same time
        leave(self)
        parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
        engine = getattr(parallel, "data_parallel_index", 0)
        vars(self)["model_update_group"] = enter(rank_offset + engine * parallel.world_size + self.rank)  # type: ignore[attr-defined]

    def instep_call_failed(self, reason: str) -> None:
        """A call failed on its way to this worker (see `engine/vllm/failed_calls.py`): a trainer
        that waits for it need not wait."""
        if (group := vars(self).get("model_update_group")) is not None:
            group.meeting.refuse(f"a call of the engine's workers failed on its way: {reason}")

    def instep_receive(self, name: str, dtype: str | torch.dtype, shape: Any, *, last: bool | None) -> WorkerReceipt | None:
        """One broadcast of the trainer. last: see `Rounds.add`."""
        group: Communicator | None = vars(self).get("model_update_group")
        if group is None:
            raise PlanError("this worker is in no group: no trainer can broadcast to it", next_step="call the init method first")
        if group.meeting.missed():
            rounds_of(self).heard()

        def bring() -> torch.Tensor:
            try:
                room = torch.empty(tuple(shape), dtype=dtype_of(dtype), device=group.device)
            except Exception:
                group.skip()
                raise
            group.broadcast(room)
            return room

        return rounds_of(self).add(name, bring, last=last)

    def instep_copy(self, name: str, dtype: str | torch.dtype, shape: Any, handles: Handles, *, last: bool | None) -> WorkerReceipt | None:
        """One tensor in the trainer's memory on this GPU. handles: see `handles.of_worker`. last:
        see `Rounds.add`."""

        def bring() -> torch.Tensor:
            device: torch.device = self.device  # type: ignore[attr-defined]
            handle = of_worker(handles, device_id(device), self.rank)  # type: ignore[attr-defined]
            return rebuild_tensor(handle, dtype_of(dtype), tuple(shape), device.index).clone()

        return rounds_of(self).add(name, bring, last=last)


def changed(rounds: Rounds, since: str | None) -> bool:
    if since is None:
        rounds.settle_alone()
        return rounds.changed or all(torch.allclose(param, torch.zeros_like(param)) for param in rounds.receiver.host.model.parameters())
    history, now = rounds.receiver.history, rounds.receiver.version
    if since in history and now in (None, since):
        return False
    if history.get(since) and now and history[now]:
        return history[since] != history[now]
    if since in history:
        raise VersionConflict(f"only the trainer knows the digests of {since!r} and {now!r}: their bytes came live (ipc, nccl)")
    served = ", ".join(list(history)[-8:]) or "its first weights alone"
    raise VersionConflict(f"this engine did not serve {since!r}; it served {served}")


def rounds_of(worker: Any) -> Rounds:
    """The worker's rounds. From their first use on it refuses to run a model that holds parts of
    two versions."""
    held = vars(worker)
    if "instep_rounds" not in held:
        rounds = Rounds(receiver_for(worker), peers_of(worker, "rounds"), cast=worker.instep_cast)
        held["instep_rounds"] = rounds
        rounds.first = partial(loaded_from, worker)
        refuse_while(worker, rounds.together.dirty, rounds.settle)
    found: Rounds = held["instep_rounds"]
    return found


def leave(worker: Any) -> None:
    if (group := vars(worker).pop("model_update_group", None)) is not None:
        group.close()
