"""TorchRL's schemes with the trainer on one GPU and a vLLM on the other. TorchRL and Ray need not
be there."""

from __future__ import annotations

import importlib.util
import multiprocessing
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_models import generated, model, start, stop_vllm
from gpus import OTHER

from instep.dropin.answers import in_thread
from instep.dropin.torchrl import (
    VLLMDoubleBufferSyncScheme,
    VLLMWeightReceiver,
    VLLMWeightSender,
    VLLMWeightSyncScheme,
    get_model_metadata,
)
from instep.errors import ConfigError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: pip install 'instep[vllm]'",
)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[Any]:
    """On the other GPU, loaded from disk with the weights of seed 2."""
    llm = start(checkpoint, OTHER, load_format="auto", enforce_eager=False)
    llm.fresh = generated(llm)
    yield llm
    stop_vllm(llm)


def meet(sender: VLLMWeightSender, receiver: VLLMWeightReceiver, metadata: Any, **engine: Any) -> None:
    for end in [
        in_thread(lambda: sender.init_all_workers_group(metadata, **engine)),
        in_thread(lambda: receiver.init_all_workers_group(metadata)),
    ]:
        end.result(120)


@pytest.mark.parametrize("way", ["tcp", "pipe"])
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_schemes_that_have_only_their_arguments_in_common(llm: Any, way: str, strategy: str) -> None:
    """The engine is the policy's, which is found from a context. The trainer's weights are float32,
    the engine's bfloat16."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        arguments: dict[str, Any] = {
            "master_port": probe.getsockname()[1],
            "strategy": strategy,
            "timeout": 60.0,
        }
    policy = torch.nn.Module()
    policy.model = llm
    context, trainer = SimpleNamespace(policy=policy), model("tiny", 1, "cuda:0").float()
    sender, receiver = (
        VLLMWeightSyncScheme(**arguments).create_sender(),
        VLLMWeightSyncScheme(**arguments).create_receiver(),
    )
    receiver.set_context(context)
    receiver.register_model("policy")
    if way == "pipe":
        parent_pipe, child_pipe = multiprocessing.Pipe()
        sender.register_worker(worker_idx=0, pipe_or_context=parent_pipe)
        receiver.register_worker_transport(child_pipe)
    sender.register_model(trainer)
    meet(sender, receiver, get_model_metadata(trainer))
    sender.update_weights()
    assert receiver.poll_and_apply(timeout=5.0)
    assert generated(llm) != llm.fresh
    trainer.load_state_dict(model("tiny", 2, "cuda:0").state_dict())
    sender.update_weights()
    assert generated(llm) == llm.fresh
    sender.shutdown()
    receiver.shutdown()


def test_sizes_and_devices_are_compared_with_what_is_there(llm: Any) -> None:
    metadata = get_model_metadata(model("tiny", 2, "cuda:0"))
    for wrong, words in (
        ({"gpus_per_replica": 2}, "has 1"),
        ({"num_replicas": 2}, "there are 1"),
        ({"device": 99}, "GPUs here"),
    ):
        with pytest.raises(ConfigError, match=words):
            VLLMWeightSyncScheme(**wrong).create_sender().init_all_workers_group(metadata, vllm_engine=llm)
    assert generated(llm) == llm.fresh


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_the_pages_own_sequence(llm: Any, transport: Any) -> None:
    """The sequence of TorchRL's page with the engine given to the sender."""
    scheme = VLLMWeightSyncScheme(timeout=60.0, transport=transport)
    sender, receiver = scheme.create_sender(), scheme.create_receiver(llm)
    sender.register_model(trainer := model("tiny", 1, "cuda:0"))
    metadata = get_model_metadata(trainer)
    meet(sender, receiver, metadata, vllm_engine=receiver)
    assert sender.update_weights().transport == transport
    assert receiver.poll_and_apply(timeout=0.1)
    assert generated(llm) != llm.fresh
    trainer.load_state_dict(model("tiny", 2, "cuda:0").state_dict())
    sender.update_weights()
    assert generated(llm) == llm.fresh
    sender.shutdown()
    receiver.shutdown()


def test_the_double_buffer(llm: Any, tmp_path: Path) -> None:
    scheme = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path), num_threads=4)
    sender, receiver = scheme.create_sender(), scheme.create_receiver(llm)
    for seed in (1, 2):
        sender.update_weights(model("tiny", seed, "cuda:0"))
        assert receiver.poll_and_apply() is True
        assert (generated(llm) == llm.fresh) == (seed == 2)
    receiver.apply_weights(scheme.create_transport().receive_weights())
    assert generated(llm) == llm.fresh
