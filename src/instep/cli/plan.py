"""`instep plan`: which way each layer of a model takes into vLLM, tried with random weights before
a training run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from instep import WeightSync
from instep.bench import shapes as named
from instep.bench.shapes import ShapesName
from instep.bench.subjects import start_vllm, stop_vllm
from instep.cli.doctor import stdout_to_stderr
from instep.cli.hub import found
from instep.cli.layer_rows import Report, alike, rows, tables, timed
from instep.cli.output import console, terminable
from instep.cli.plan_memory import announced
from instep.cli.start_signals import ending_at_once
from instep.engine.vllm.config import EXTENSION
from instep.errors import ConfigError

TIMEOUT = 600.0
"""Seconds for each phase: the first push of a large model reloads all of it."""


def plan(model: str | None = None, /, *, tp: int = 1, shapes: ShapesName | None = None, json: bool = False) -> int:
    """See before a training run whether engine and trainer fit, and which layers vLLM has to
    reload.

    Starts a real vLLM with random weights on this machine, beside a trainer with as many, pushes to
    it twice, and ends it. No server is reached, and nothing is downloaded but a config. What that
    takes of memory is said first, with what is free, and where it is too much nothing starts.

    Exit code 1, with the reason, where engine and trainer do not fit, or the memory does not
    suffice.

    Parameters
    ----------
    model
        A directory with a config, with or without weights, or a Hub id. No weights are downloaded.
    tp
        Tensor-parallel workers of the engine.
    shapes
        A named configuration in place of a model.
    json
        Print the plan as JSON on stdout.
    """
    if (model is None) == (shapes is None):
        raise ConfigError("plan takes either a model or --shapes", next_step="instep plan Qwen/Qwen3-0.6B, or instep plan --shapes tiny")
    with terminable(), stdout_to_stderr(), TemporaryDirectory(prefix="instep-plan-") as scratch:
        folder = named.folder(shapes, Path(scratch)) if shapes else described(model or "", Path(scratch))
        report = tried(shapes or model or "", folder, tp)
    if json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
    else:
        console().print(tables(report))
    return 0


def described(model: str, scratch: Path) -> Path:
    """Returns a directory with the model's config. For a Hub id, it holds the Hub's config
    alone. Raises `ConfigError` if there is none."""
    if Path(model).is_dir():
        return Path(model)
    config = found(model, ["config.json"]) / "config.json"
    if not config.is_file():
        raise ConfigError(f"{model} has no config.json")
    copy(config, scratch)
    return scratch


def tried(name: str, folder: Path, tp: int) -> Report:
    """Makes two pushes with changed weights between them. Raises what the pushes raise, and
    `ConfigError` if vLLM does not start."""
    gpus = torch.cuda.device_count()
    if gpus and gpus < tp:
        raise ConfigError(f"tp={tp} needs as many GPUs, this machine has {gpus}")
    check_vllm()
    nbytes = sum(tensor.nbytes for tensor in tensors_of(trainer(folder, "meta")))
    print(announced(name, nbytes, tp, gpus), file=sys.stderr, flush=True)
    weights = trainer(folder, f"cuda:{gpus - 1}" if gpus else "cpu")
    with (
        running(folder, 0 if gpus else None, nbytes, tp) as llm,
        WeightSync(weights, [llm], cast=True, timeout=TIMEOUT) as sync,
    ):
        first = sync.push("plan-1")
        change(tensors_of(weights))
        second = sync.push("plan-2")
        member, session = sync._session.fleet.members[0], sync._session
        assert member.plan is not None
        sent = {meta.name: meta.dtype for meta in session.described}
        return Report(
            model=name,
            engine=f"vLLM on {f'{tp} of {gpus} GPUs' if gpus else 'the CPU'}, tensor parallel {tp}",
            nbytes=second.nbytes,
            tensors=second.tensors,
            transport=second.transport,
            why=second.why,
            rows=rows(member.plan, second.engines[0]),
            kept=alike(member.plan.kept()),
            casts=converted(sent, member.plan.rounded),
            widened=converted(sent, member.plan.widened),
            first=timed(first),
            second=timed(second),
            compared=second.engines[0].compared,
            initial=first.engines[0].initial,
            unproved=alike(second.engines[0].unproved),
        )


def converted(sent: Mapping[str, str], stored: Mapping[str, str]) -> dict[str, str]:
    """Returns the tensors that the engine stores in another dtype, with texts such as `float32
    to bfloat16`."""
    return alike({tensor: f"{sent[tensor]} to {dtype}" for tensor, dtype in stored.items()})


def check_vllm() -> None:
    """Raises `ConfigError` if vLLM is not installed."""
    if not find_spec("vllm"):
        text = "plan asks vLLM's own loader, and vLLM is not installed"
        raise ConfigError(text, next_step='pip install "instep[vllm]"')


def trainer(folder: Path, device: str) -> Any:
    """Returns a trainer's random weights: the tensors that the directory's files name, or else a
    model of transformers."""
    if any(folder.glob("*.safetensors")):
        from instep.source.checkpoint import CheckpointSource

        metas = CheckpointSource(folder).metadata()
        tensors = {meta.name: torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=device) for meta in metas}
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.shape, device=device) * 0.02)
        return tensors
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.bfloat16)
    except (OSError, ValueError) as error:
        raise ConfigError(f"transformers makes no model of the config in {folder}: {error}") from error


def tensors_of(weights: Any) -> list[torch.Tensor]:
    return list(weights.values() if isinstance(weights, dict) else weights.parameters())


def change(tensors: Iterable[torch.Tensor]) -> None:
    """Changes every weight, as an optimizer's step does."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.itemsize == 1:
                tensor.copy_(-tensor.float())  # of these there is no negation
            elif tensor.is_floating_point():
                tensor.neg_()  # in place: a copy of the largest is memory that others lack


@contextmanager
def running(folder: Path, gpu: int | None, nbytes: int, tp: int) -> Iterator[Any]:
    """Starts a vLLM with random weights of its own, and stops it at the end. Raises
    `ConfigError` if vLLM does not start."""
    try:
        with ending_at_once():
            llm = start_vllm(
                folder,
                gpu,
                nbytes,
                dtype="auto",
                max_model_len=64,
                enforce_eager=True,
                worker_extension_cls=EXTENSION,
                tensor_parallel_size=tp,
            )
    except Exception as error:
        raise ConfigError(f"vLLM does not start with {folder}: {error}", next_step="its own log above says why") from error
    try:
        yield llm
    finally:
        stop_vllm(llm)
