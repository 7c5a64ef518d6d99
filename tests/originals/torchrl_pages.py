"""What TorchRL's pages need: its own test actors with their imports changed, Ray on this machine,
and a model with a tokenizer."""

from __future__ import annotations

import inspect
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray
import torch
from engines import SETTINGS, greedy, start
from helpers.ray_fleet import environment
from models import save, tiny

from instep.bench.subjects import stop_vllm

SOON = 120.0
STARTED = 400.0  # seconds until engines answer
WORDS, END = 148, 148
PROMPT = {"prompt_token_ids": [1, 2, 3, 4, 5]}
CHANGED = {
    "torchrl.modules.llm.backends import": "instep.dropin.torchrl import",
    "torchrl.weight_update.llm.vllm_nccl import": "instep.dropin.torchrl import",
    "torchrl.weight_update.llm.vllm_double_buffer import": "instep.dropin.torchrl import",
}
"""The imports that a user of TorchRL changes."""


def torchrls_actors() -> Any:
    """The classes of `torchrl.testing.ray_helpers`, which its own tests of weight updates run.
    Beside
    the imports one thing is changed where there is no GPU: `.cuda()`."""
    from torchrl.testing import ray_helpers

    text = inspect.getsource(ray_helpers)
    for old, new in CHANGED.items():
        assert old in text
        text = text.replace(old, new)
    if not torch.cuda.is_available():
        text = text.replace(".cuda()", "")
    found: dict[str, Any] = {"__name__": "changed"}  # of no module: Ray sends such classes whole
    exec(text, found)
    seen = {
        "__module__": "changed",
        "get_engine": lambda self: self.engine,
    }  # which one of the two receivers has
    found["WorkerVLLMDoubleBuffer"] = type("WorkerVLLMDoubleBuffer", (found["WorkerVLLMDoubleBuffer"],), seen)
    return type("Actors", (), found)


@contextmanager
def cluster() -> Iterator[None]:
    """Ray on this machine. GPUs are numbers to it here, which TorchRL's actors ask for; the engines
    are within their actors' processes."""
    ray.init(
        num_cpus=2,
        num_gpus=4,
        include_dashboard=False,
        runtime_env=environment({**SETTINGS, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
        logging_level="ERROR",
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


def remote(actor: Any, *args: Any, **options: Any) -> Any:
    """An actor as TorchRL starts it, on a machine with fewer processors than that asks for."""
    return actor.as_remote().options(num_cpus=0, num_gpus=0, **options).remote(*args)


def get(reference: Any, seconds: float = SOON) -> Any:
    return ray.get(reference, timeout=seconds)


def model_folder(folder: Path) -> str:
    """A model of seed 1 and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save(tiny("llama", 1), folder)
    vocabulary = {
        **{f"w{index}": index for index in range(WORDS)},
        "<end>": END,
        "<unknown>": END + 1,
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<end>",
        unk_token="<unknown>",
        pad_token="<end>",
        padding_side="left",
    ).save_pretrained(folder)
    return str(folder)


class Receiver:
    """The engine's side in a process of its own, which makes its scheme itself."""

    def __init__(self, scheme: Any, arguments: dict[str, Any], engine: Any) -> None:
        self.receiver = scheme(**arguments).create_receiver(engine)

    def do(self, method: str, *args: Any) -> Any:
        return getattr(self.receiver, method)(*args)


class InnerCollector:
    """What the page's `set_context` is given: it has the policy, which has the engine."""

    def __init__(self, folder: str) -> None:
        from torchrl.modules.llm import vLLMWrapper

        self.llm = start(Path(folder), load_format="auto")
        self.policy = vLLMWrapper(self.llm, input_mode="history", tokenizer=folder)


def worker(orders: Connection, pipe: Connection, folder: str, arguments: dict[str, Any], metadata: Any) -> None:
    """A process with a `vllm.LLM` and its receiver, as the page has them before TorchRL 0.11. It is
    told what to do by `orders`."""
    from instep.dropin.torchrl import VLLMWeightSyncScheme

    os.environ.update(SETTINGS, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    inner = InnerCollector(folder)
    receiver = VLLMWeightSyncScheme(**arguments).create_receiver(None)
    receiver.set_context(inner)
    receiver.register_model("policy")
    receiver.register_worker_transport(pipe)
    orders.send("ready")
    while (order := orders.recv()) != "stop":
        if order == "said":
            orders.send(greedy(inner.llm, [PROMPT["prompt_token_ids"]]))
        elif order == "another":
            receiver.shutdown()
            receiver = VLLMWeightSyncScheme(**arguments).create_receiver(inner.policy)
        elif order == "init":
            receiver.init_all_workers_group(metadata)
        else:
            orders.send(receiver.poll_and_apply(timeout=5.0))
    stop_vllm(inner.llm)


@contextmanager
def in_a_process(*args: Any) -> Iterator[Callable[..., Any]]:
    """`worker` in a process, and what sends it an order and waits for its answer, if it has one."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=worker, args=(theirs, *args))
    process.start()
    theirs.close()

    def do(order: str) -> Any:
        ours.send(order)
        if order in ("said", "poll"):
            assert ours.poll(SOON)
            return ours.recv()
        return None

    try:
        assert ours.poll(STARTED)
        assert ours.recv() == "ready"
        yield do
        do("stop")
    finally:
        process.join(60)
        process.kill()


def said(engine: Any) -> list[list[int]]:
    """What each replica of an `AsyncVLLM` says."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = [engine.generate(PROMPT, sampling, actor_index=index) for index in range(engine.num_replicas)]
    return [list(each.outputs[0].token_ids) for each in found]
