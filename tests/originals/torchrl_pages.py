"""What TorchRL's pages need: its own test actors with their imports changed, Ray on this machine,
and a model with a tokenizer."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import time
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
from instep.dropin.torchrl import VLLMWeightSender, VLLMWeightSyncScheme, get_model_metadata
from instep.dropin.torchrl.collective import free_port

SOON = 120.0
STARTED = 400.0  # seconds until engines answer
WORDS, END = 148, 148
GENERATE: dict[str, Any] = {"input_mode": "history", "generate_kwargs": {"max_tokens": 4}, "chat_template_name": "chatml_format"}
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


class Page:
    """TorchRL's receiver and trainer, each an actor, and the engine that the receiver has started."""

    def __init__(self, folder: str) -> None:
        actors = torchrls_actors()
        self.folder = folder
        self.config = {
            "master_address": "localhost",
            "master_port": free_port(),
            "gpus_per_replica": 1,
            "num_replicas": 2,
            "strategy": "state_dict",
        }
        self.receiver = remote(actors.WorkerVLLMNCCL, self.config, folder, "Trainer", max_concurrency=4)
        assert get(self.receiver.setup.remote(), STARTED) == "setup_complete"
        self.trainer = remote(actors.WorkerTransformerNCCL, self.config, folder, name="Trainer", max_concurrency=4)
        self.engine = get(self.receiver.get_engine.remote())
        self.first = said(self.engine)
        self.second: Any = None
        self.said: list[Any] = []


def trained(page: Page, seed: int) -> Any:
    """The trainer's policy, as recipes have it."""
    from torchrl.modules.llm import TransformersWrapper

    return TransformersWrapper(
        tiny("llama", seed), tokenizer=page.folder, input_mode="history", generate=False, return_log_probs=True, pad_output=False
    )


def joined(engine: Any, training: Any) -> VLLMWeightSender:
    """`make_weight_sync_scheme` of the recipes, and what follows it."""
    scheme = VLLMWeightSyncScheme(
        master_address=engine.get_master_address(),
        master_port=engine.get_master_port(),
        gpus_per_replica=engine.get_tp_size(),
        num_replicas=getattr(engine, "num_replicas", 1),
        strategy="state_dict",
    )
    sender = scheme.create_sender()
    sender.register_model(training.model)
    sender.init_all_workers_group(get_model_metadata(training.model), vllm_engine=engine)
    return sender


def conversations() -> Any:
    """What collectors make their environment with."""
    from torchrl.envs.llm import ChatEnv
    from torchrl.testing.llm_mocks import DummyStrDataLoader

    return ChatEnv.from_dataloader(dataloader=DummyStrDataLoader(2), batch_size=2, group_repeats=True, input_mode="history")


def on_ray(page: Page, **given: Any) -> Any:
    """As the asynchronous recipe makes its collectors."""
    from torchrl.collectors.llm import RayLLMCollector
    from torchrl.modules.llm import vLLMWrapper

    return RayLLMCollector(
        env=conversations, policy=vLLMWrapper(page.engine, **GENERATE, tokenizer=page.folder), dialog_turns_per_batch=2,
        total_dialog_turns=100_000, ray_init_config=None, track_policy_version=True, remote_config={"num_cpus": 0}, **given,
    )  # fmt: skip


def train(page: Page, collectors: list[Any], buffer: Any) -> list[Any]:
    """The recipe's task: two updates while collectors on Ray fill its buffer. What the engines said, and what collectors counted."""
    training = trained(page, 2)
    sender = joined(page.engine, training)
    sender.update_weights()
    found: list[Any] = [(said(page.engine), [one.policy_version for one in collectors])]
    for one in collectors:
        one.start()
        sender.register_collector(one)
    training.model.load_state_dict(tiny("llama", 1).state_dict())
    sender.update_weights()
    found.append((said(page.engine), [one.policy_version for one in collectors]))
    versions, deadline = {0}, time.monotonic() + SOON
    while 1 not in versions and time.monotonic() < deadline:
        versions.add(int(buffer.queue.get(timeout=SOON)["policy_version"]))
    found.append(versions)
    for one in collectors:
        one.async_shutdown(timeout=30)
    sender.shutdown()
    return found
