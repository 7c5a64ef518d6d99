"""`instep bench`: a push beside what one would do instead and beside the limits of the machine."""

from __future__ import annotations

import sys
from pathlib import Path

from instep import bench as benchmark
from instep.bench.report import as_json, tables
from instep.bench.results import TrainerKind
from instep.bench.shapes import ShapesName
from instep.cli.doctor import stdout_to_stderr


def bench(
    *,
    shapes: ShapesName | None = None,
    trainer: TrainerKind = "plain",
    repeats: int = 11,
    out: Path = Path("bench-results"),
    json: bool = False,
) -> int:
    """Measure pushes beside vLLM's own ways and the raw rates of this machine, with the same random
    weights. Takes minutes.

    Exit code 1 if nothing could be measured; a way that fails is a row with its error.

    Parameters
    ----------
    shapes
        Of the model; by default `qwen3-8b` on GPUs and `smollm2-135m` elsewhere.
    trainer
        `fsdp2`: two ranks, which have half of every weight each on GPUs 0 and 1, beside gathering
        them for vLLM's own transfer.
    repeats
        Timed runs of each way. Numbers are medians.
    out
        Directory for the results as JSON.
    json
        Print the results as JSON on stdout; progress goes to stderr either way.
    """
    with stdout_to_stderr():
        results = benchmark.run(shapes, repeats, trainer=trainer)
    file = benchmark.write(results, out)
    print(as_json(results) if json else tables(results))
    print(f"written to {file}", file=sys.stderr)
    return 0 if any(row.runs for row in results.rows) else 1
