"""vLLM's own CUDA IPC weight transfer, trainer and engine on one GPU. It sends pickled handles, one update or one for each packed buffer.

Written for the trainer's side of vLLM 0.25 to 0.27. From `start_weight_update` to `finish_weight_update` the engine cannot generate.
"""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from instep.bench.measure import Push
from instep.bench.subjects import Subject
from instep.bench.trainer import Trainer

BUFFER = 1 << 30
"""Bytes, vLLM's default."""


@contextmanager
def vllm_ipc(packed: bool, trainer: Trainer, subject: Subject) -> Iterator[Push]:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine as Transfer

    llm = subject.engine
    llm.init_weight_transfer_engine({"init_info": {}})
    room = max(BUFFER, *(tensor.nbytes for tensor in trainer.tensors.values()))  # it refuses a tensor that is larger than its buffer

    def send(info: Any) -> None:
        fields = {name: value for name, value in vars(info).items() if name != "ipc_handles"}
        handles = base64.b64encode(pickle.dumps(info.ipc_handles)).decode()
        llm.update_weights({"update_info": {**fields, "ipc_handles_pickled": handles}})

    def push() -> dict[str, float]:
        started = time.perf_counter()
        llm.start_weight_update()
        begun = time.perf_counter()
        try:
            Transfer.trainer_send_weights(
                iter(trainer.tensors.items()), {"send_mode": send, "packed": packed, "packed_buffer_size_bytes": room}
            )
        except Exception:
            with suppress(Exception):  # or the model stays on the meta device, and every other way on this engine fails too
                llm.finish_weight_update()
            raise
        updated = time.perf_counter()
        llm.finish_weight_update()
        done = time.perf_counter()
        return {"pause": done - started, "start": begun - started, "update": updated - begun, "finish": done - updated}

    yield push
