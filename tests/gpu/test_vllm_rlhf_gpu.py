"""vLLM's RLHF examples on GPUs: its own colocated trainer half with CUDA handles, and how a broadcast over NCCL ends that nobody joins."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import generated, model, start, stop_vllm
from gpus import OTHER, OTHER_DEVICE
from torch.multiprocessing.reductions import reduce_tensor

from instep.dropin.answers import in_thread
from instep.dropin.vllm_rlhf import Communicator, stateless_init_process_group
from instep.errors import TransportError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'instep[vllm]'")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[Any]:
    """On the other GPU, loaded from disk with the weights of seed 2."""
    made = start(checkpoint, OTHER, load_format="auto", worker_extension_cls="gpu_extensions.BothExamples")
    made.fresh = generated(made)
    yield made
    stop_vllm(made)


def joined(llm: Any, timeout: float) -> Communicator:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    joining = in_thread(lambda: llm.collective_rpc("init_weight_update_group", args=("127.0.0.1", port, 1, 2, timeout)))
    group = stateless_init_process_group("127.0.0.1", port, 0, 2, torch.device("cuda:0"), timeout)
    joining.result(60)
    return group


def send(llm: Any, group: Communicator, name: str, p: torch.Tensor) -> None:
    handle = in_thread(lambda: llm.collective_rpc("update_weight", args=(name, str(p.dtype).split(".")[-1], p.shape)))
    group.broadcast(p, src=0, stream=torch.cuda.current_stream(group.device))
    handle.result(60)


def test_one_weight_and_then_all_in_an_engine_that_has_its_first_weights(llm: Any) -> None:
    """First in this file."""
    group, trainer = joined(llm, 60), model("tiny", 1, "cuda:0")
    name, p = next((name, p) for name, p in trainer.named_parameters() if "o_proj" in name)
    send(llm, group, name, p)
    assert all(llm.collective_rpc("check_weights_changed"))
    assert generated(llm) != llm.fresh
    for seed in (1, 2):
        for name, p in model("tiny", seed, "cuda:0").named_parameters():
            send(llm, group, name, p)
        assert all(llm.collective_rpc("check_weights_changed"))
        assert (generated(llm) == llm.fresh) is (seed == 2)
    group.destroy()


def test_a_broadcast_that_nobody_was_asked_to_join_ends(llm: Any) -> None:
    group = joined(llm, 60)
    group.timeout = 3
    with pytest.raises(TransportError, match="nothing was sent: rank 1 was not called within 3 s"):
        group.broadcast(torch.ones(4, device="cuda:0"), src=0)
    group.timeout = 60
    assert generated(llm) == llm.fresh
    for name, p in model("tiny", 2, "cuda:0").named_parameters():
        send(llm, group, name, p)
    assert generated(llm) == llm.fresh
    group.destroy()


def example(weights: list[tuple[str, torch.Tensor]], address: str) -> None:
    """The trainer half of vLLM's example, in our words: pickles over ZMQ, and it looks at no answer."""
    import zmq

    context = zmq.Context()
    s: Any = context.socket(zmq.REQ)
    s.bind(address)
    try:
        buffer = torch.empty(2 * max(p.nbytes for _, p in weights), dtype=torch.uint8, device=OTHER_DEVICE)
        s.send_pyobj(reduce_tensor(buffer))
        s.recv()
        for name, p in weights:
            buffer[: p.nbytes].copy_(p.detach().reshape(-1).view(torch.uint8), non_blocking=True)
            torch.cuda.synchronize(buffer.device)
            s.send_pyobj([{"name": name, "dtype": p.dtype, "shape": p.shape, "offset": 0}])
            s.recv()
        s.send_pyobj(None)
        s.recv()
    finally:
        context.destroy(linger=0)


def test_vllms_own_colocated_trainer_half(llm: Any, tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: vLLM brings it")
    (device,) = llm.collective_rpc("report_device_id")
    for seed in (1, 2):
        address = f"ipc://{tmp_path}/{seed}.sock"
        taking = in_thread(lambda address=address: llm.collective_rpc("update_weights_from_ipc", args=({device: address},)))
        example(list(model("tiny", seed, OTHER_DEVICE).named_parameters()), address)
        assert taking.result(60)[0]["committed"]
        assert (generated(llm) == llm.fresh) is (seed == 2)
    twice = list(model("tiny", 1, OTHER_DEVICE).named_parameters())
    twice.insert(2, twice[0])
    address = f"ipc://{tmp_path}/refused.sock"
    taking = in_thread(lambda: llm.collective_rpc("update_weights_from_ipc", args=({device: address},)))
    with pytest.raises(zmq.ZMQError):
        example(twice, address)
    with pytest.raises(Exception, match="came twice"):
        taking.result(60)
    assert generated(llm) == llm.fresh
