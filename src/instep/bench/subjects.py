"""The engines of the benchmark: a vLLM, or an engine in memory if vLLM is not installed."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from instep.bench.trainer import Trainer, largest
from instep.bench.worker import BenchWorker
from instep.engine.memory import MemoryEngine
from instep.transport.group import environment

PROMPTS = [[1, 2, 3, 4, 5], list(range(7, 60)), [9, 8, 7]]
NEW_TOKENS = 12
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ON_GPU = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # it would be compiled first
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_WAIT_POLICY": "passive", "TORCH_COMPILE_DISABLE": "1",
}  # fmt: skip
ON_BOTH_SIDES = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""vLLM's own IPC transfer unpickles handles. For as long as the engine lives: an answer of a
process that has it ends the thread that reads answers in one that has it not, and every call waits
for ever."""
ROOM = 8 << 30
"""Bytes that vLLM may take on a GPU beyond the weights: activations, CUDA graphs and a small KV
cache."""


class Subject(Protocol):
    """One engine, with ways to inspect it. engine: what a `WeightSync` takes."""

    name: str
    engine: Any

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the `BenchWorker` in the engine's worker."""

    def reload(self, folder: Path) -> None:
        """Loads a checkpoint directory in the engine's own way, while the engine runs."""

    def look(self, trainer: Trainer) -> tuple[float, Hashable]:
        """Returns the distance between what the engine and the trainer compute now, and a mark
        that is equal for equal weights."""

    def close(self) -> None: ...


class MemorySubject:
    """A `MemoryEngine`. Its distance from the trainer is 0 with equal weights, and infinite
    otherwise."""

    name = "memory"

    def __init__(self, trainer: Trainer) -> None:
        self.engine = MemoryEngine({name: torch.zeros_like(tensor) for name, tensor in trainer.tensors.items()})
        self.worker = BenchWorker(self.engine.hosts[0])

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.worker, method)(*arguments)

    def reload(self, folder: Path) -> None:
        self.worker.reload_from(str(folder))

    def look(self, trainer: Trainer) -> tuple[float, Hashable]:
        mark = self.engine.fingerprint()
        return 0.0 if mark == MemoryEngine(trainer.tensors).fingerprint() else math.inf, mark

    def close(self) -> None:
        pass


class VllmSubject:
    """A `vllm.LLM` with random weights of its own, with CUDA graphs on a GPU and without
    compilation on a CPU.

    arguments: more of `LLM`'s.
    """

    def __init__(self, trainer: Trainer, folder: Path, gpu: int | None = None, **arguments: Any) -> None:
        self.name = "CPU" if gpu is None else f"GPU {gpu}"
        with ExitStack() as stack:
            stack.enter_context(environment(ON_BOTH_SIDES))
            self.engine = start_vllm(folder, gpu, trainer.nbytes, **arguments)
            self.held = stack.pop_all()

    def call(self, method: str, *arguments: Any) -> Any:
        (result,) = self.engine.collective_rpc("bench_call", args=(method, list(arguments)))
        return result

    def reload(self, folder: Path) -> None:
        self.engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})

    def look(self, trainer: Trainer) -> tuple[float, Hashable]:
        """Compares log-probabilities (natural log) of greedy tokens. Prompts run one by one:
        sharing a step would change bits."""
        self.engine.reset_prefix_cache()
        answers = tuple((tuple(prompt), *greedy(self.engine, [prompt])[0]) for prompt in PROMPTS)
        gaps = [
            abs(found - wanted)
            for prompt, tokens, scores in answers
            for found, wanted in zip(scores, trainer.scores([*prompt, *tokens])[-len(tokens) :], strict=True)
        ]
        return largest(gaps), answers

    def close(self) -> None:
        with self.held:
            stop_vllm(self.engine)


def start_vllm(folder: Path, gpu: int | None, nbytes: int, **arguments: Any) -> Any:
    """Starts an `LLM` for a model of `nbytes` on a GPU (and those after it, if tensor-parallel),
    or on the CPU. arguments: of `LLM`, in preference to those set here."""
    tp = arguments.get("tensor_parallel_size", 1)
    settings: dict[str, Any] = {
        "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 8, "skip_tokenizer_init": True,
        "use_tqdm_on_load": False, "worker_extension_cls": "instep.bench.worker.BenchExtension",
    }  # fmt: skip
    if gpu is None:
        settings |= {"enforce_eager": True}
    else:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.device_count()  # PyTorch remembers it from now on: this process goes on seeing all GPUs when the mask changes
        settings |= {"gpu_memory_utilization": (nbytes // tp + ROOM) / torch.cuda.mem_get_info(gpu)[1]}
    mask = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": ",".join(_visible(gpu + rank) for rank in range(tp))}
    with environment({**ENVIRONMENT, **(ON_CPU if gpu is None else ON_GPU), **mask}):
        from vllm import LLM

        return LLM(str(folder), **{**settings, **arguments})


def stop_vllm(llm: Any) -> None:
    """Ends the processes of an `LLM`. vLLM's own shutdown fails if a child that it has to kill
    has just ended, and leaves the others running."""
    core = llm.llm_engine.engine_core
    try:
        core.shutdown()
    except Exception as error:
        if type(error).__name__ != "NoSuchProcess":  # of whichever copy of psutil vLLM has found
            raise
        for process in core.resources.engine_manager.processes:
            process.kill()
        core.resources()


def greedy(llm: Any, prompts: Sequence[Any], new_tokens: int = NEW_TOKENS) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Returns tokens and their log-probabilities (natural log), for each prompt. prompts: lists of
    token ids, or what vLLM takes in their place."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt for prompt in prompts]
    found = [output.outputs[0] for output in llm.generate(given, sampling, use_tqdm=False)]
    return [(tuple(c.token_ids), tuple(entry[token].logprob for entry, token in zip(c.logprobs, c.token_ids, strict=True))) for c in found]


def _visible(gpu: int) -> str:
    """Returns the entry of CUDA_VISIBLE_DEVICES for the GPU that this process numbers `gpu`."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return mask.split(",")[gpu] if mask else str(gpu)


def weight_transfer(backend: str) -> dict[str, Any]:
    """Returns the argument of `LLM` for vLLM's own transfer. Empty for `ipc` without Ray, which
    its file imports: the engine would not start, and the other ways would be lost with it."""
    missing = backend == "ipc" and find_spec("ray") is None
    return {} if missing else {"weight_transfer_config": {"backend": backend}}
