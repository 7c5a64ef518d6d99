"""One family: three pushes into a real vLLM, each compared with an engine that loads from disk.

Two engines are started, one after the other. The first loads weights B, is looked at and ends. The
second loads weights C, is looked at, and takes B, C and B again from a trainer. After each push it
must be what an engine is that loaded these weights: tokens, log-probabilities, and every tensor of
its model, bit for bit.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from instep import WeightSync
from instep.bench.models import build
from instep.bench.models.engines import Look, look, started
from instep.bench.models.families import FAMILIES, kind
from instep.bench.models.families.family import Family
from instep.bench.models.outcome import Outcome, Verdict
from instep.errors import InstepError
from instep.receipt import Receipt
from instep.verify import verify

B, C = 2, 3
"""Seeds of the weights."""


class Found(Exception):
    """Ends a trial with its verdict."""

    def __init__(self, verdict: Verdict, why: str, advice: str = "") -> None:
        super().__init__(why)
        self.verdict, self.why, self.advice = verdict, why, advice


def one(name: str, folder: Path) -> Outcome:
    """Tests one family. folder: for checkpoints. Never raises an `Exception`: every error is a
    verdict."""
    began = time.monotonic()
    trial = Trial(name, folder)
    verdict, why, advice = "bit-equal", "", ""
    try:
        trial.run()
    except Found as found:
        verdict, why, advice = found.verdict, found.why, found.advice
    except Exception as error:
        verdict, why = "ended", f"{type(error).__name__}: {told(error)}"
    return Outcome(
        family=name,
        kind=kind(name),
        verdict=verdict,  # type: ignore[arg-type]
        why=why,
        advice=advice,
        took=round(time.monotonic() - began, 1),
        **trial.noted,
    )


class Trial:
    """The test of one family. noted: fields of the `Outcome`, as far as they are known."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.family, self.folder = name, FAMILIES[name], folder
        self.noted: dict[str, Any] = {"pushes": []}
        self.fresh: dict[int, Look] = {}
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def run(self) -> None:
        """Runs the test. Raises `Found` unless the family is bit-equal."""
        trainer, folders = self._made()
        with _started(self.family, folders[B]) as llm:
            self.fresh[B] = self._fresh(llm)
        with _started(self.family, folders[C]) as llm:
            self.fresh[C] = self._fresh(llm)
            pairs = zip(self.fresh[B].answers, self.fresh[C].answers, strict=True)
            if not self.fresh[B].finite or any(one == other for one, other in pairs):
                raise Found("says nothing", "the two models answer alike, or with no finite scores")
            self._push(llm, trainer)

    def _made(self) -> tuple[Any, dict[int, Path]]:
        """Returns the trainer's model and the two checkpoints. All are made before an engine
        starts, as some engines change the classes of transformers in this process."""
        folders = {}
        try:
            for seed in (B, C):
                model = build.model(self.name, seed)
                self.noted["model"] = type(model).__name__
                folders[seed] = build.save(model, self.name, self.folder / str(seed))
                state = model.state_dict().items()
                self.weights[seed] = {name: tensor.clone() for name, tensor in state}
        except Exception as error:
            raise Found("not started", f"transformers: {told(error)}") from error
        return model, folders

    def _fresh(self, llm: Any) -> Look:
        try:
            return look(llm, self.family)
        except Exception as error:
            why = f"vLLM, at its first prompts: {type(error).__name__}: {told(error)}"
            raise Found("not started", why) from error

    def _push(self, llm: Any, trainer: Any) -> None:
        trainer = trainer.to("cuda") if torch.cuda.is_available() else trainer
        serves = C
        with WeightSync(source=trainer, engines=[llm]) as sync:
            for index, seed in enumerate((B, C, B)):
                trainer.load_state_dict(self.weights[seed])
                try:
                    self._note(sync.push(f"push-{index}"))
                except InstepError as error:
                    raise self._failed(error, llm, serves) from error
                serves = seed
                self._compare(llm, seed, index)
        found = asyncio.run(verify(trainer, llm))
        self.noted |= {"verified": found.equal, "unread": len(found.unread)}
        if found.differing:
            tensor, why = next(iter(found.differing.items()))
            raise Found("different", f"verify: {tensor}: {why}")

    def _note(self, receipt: Receipt) -> None:
        (engine,) = receipt.engines
        self.noted["pushes"].append(round(receipt.seconds["total"], 4))
        self.noted |= {"direct": len(engine.direct), "rebuilt": len(engine.rebuilt)}
        self.noted["reload"] = dict(Counter(engine.reload.values()))

    def _failed(self, error: InstepError, llm: Any, serves: int) -> Found:
        """Returns the verdict on a failed push: "refused" only if the engine is unchanged."""
        why, advice = f"{type(error).__name__}: {told(error)}", error.next_step or ""
        try:
            same = look(llm, self.family) == self.fresh[serves]
        except InstepError:
            return Found("dirty", why, advice)
        return Found("refused", why, advice) if same else Found("different", f"after {why}", advice)

    def _compare(self, llm: Any, seed: int, index: int) -> None:
        found, fresh = look(llm, self.family), self.fresh[seed]
        self.noted["live"] = len(fresh.live)
        if found.answers != fresh.answers:
            raise Found("different", f"push {index + 1}: other answers; {_differing(found, fresh)}")
        if found.live != fresh.live:
            raise Found("different", f"push {index + 1}: equal answers; {_differing(found, fresh)}")


def _differing(found: Look, fresh: Look) -> str:
    every = sorted(found.live.keys() | fresh.live.keys())
    names = [name for name in every if found.live.get(name) != fresh.live.get(name)]
    first = "".join(f", such as {name}: {found.live.get(name)}, fresh {fresh.live.get(name)}" for name in names[:1])
    return f"{len(names)} of {len(every)} live tensors differ{first}"


@contextmanager
def _started(family: Family, folder: Path) -> Iterator[Any]:
    """Starts an engine. An error at the start is vLLM's, and becomes a verdict."""
    with ExitStack() as stack:
        try:
            llm = stack.enter_context(started(family, folder))
        except Exception as error:
            raise Found("not started", f"vLLM: {type(error).__name__}: {told(error)}") from error
        yield llm


def told(error: BaseException) -> str:
    """Returns an error's text on one line."""
    text = error.args[0] if isinstance(error, InstepError) and error.args else error
    return " ".join(str(text).split())[:400] or repr(error)
