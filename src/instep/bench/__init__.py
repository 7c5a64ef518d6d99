"""`instep bench`: pushes beside what one would do instead and beside what the machine can do at
best, in one run with the same weights.

    shapes.py      named shapes of models, filled with random weights
    trainer.py     the side that has them; fsdp2.py is one of two ranks
    subjects.py    the engines that they are brought into; worker.py is the half inside an engine's worker
    contenders/    the ways to bring them in, one file for each kind
    measure.py     one way on one engine: warm-ups, timed runs, and the proof that the engine has the weights
    benchmark.py   the run from beginning to end
    stages.py      which engine is started where, and what is measured on it
    limits.py      raw rates: plain copies, broadcasts
    copies.py      the methods to copy the regions of a plan, side by side
    memory.py      what a push takes at its peak
    results.py     what was found; report.py makes the table and the JSON of it
    kept.py        reads the JSON files of earlier runs; beside.py, page.py and picture.py make docs/benchmarks.md of them
    generation.py  something else: tokens a second of an actor, beside those of the bare engine

A way that fails becomes a row with its error, and the run goes on.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from instep.bench.results import Results, Setting, TrainerKind
from instep.errors import ConfigError

Say = Callable[[str], object]


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(shapes: str | None = None, repeats: int = 11, say: Say = to_stderr, trainer: TrainerKind = "plain") -> Results:
    """Measures on this machine what it has. Takes minutes: engines are started.

    shapes: a name of `shapes.SHAPES`; by default `qwen3-8b` on GPUs, `smollm2-135m` elsewhere.
    repeats: timed runs of each way.
    trainer: one process, or two ranks under FSDP2 on two GPUs. Raises `ConfigError` for shapes that
    are not known, no runs, or a trainer that this machine has no GPUs for.
    """
    if repeats < 1:
        raise ConfigError(f"repeats must be 1 or more, not {repeats}")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when PyTorch is loaded: threads that spin disturb the engine on a CPU
    import torch

    from instep.bench.benchmark import Benchmark
    from instep.bench.shapes import check

    name = check(shapes or ("qwen3-8b" if torch.cuda.is_available() else "smollm2-135m"))
    with tempfile.TemporaryDirectory(prefix="instep-bench-") as scratch:
        return Benchmark(name, repeats, say, trainer).run(Path(scratch))


def write(results: Results, out: Path) -> Path:
    """Writes the JSON into the directory `out`. Returns the file."""
    from instep.bench.report import as_json

    kind = results.setting.trainer
    return save(out, results.setting, "" if kind == "plain" else kind, as_json(results))


def save(out: Path, setting: Setting, what: str, text: str) -> Path:
    """Writes a file of results into the directory `out`. Its name says on what they were measured,
    `what` was, and with which shapes. Returns the file."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / ("-".join(filter(None, (setting.kind, what, setting.shapes.replace("/", "-")))) + ".json")
    file.write_text(text + "\n")
    return file


def options(usage: str | None, defaults: dict[str, str], arguments: list[str]) -> dict[str, str]:
    """Returns what a command line sets: pairs of an option and its value. Ends the process with
    `usage` where one is not known, or `--repeats` is no number."""
    given = defaults | dict(zip(arguments[::2], arguments[1::2], strict=False))
    if len(arguments) % 2 or given.keys() != defaults.keys() or not given["--repeats"].isdigit():
        sys.exit(usage)
    return given
