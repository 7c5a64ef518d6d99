"""Which families of models a push serves: tries each of them on a real vLLM.

    python -m instep.bench.models [--families A,B] [--jobs N] [--deadline SECONDS] [--out DIR]

Writes DIR/models-cpu.json or DIR/models-gpu.json. Exit code 1 where an engine got other weights
than the trainer's or was left dirty, or where a family gave no verdict.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from instep.bench.models.families import FAMILIES
from instep.bench.models.matrix import MOST, run, setting
from instep.bench.models.outcome import Matrix, Outcome

GOOD = ("bit-equal", "refused", "not started")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=_names, default=list(FAMILIES), help="by default all")
    parser.add_argument("--jobs", type=int, choices=range(1, MOST + 1), default=1, help="at once")
    parser.add_argument("--deadline", type=float, default=240.0, help="seconds for each family")
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    options = parser.parse_args()
    told = setting(f"python -m instep.bench.models --jobs {options.jobs}")

    def tell(outcome: Outcome) -> None:
        """Written at once: a run that is broken off leaves what it found."""
        Matrix(setting=told, outcomes=[outcome]).write(options.out)
        print(line(outcome), flush=True)

    outcomes = run(options.families, options.jobs, options.deadline, tell)
    file = Matrix(setting=told, outcomes=outcomes).write(options.out)
    counts = Counter(outcome.verdict for outcome in outcomes)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    print(f"written to {file}", file=sys.stderr)
    return 0 if set(counts) <= set(GOOD) else 1


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in FAMILIES]:
        raise argparse.ArgumentTypeError(f"no family {unknown[0]}; there are {', '.join(FAMILIES)}")
    return list(dict.fromkeys(names))


def line(outcome: Outcome) -> str:
    pushes = ", ".join(f"{seconds:.2f} s" for seconds in outcome.pushes)
    layers = f"{outcome.direct}/{outcome.rebuilt}/{sum(outcome.reload.values())}"
    found = f"{outcome.family}: {outcome.verdict} in {outcome.took:.0f} s"
    return f"{found}; layers {layers}; pushes {pushes or 'none'} {outcome.why}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
