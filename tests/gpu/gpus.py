"""The GPUs of the tests: the trainer's is the first, engines for which it matters are on the other.

NCCL connects no two processes on one GPU, unless they seem to be on two hosts. So they do where there is one GPU: its kernels, streams,
deadlines and aborts are what they are between two, and only the bytes take a socket instead of NVLink. That says nothing about speed.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import torch

from instep.transport.broadcast import publish as broadcast
from instep.transport.group import environment

ALONE = torch.cuda.device_count() == 1
OTHER = "0" if ALONE else "1"
"""What `CUDA_VISIBLE_DEVICES` says of the other GPU."""
OTHER_DEVICE = f"cuda:{OTHER}"
SOCKETS = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


def on_host(name: str) -> None:
    """This process seems to be on a host of that name. To be called before NCCL is used in it."""
    if ALONE:
        os.environ.update({**SOCKETS, "NCCL_HOSTID": name})
        broadcast.uuid_of = lambda device: "the trainer's GPU" if device.type == "cuda" else None


def apart(name: str = "engine") -> AbstractContextManager[None]:
    """Processes that start within seem to be on a host of that name."""
    return environment({"NCCL_HOSTID": name} if ALONE else {})
