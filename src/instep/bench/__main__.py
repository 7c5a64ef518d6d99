"""`python -m instep.bench [--shapes NAME] [--trainer plain|fsdp2] [--repeats N] [--out DIR]`: the
benchmark where the command line's packages are missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from instep import bench
from instep.bench.report import tables
from instep.bench.results import TrainerKind
from instep.errors import InstepError

DEFAULTS = {"--shapes": "", "--trainer": "plain", "--repeats": "11", "--out": "bench-results"}


def main(arguments: list[str]) -> None:
    options = bench.options(__doc__, DEFAULTS, arguments)
    if options["--trainer"] not in get_args(TrainerKind):
        sys.exit(__doc__)
    try:
        results = bench.run(options["--shapes"] or None, int(options["--repeats"]), trainer=options["--trainer"])  # type: ignore[arg-type]
    except InstepError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"\n{tables(results)}\n\nwritten to {bench.write(results, Path(options['--out']))}")


if __name__ == "__main__":
    main(sys.argv[1:])
