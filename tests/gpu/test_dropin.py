"""The drop-ins whose tensors come one at a time, on GPUs: NCCL from another GPU, CUDA IPC on the engine's own."""

from __future__ import annotations

import importlib.util
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import PROMPTS, generated, greedy, model, start, stop_vllm
from gpus import OTHER, OTHER_DEVICE
from torch.multiprocessing.reductions import reduce_tensor

from instep.dropin.answers import in_thread
from instep.dropin.communicator import Communicator, join
from instep.dropin.handles import rebuild_ipc, share
from instep.dropin.open_instruct import broadcast_weights_to_vllm, init_process_group
from instep.dropin.vllm_rlhf import ColocateSender, stateless_init_process_group
from instep.errors import TransportError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'instep[vllm]'")


def engine(checkpoint: Path, extension: str) -> Iterator[Any]:
    """On the other GPU, loaded from disk with the weights of seed 2."""
    llm = start(checkpoint, OTHER, load_format="auto", enforce_eager=False, worker_extension_cls=extension)
    llm.fresh = generated(llm)
    yield llm
    stop_vllm(llm)


@pytest.fixture(scope="module")
def examples(checkpoint: Path) -> Iterator[Any]:
    yield from engine(checkpoint, "gpu_extensions.BothExamples")


@pytest.fixture(scope="module")
def wrapped(checkpoint: Path) -> Iterator[Any]:
    yield from engine(checkpoint, "instep.dropin.open_instruct.WorkerWrap")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def joined(llm: Any, timeout: float = 60) -> Communicator:
    port = free_port()
    joining = in_thread(lambda: llm.collective_rpc("init_weight_update_group", args=("127.0.0.1", port, 1, 2, timeout)))
    group = stateless_init_process_group("127.0.0.1", port, 0, 2, torch.device("cuda:0"), timeout)
    joining.result(60)
    return group


def update(llm: Any, group: Communicator, trainer: Any) -> Any:
    for name, p in trainer.named_parameters():
        handle = in_thread(lambda name=name, p=p: llm.collective_rpc("update_weight", args=(name, str(p.dtype), p.shape)))
        group.broadcast(p, src=0, stream=torch.cuda.current_stream(group.device))
        statuses = handle.result(60)
    return statuses


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL takes one once in a process")
def test_the_collectives_between_two_gpus() -> None:
    """Ranks in two threads. The calls of the second come from a thread in which its GPU is not the current one."""
    port = free_port()
    other = in_thread(lambda: join("127.0.0.1", port, 1, 2, torch.device("cuda:1"), 30))
    first = join("127.0.0.1", port, 0, 2, torch.device("cuda:0"), 30)
    second: Communicator = other.result(60)
    for tensor in (torch.randn(1000, 33).to(torch.bfloat16), torch.randn(3), torch.randn(64, 4).t(), torch.tensor(2.5), torch.empty(0, 3)):
        sent, room = tensor.to("cuda:0"), torch.zeros_like(tensor, device="cuda:1")
        receiving = in_thread(lambda room=room: second.broadcast(room))
        first.broadcast(sent)
        receiving.result(30)
        assert torch.equal(room.cpu(), tensor)
    summing = in_thread(lambda: second.all_reduce(torch.ones(5, device="cuda:1")))
    assert first.all_reduce(torch.ones(5, device="cuda:0")).tolist() == summing.result(30).tolist() == [2.0] * 5
    point = torch.zeros(3, device="cuda:1")
    receiving = in_thread(lambda: second.recv(point, 0))
    first.send(torch.arange(3.0, device="cuda:0"), 1)
    receiving.result(30)
    assert point.tolist() == [0, 1, 2]

    def confused() -> None:
        with pytest.raises(TransportError, match="sent 24 bytes that are no"):
            second.broadcast(torch.zeros(7, device="cuda:1"))
        second.broadcast(point)

    receiving = in_thread(confused)
    first.broadcast(torch.arange(6.0, device="cuda:0"))
    first.broadcast(torch.full((3,), 9.0, device="cuda:0"))
    receiving.result(30)
    assert point.tolist() == [9.0] * 3
    first.close()
    second.close()


def test_the_broadcast_of_the_examples(examples: Any) -> None:
    group = joined(examples)
    trainer = model("tiny", 1, "cuda:0")
    update(examples, group, trainer)
    assert generated(examples) != examples.fresh
    trainer.load_state_dict(model("tiny", 2, "cuda:0").state_dict())
    assert update(examples, group, trainer)[0]["committed"]
    assert generated(examples) == examples.fresh
    for p in trainer.parameters():
        p.data.zero_()
    update(examples, group, trainer)
    assert examples.collective_rpc("check_weights_changed") == [True]
    update(examples, group, model("tiny", 2, "cuda:0").float())
    assert generated(examples) == examples.fresh
    group.close()


