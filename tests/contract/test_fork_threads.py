"""A vLLM worker that was forked from a process whose OpenMP has threads goes on computing in host memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, time, types
import torch
from instep.engine.vllm import worker as vllm_worker

torch.set_num_threads(2)
b = (torch.randn(512, 512) * 2 + 1).exp()  # with threads
child = os.fork()
if child == 0:
    vllm_worker.watch = lambda *_: None
    host = types.SimpleNamespace(device={device!r}, busy=False)
    vllm_worker.adopt(types.SimpleNamespace(), host, lambda host: None)
    torch.zeros(512, 512).copy_(b.t())
    os._exit(7)
for _ in range(100):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        raise SystemExit(os.waitstatus_to_exitcode(status))
    time.sleep(0.1)
os.kill(child, 9)
"""


@pytest.mark.parametrize(("device", "code"), [("cuda:0", 7), ("cpu", 0)], ids=["on a GPU", "what would happen"])
def test_it_is_not_waited_for_threads_that_are_not_there(device: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.replace("{device!r}", repr(device))], timeout=60, check=False)
    assert done.returncode == code
