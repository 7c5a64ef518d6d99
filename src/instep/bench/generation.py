"""`python -m instep.bench.generation [--shapes NAME] [--repeats N] [--out DIR]`: tokens a second of
an actor, beside those of the bare `AsyncLLM` within it for the same requests, and while weights are
pushed every few seconds."""

from __future__ import annotations

import asyncio
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, get_args

import msgspec
import torch

from instep import WeightSync
from instep.bench import Say, options, save, shapes, to_stderr
from instep.bench.machine import setting
from instep.bench.results import Setting
from instep.bench.subjects import ENVIRONMENT, ON_CPU, ON_GPU
from instep.bench.trainer import Trainer
from instep.engine import CachePolicy
from instep.engine.vllm.serving import start_vllm
from instep.errors import ConfigError, InstepError
from instep.generation import GenerationResult, LLMActor, PromptId, PromptRequest, Sampling
from instep.transport.group import environment

SAMPLES, LENGTH, PROMPT = 4, 64, 16
EVERY = 5.0
"""Seconds from the beginning of a push to that of the next."""
RUN = 12.0
"""Seconds that a run is to take, about."""
WAIT = 600.0
"""Seconds for a result or a push, at most."""
BARE, ACTOR = "AsyncLLM", "actor"
PUSHED: dict[CachePolicy, str] = {policy: f"{ACTOR}, a push every {EVERY:g} s, caches={policy}" for policy in get_args(CachePolicy)}
"""Names of ways by cache policy: KV in use is recomputed with the new weights, or kept."""


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """One timed run. paused: seconds for which the engine was paused by `pushes` pushes."""

    way: str
    tokens: int
    seconds: float
    pushes: int = 0
    paused: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """All runs. requests: prompts of a run, with `SAMPLES` samples of `LENGTH` tokens each, all
    sent at once."""

    setting: Setting
    requests: int
    runs: list[Rate]

    def rate(self, way: str) -> float:
        """Returns tokens per second, the median of the runs."""
        return median(run.tokens_per_second for run in self.runs if run.way == way)

    def share(self, way: str) -> float:
        """Returns the fraction of the bare engine's rate: the median over rounds, as the
        machine's free capacity changes between them."""
        bare = [run.tokens_per_second for run in self.runs if run.way == BARE]
        own = [run.tokens_per_second for run in self.runs if run.way == way]
        return median(a / b for a, b in zip(own, bare, strict=True))

    def lines(self) -> Iterator[str]:
        head = self.setting
        yield f"{head.shapes} on {'; '.join(head.machine)}, {head.date}: {self.requests} prompts of {SAMPLES} samples of {LENGTH} tokens"
        for way in dict.fromkeys(run.way for run in self.runs):
            pushed = [run for run in self.runs if run.way == way and run.pushes]
            pause = f", paused {100 * median(run.paused / run.seconds for run in pushed):.1f} % of the time" if pushed else ""
            yield f"{way:<38} {self.rate(way):8.0f} tokens/s   {100 * self.share(way):5.1f} % of AsyncLLM{pause}"


class Generation:
    def __init__(self, actor: LLMActor, prompts: queue.Queue[Any], results: queue.Queue[Any], vocabulary: int) -> None:
        self.actor, self.prompts, self.results = actor, prompts, results
        self.random, self.vocabulary = random.Random(0), vocabulary
        self.round = 0

    def requests(self, count: int) -> list[PromptRequest]:
        """Makes requests with new prompts: a cached prefix would make the second way faster."""
        self.round += 1
        sampling = Sampling(n=SAMPLES, max_tokens=LENGTH, ignore_eos=True, seed=self.round)
        return [
            PromptRequest(
                id=PromptId("train", self.round, str(number)),
                prompt_token_ids=[self.random.randrange(self.vocabulary) for _ in range(PROMPT)],
                sampling=sampling,
            )
            for number in range(count)
        ]

    def bare(self, count: int) -> Rate:
        """Measures vLLM's own calls, on the engine's event loop."""
        requests = self.requests(count)
        llm = self.actor._started().llm  # type: ignore[attr-defined]
        started = time.perf_counter()
        tokens = self.actor._background.run(_bare(llm, requests), WAIT)
        return Rate(way=BARE, tokens=tokens, seconds=time.perf_counter() - started)

    def through_actor(self, count: int) -> Rate:
        requests = self.requests(count)
        started = time.perf_counter()
        for request in requests:
            self.prompts.put(request)
        found = [self.result() for _ in requests]
        seconds = time.perf_counter() - started
        return Rate(way=ACTOR, tokens=sum(len(sample.token_ids) for result in found for sample in result.samples), seconds=seconds)

    def result(self) -> GenerationResult:
        """Returns the next result. Raises the actor's error if the actor has failed."""
        deadline = time.monotonic() + WAIT
        while True:
            self.actor.check_background_threads()
            try:
                result: GenerationResult = self.results.get(timeout=1.0)
                return result
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise

    def while_pushing(self, count: int, trainer: Trainer, caches: CachePolicy) -> Rate:
        with follow(self.actor, trainer, caches) as push:
            push()  # a trainer's first asks where each tensor goes
            with every(EVERY, push) as pauses:
                run = self.through_actor(count)
        return msgspec.structs.replace(run, way=PUSHED[caches], pushes=len(pauses), paused=sum(pauses))


