"""vLLM's own weight transfers, as a user drives them.

Written for the trainer's side of vLLM 0.25 to 0.27. From `start_weight_update` to
`finish_weight_update` the engine cannot generate.
"""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from instep.bench.fsdp2 import Fsdp2Trainer
from instep.bench.group import free_port
from instep.bench.measure import Push
from instep.bench.subjects import Subject
from instep.bench.trainer import Trainer
from instep.bench.waits import DEADLINE, beside
from instep.protocol import dtype_name

BUFFER = 1 << 30
"""Bytes of a packed buffer, vLLM's default."""


@contextmanager
def vllm_ipc(packed: bool, trainer: Trainer, subject: Subject) -> Iterator[Push]:
    """Sends pickled CUDA IPC handles to an engine on the trainer's GPU, one update or one for each
    packed buffer."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine as Transfer

    llm = subject.engine
    llm.init_weight_transfer_engine({"init_info": {}})
    room = max(BUFFER, *(tensor.nbytes for tensor in trainer.tensors.values()))  # it refuses a tensor that is larger than its buffer

    def update(info: Any) -> None:
        fields = {name: value for name, value in vars(info).items() if name != "ipc_handles"}
        handles = base64.b64encode(pickle.dumps(info.ipc_handles)).decode()
        llm.update_weights({"update_info": {**fields, "ipc_handles_pickled": handles}})

    def send() -> None:
        try:
            Transfer.trainer_send_weights(
                iter(trainer.tensors.items()), {"send_mode": update, "packed": packed, "packed_buffer_size_bytes": room}
            )
        except Exception:
            with suppress(Exception):  # or the model stays on the meta device, and every other way on this engine fails too
                llm.finish_weight_update()
            raise

    yield lambda: _timed(llm, send)


@contextmanager
def vllm_nccl(packed: bool, trainer: Trainer, subject: Subject) -> Iterator[Push]:
    """Sends over NCCL from a thread while `update_weights` blocks, packed or one tensor at a
    time."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine as Transfer

    llm = subject.engine
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
    joining = beside(lambda: Transfer.trainer_init(info))
    llm.init_weight_transfer_engine({"init_info": {**info, "rank_offset": 1}})
    group = joining.result(DEADLINE)
    update = {
        "names": list(trainer.tensors),
        "dtype_names": [dtype_name(tensor.dtype) for tensor in trainer.tensors.values()],
        "shapes": [list(tensor.shape) for tensor in trainer.tensors.values()],
        "packed": packed,
    }

    def send() -> None:
        sending = beside(lambda: Transfer.trainer_send_weights(trainer.whole(), {"group": group, "packed": packed}))
        llm.update_weights({"update_info": update})
        sending.result(DEADLINE)

    yield lambda: _timed(llm, send)
    group.destroy()


def _timed(llm: Any, send: Callable[[], None]) -> dict[str, float]:
    """Runs one update. Returns the seconds of its parts."""
    started = time.perf_counter()
    llm.start_weight_update()
    begun = time.perf_counter()
    send()
    updated = time.perf_counter()
    llm.finish_weight_update()
    done = time.perf_counter()
    return {"pause": done - started, "start": begun - started, "update": updated - begun, "finish": done - updated}


@contextmanager
def full_tensors(trainer: Trainer, subject: Subject) -> Iterator[Push]:
    """Gathers each parameter with `full_tensor()`. Rank 0 sends it to the engine by vLLM's own
    packed NCCL transfer."""
    assert isinstance(trainer, Fsdp2Trainer)
    with vllm_nccl(True, trainer, subject) as send:

        def push() -> dict[str, float]:
            with trainer.peer.doing("gather"):
                return send()

        yield push