def test_a_trainer_that_does_not_send_is_not_waited_for(examples: Any) -> None:
    group = joined(examples, timeout=4)
    update(examples, group, model("tiny", 2, "cuda:0"))
    started = time.monotonic()
    with pytest.raises(Exception, match="within 4 s"):
        examples.collective_rpc("update_weight", args=("model.norm.weight", "bfloat16", [256]))
    assert time.monotonic() - started < 30
    assert generated(examples) == examples.fresh
    update(examples, joined(examples), model("tiny", 1, "cuda:0"))
    assert generated(examples) != examples.fresh


def test_the_colocated_example(examples: Any) -> None:
    """Trainer and worker on one GPU."""
    (device,) = examples.collective_rpc("report_device_id")
    assert device.startswith("GPU-")
    for seed in (1, 2):
        sender = ColocateSender(model("tiny", seed, OTHER_DEVICE), timeout=60)
        assert sender.report_device_id() == device
        handles, version = sender.get_zmq_handles(), f"colocated-{seed}"
        taking = in_thread(lambda handles=handles: examples.collective_rpc("update_weights_from_ipc", args=(handles, 60)))
        assert sender.update_weights(version) == version
        assert taking.result(60)[0]["committed"]
    assert generated(examples) == examples.fresh


def test_memory_stays_flat_when_a_buffer_is_shared_again_and_again(examples: Any) -> None:
    sender = ColocateSender(model("tiny", 2, OTHER_DEVICE), timeout=60)
    free = []
    for turn in range(40):
        handles = sender.get_zmq_handles()
        taking = in_thread(lambda handles=handles: examples.collective_rpc("update_weights_from_ipc", args=(handles, 60)))
        sender.update_weights()
        taking.result(60)
        if turn in (10, 39):
            free.append(torch.cuda.mem_get_info(OTHER_DEVICE)[0])
    assert free[1] >= free[0] - (8 << 20)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_open_instructs_broadcast(wrapped: Any, backend: str) -> None:
    port = free_port()
    joining = in_thread(lambda: wrapped.collective_rpc("init_process_group", args=("127.0.0.1", port, 1, 2, "openrlhf", backend, False, 1)))
    with torch.cuda.device(0):
        group = init_process_group(
            backend, f"tcp://127.0.0.1:{port}", timeout=timedelta(minutes=1), world_size=2, rank=0, group_name="openrlhf"
        )
    joining.result(60)
    for seed in (1, 2):
        broadcast_weights_to_vllm(model("tiny", seed, "cuda:0"), [wrapped], group, 0)
        assert (greedy(wrapped, PROMPTS) == wrapped.fresh) == (seed == 2)
    group.close()


def test_open_instructs_cuda_ipc(wrapped: Any) -> None:
    """Through vLLM's own RPC, which pickles nothing: handles of plain fields."""
    (device,) = wrapped.collective_rpc("report_device_id")
    for seed in (1, 2):
        weights = dict(model("tiny", seed, OTHER_DEVICE).named_parameters())
        for index, (name, p) in enumerate(weights.items(), 1):
            torch.cuda.synchronize(OTHER_DEVICE)
            arguments = (name, str(p.dtype), list(p.shape), {device: share(p)}, index == len(weights))
            (status,) = wrapped.collective_rpc("update_weight_cuda_ipc", args=arguments)
        assert status["committed"]
        assert (generated(wrapped) == wrapped.fresh) == (seed == 2)
    with pytest.raises(Exception, match="nothing is meant for this worker's device"):
        wrapped.collective_rpc("update_weight_cuda_ipc", args=("model.norm.weight", "bfloat16", [256], {"GPU-other": share(p)}))
    assert generated(wrapped) == wrapped.fresh


OPEN: dict[str, Callable[[torch.Tensor], Any]] = {"reduce_tensor": reduce_tensor, "share": share}


def open_in_another_process(handle: Any, queue: Any) -> None:
    tensor = rebuild_ipc(handle, 0)
    queue.put(tensor.float().sum().item())
    del tensor


@pytest.mark.parametrize("how", OPEN)
def test_a_handle_is_opened_in_another_process(how: str) -> None:
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    tensor = torch.arange(1000.0, device="cuda:0")[100:300].view(10, 20)
    process = context.Process(target=open_in_another_process, args=(OPEN[how](tensor), queue))
    process.start()
    try:
        assert queue.get(timeout=120) == tensor.sum().item()
    finally:
        process.join(30)
        process.kill()