async def _bare(llm: Any, requests: list[PromptRequest]) -> int:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async def one(request: PromptRequest, sample: int) -> int:
        sampling = request.sampling.of_turn(sample, 0, max_tokens=LENGTH, generated=0, stop=())
        params = SamplingParams(**sampling.vllm_kwargs(), output_kind=RequestOutputKind.FINAL_ONLY)
        tokens = 0
        async for output in llm.generate({"prompt_token_ids": request.prompt_token_ids}, params, f"{request.id}/{sample}"):
            tokens = len(output.outputs[0].token_ids)
        return tokens

    return sum(await asyncio.gather(*(one(request, sample) for request in requests for sample in range(SAMPLES))))


@contextmanager
def follow(actor: LLMActor, trainer: Trainer, caches: CachePolicy = "reset") -> Iterator[Callable[[], float]]:
    """Yields a function that makes a step of the trainer and pushes it. It returns the seconds
    for which the engine was paused."""
    with WeightSync(trainer.model, [actor], timeout=WAIT, cast=True, caches=caches) as sync:

        def push() -> float:
            trainer.step()
            return sync.push(f"step-{trainer.steps}").pause

        yield push


@contextmanager
def every(seconds: float, push: Callable[[], float]) -> Iterator[list[float]]:
    """Calls `push` in a thread while it lasts, first after `seconds`. Yields the list of
    returned values. An error of `push` is raised at the end."""
    over, done, failed = threading.Event(), list[float](), list[Exception]()

    def work() -> None:
        due = time.monotonic() + seconds
        while not over.wait(max(0.0, due - time.monotonic())):
            due = time.monotonic() + seconds
            try:
                done.append(push())
            except Exception as error:
                failed.append(error)
                return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join(WAIT)
    if failed:
        raise failed[0]


def run(name: str | None, repeats: int, say: Say = to_stderr) -> Rates:
    """Measures all ways: about a minute for each repeat, after a minute in which the engine starts.

    name: of the shapes; by default `qwen3-0.6b` on a GPU, `smollm2-135m` elsewhere.
    """
    if repeats < 1:
        raise ConfigError(f"repeats must be 1 or more, not {repeats}")
    on_gpu = torch.cuda.is_available()
    name = shapes.check(name or ("qwen3-0.6b" if on_gpu else "smollm2-135m"))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    trainer = Trainer(name, "cuda:0" if on_gpu else "cpu")
    arguments: dict[str, Any] = {"load_format": "dummy", "max_model_len": 512, "skip_tokenizer_init": True}
    # CPUs without bfloat16 instructions are four times faster with float32.
    arguments |= {"gpu_memory_utilization": 0.5} if on_gpu else {"enforce_eager": True, "max_num_seqs": 32, "dtype": "float32"}
    prompts, results = queue.Queue[Any](), queue.Queue[Any]()
    with TemporaryDirectory(prefix="instep-bench-") as scratch, environment({**ENVIRONMENT, **(ON_GPU if on_gpu else ON_CPU)}):
        folder = shapes.folder(name, Path(scratch))
        say("starting an engine in an actor")
        actor = LLMActor(partial(start_vllm, str(folder), **arguments), tokenizer=_Unread(), prompt_queue=prompts, results_queue=results)
        try:
            generation = Generation(actor, prompts, results, trainer.model.config.vocab_size)
            return _measure(generation, trainer, setting(name, trainer, repeats), say)
        finally:
            actor.stop(drain=False)


def _measure(generation: Generation, trainer: Trainer, where: Setting, say: Say) -> Rates:
    with follow(generation.actor, trainer) as push:
        for _ in range(3):  # until no layer is reloaded for the first time
            push()
    generation.bare(2)
    short = generation.bare(4)
    count = max(4, round(RUN * short.tokens_per_second / (SAMPLES * LENGTH)))
    runs: list[Rate] = []
    pushed = [partial(generation.while_pushing, trainer=trainer, caches=policy) for policy in PUSHED]
    ways: list[Callable[[int], Rate]] = [generation.bare, generation.through_actor, *pushed]
    for _ in range(where.repeats):
        for measure in ways:
            runs.append(measure(count))
            say(f"{runs[-1].way}: {runs[-1].tokens_per_second:.0f} tokens/s, {runs[-1].pushes} pushes in {runs[-1].seconds:.0f} s")
    command = f"python -m instep.bench.generation --shapes {where.shapes} --repeats {where.repeats}"
    return Rates(setting=msgspec.structs.replace(where, command=command), requests=count, runs=runs)


class _Unread:
    """A tokenizer for an actor whose text nobody reads."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002
        return []

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:  # noqa: ARG002
        return ""


def as_json(rates: Rates) -> str:
    """Returns all measurements, and for each way its tokens per second and their share of the
    bare engine's."""
    ways = dict.fromkeys(run.way for run in rates.runs)
    summary = {way: {"tokens_per_second": rates.rate(way), "of_async_llm": rates.share(way)} for way in ways}
    return msgspec.json.format(msgspec.json.encode({**msgspec.to_builtins(rates), "summary": summary}), indent=1).decode()


def write(rates: Rates, out: Path) -> Path:
    """Writes the JSON into the directory `out`. Returns the file."""
    return save(out, rates.setting, "generation", as_json(rates))


def main(arguments: list[str]) -> None:
    given = options(__doc__, {"--shapes": "", "--repeats": "5", "--out": "bench-results"}, arguments)
    try:
        rates = run(given["--shapes"] or None, int(given["--repeats"]))
    except InstepError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print("\n".join(rates.lines()))
    to_stderr(f"written to {write(rates, Path(given['--out']))}")


if __name__ == "__main__":
    main(sys.argv[1:])
