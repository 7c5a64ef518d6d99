"""vLLM's own NCCL weight transfer, as a user drives it: the trainer sends from a thread while `update_weights` blocks.

Written for the trainer's side of vLLM 0.25 to 0.27. From `start_weight_update` to `finish_weight_update` the engine cannot generate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from instep.bench.group import free_port
from instep.bench.measure import Push
from instep.bench.subjects import Subject
from instep.bench.trainer import Trainer
from instep.bench.waits import DEADLINE, beside
from instep.protocol import dtype_name


@contextmanager
def vllm_nccl(packed: bool, trainer: Trainer, subject: Subject) -> Iterator[Push]:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine as Transfer

    llm = subject.engine
    group = _joined(Transfer, llm)
    update = {
        "names": list(trainer.tensors),
        "dtype_names": [dtype_name(tensor.dtype) for tensor in trainer.tensors.values()],
        "shapes": [list(tensor.shape) for tensor in trainer.tensors.values()],
        "packed": packed,
    }

    def push() -> dict[str, float]:
        started = time.perf_counter()
        llm.start_weight_update()
        begun = time.perf_counter()
        sending = beside(lambda: Transfer.trainer_send_weights(trainer.whole(), {"group": group, "packed": packed}))
        llm.update_weights({"update_info": update})
        sending.result(DEADLINE)
        updated = time.perf_counter()
        llm.finish_weight_update()
        done = time.perf_counter()
        return {"pause": done - started, "start": begun - started, "update": updated - begun, "finish": done - updated}

    yield push
    group.destroy()


def _joined(transfer: Any, llm: Any) -> Any:
    """Returns the trainer's end of a group with the engine's worker."""
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
    joining = beside(lambda: transfer.trainer_init(info))
    llm.init_weight_transfer_engine({"init_info": {**info, "rank_offset": 1}})
    return joining.result(DEADLINE)
