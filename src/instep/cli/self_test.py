"""`instep doctor --self-test`: two pushes to an engine that this process starts, with a tiny random
model.

Identity: what the engine has already is pushed; its greedy tokens and their log-probabilities stay
the same bit for bit.
One step: the weights move; the outputs change, and engine and trainer still agree within the
canary's bound.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from instep.cli.checks import Finding
from instep.engine.vllm.config import EXTENSION
from instep.errors import InstepError

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
NEW_TOKENS = 16

Answer = tuple[list[int], list[float]]
"""Greedy tokens and the log-probability (natural log) of each."""


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    engine: Any
    greedy: Callable[[], Answer]
    close: Callable[[], None] = lambda: None


def self_test() -> list[Finding]:
    """Runs the self-test: seconds with the embedded engine, one to two minutes with vLLM."""
    model = tiny_model()
    with TemporaryDirectory(prefix="instep-doctor-") as folder:
        try:
            subject = start_vllm(model, Path(folder)) if find_spec("vllm") else start_embedded(model)
        except Exception as error:
            return [Finding("engine", "fail", f"did not start: {error!r}", "the lines above, and the engine's own log, say why")]
        try:
            return [Finding("engine", "ok", subject.name), *push_twice(model, subject)]
        finally:
            subject.close()


def push_twice(model: Any, subject: Subject) -> list[Finding]:
    from instep import WeightSync

    before = subject.greedy()
    try:
        with WeightSync(source=model, engines=[subject.engine], canary=PROMPT) as sync:
            receipt = sync.push(version="doctor-identity")
            identity = judge_identity(before, subject.greedy(), receipt)
            reload = judge_reload(receipt)
            perturb(model)
            receipt = sync.push(version="doctor-step")
            return [identity, *reload, judge_step(before, subject.greedy(), receipt)]
    except InstepError as error:
        return [Finding("push", "fail", str(error))]


def judge_identity(before: Answer, after: Answer, receipt: Any) -> Finding:
    if after == before:
        return Finding("identity push", "ok", f"{len(after[0])} greedy tokens and log-probabilities are the same bits; {numbers(receipt)}")
    gap = max(abs(a - b) for a, b in zip(before[1], after[1], strict=True))
    text = f"pushing the engine's own weights changed its outputs, log-probabilities by up to {gap:.3g}"
    return Finding("identity push", "fail", text, "report the model and the versions above")


def judge_reload(receipt: Any) -> list[Finding]:
    """Judges the reload of the first push. There is nothing to judge if the engine's reload is
    its initial load. A wrong reload has raised before."""
    engine = receipt.engines[0]
    if engine.unproved:
        layer, why = next(iter(sorted(engine.unproved.items())))
        return [Finding("reload", "warn", f"{len(engine.unproved)} layers were not compared with an initial load: {layer} ({why})")]
    if not engine.compared:
        return []
    text = f"{engine.compared} layers are what an initial load makes of them, bit for bit; compared in {1000 * engine.initial:.0f} ms"
    return [Finding("reload", "ok", text)]


def judge_step(before: Answer, after: Answer, receipt: Any) -> Finding:
    if after == before:
        return Finding("one-step push", "fail", "the weights moved and the outputs did not", "report the versions above")
    return Finding("one-step push", "ok", f"outputs follow; {numbers(receipt)}")


def numbers(receipt: Any) -> str:
    return f"{receipt.nbytes / 1e6:.2f} MB in {1000 * receipt.seconds['total']:.0f} ms, canary gap {receipt.canary_gap:.2g}"


def tiny_model() -> Any:
    """Makes a random Qwen3 with a tied head. It has what a push can get wrong: fused
    projections, norms and a tie."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(torch.bfloat16).eval()


def perturb(model: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def start_vllm(model: Any, folder: Path) -> Subject:
    """Starts vLLM. Raises whatever vLLM raises if it does not start."""
    print("starting vLLM with a tiny random model, about a minute", file=sys.stderr, flush=True)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # saves 20 s of compiling, and the need for a compiler
    from vllm import LLM, SamplingParams

    from instep.bench.subjects import stop_vllm

    model.save_pretrained(folder)
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, worker_extension_cls=EXTENSION,
        enforce_eager=True, max_model_len=64, max_num_seqs=4, seed=0,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)

    def greedy() -> Answer:
        answer = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs[0]
        return list(answer.token_ids), [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]

    return Subject("vLLM, tiny random Qwen3", llm, greedy, partial(stop_vllm, llm))


def start_embedded(model: Any) -> Subject:
    from copy import deepcopy

    from instep.engine.transformers import TransformersEngine

    engine = TransformersEngine(deepcopy(model))

    def greedy() -> Answer:
        completion = engine.generate([PROMPT], max_tokens=NEW_TOKENS, temperature=0.0, seed=0, stop_token_ids=[])[0]
        return completion.token_ids, completion.logprobs

    return Subject("embedded TransformersEngine, tiny random Qwen3; vLLM is not installed", engine, greedy)
