"""The ways to bring weights into an engine, and which of them are compared with which.

ours.py   instep, over each of its transports, also from two ranks of a sharded trainer
vllm.py   vLLM's own transfers over NCCL and CUDA IPC, also after gathering a sharded one
plain.py  a checkpoint on a RAM disk, broadcasts tensor by tensor, a reload that transfers nothing
"""

from __future__ import annotations

from functools import partial

from instep.bench.contenders.ours import instep, instep_from_ranks
from instep.bench.contenders.plain import gloo, reload_in_memory, save_and_reload
from instep.bench.contenders.vllm import full_tensors, vllm_ipc, vllm_nccl
from instep.bench.measure import Way

MEMORY_COPY, DEVICE_COPY, PEER_COPY = "memory copy", "device copy", "peer copy"
HALVES = "half from each rank's GPU, at once"
NCCL, GLOO = "NCCL broadcast", "Gloo broadcast"

ON_CPU = (
    Way("instep shm", partial(instep, "shm"), MEMORY_COPY, "save and reload"),
    Way("instep gloo", partial(instep, "gloo"), GLOO, "save and reload"),
    Way("reload in memory", reload_in_memory, MEMORY_COPY),
    Way("save and reload", save_and_reload, MEMORY_COPY),
    Way("gloo, tensor by tensor", gloo, GLOO, "save and reload"),
)
ON_ANOTHER_GPU = (
    Way("instep ipc", partial(instep, "ipc"), PEER_COPY, "vLLM nccl packed"),
    Way("instep nccl", partial(instep, "nccl"), NCCL, "vLLM nccl packed"),
    Way("vLLM nccl packed", partial(vllm_nccl, True), NCCL),
    Way("vLLM nccl", partial(vllm_nccl, False), NCCL, "vLLM nccl packed"),
)
ON_THE_TRAINERS_GPU = (
    Way("instep ipc", partial(instep, "ipc"), DEVICE_COPY, "vLLM ipc"),
    Way("vLLM ipc", partial(vllm_ipc, False), DEVICE_COPY),
    Way("vLLM ipc packed", partial(vllm_ipc, True), DEVICE_COPY, "vLLM ipc"),
)
FROM_TWO_RANKS = (
    Way("instep ipc", partial(instep_from_ranks, "ipc"), HALVES, "full_tensor, vLLM nccl packed"),
    Way("instep nccl", partial(instep_from_ranks, "nccl"), NCCL, "full_tensor, vLLM nccl packed"),
    Way("full_tensor, vLLM nccl packed", full_tensors, NCCL),
)
