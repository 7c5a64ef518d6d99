"""Writes `docs/models.md` from what was found of the families.

python -m instep.bench.models.page RESULTS DOCS
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from instep.bench.kept import MODELS
from instep.bench.models.families import KINDS
from instep.bench.models.outcome import VERDICTS, Matrix, Outcome
from instep.bench.page import wrapped
from instep.bench.report import table, time

TEXT = """\
# Models

<!-- Written by `make models` from bench/results. A test compares the two. -->

Each row is a family of models with tiny sizes and random weights, pushed into a real vLLM. Two
engines are started, one after the other. The first loads weights B from disk and ends. The second
loads weights C, then takes B, C and B again from a trainer. After each push it must be what an
engine is that loaded the same weights: the tokens and log-probabilities of several prompts, some
with an image where the family sees, and every tensor of its model, bit for bit. `instep verify`'s
comparison with the trainer follows.

A family that is not listed is not refused: instep has no table of models. It traces the engine's
own loader and compares what it made, so a family that is not understood is refused by name, before
a byte moves.

| verdict | says |
|---|---|
{verdicts}

`direct`, `rebuilt` and `reload` count layers of the third push: copied straight into live storage,
made anew by the engine's own hook from copied parts, and taken by the engine's reload session.
`read back` counts the trainer's tensors that `instep verify` compared in the engine's storage; the
others are kept in a layout of the engine's own.
"""

COLUMNS = (
    *("family", "class", "direct / rebuilt / reload", "first push", "second", "read back"),
    "verdict",
)


def page(matrices: Sequence[Matrix]) -> str:
    """Returns the Markdown of all settings."""
    verdicts = "\n".join(f"| {verdict} | {says} |" for verdict, says in VERDICTS.items())
    parts = [TEXT.format(verdicts=verdicts), *map(_section, matrices)]
    return wrapped("\n".join(parts))


def _section(matrix: Matrix) -> str:
    setting, outcomes = matrix.setting, matrix.outcomes
    versions = ", ".join(f"{name} {number}" for name, number in setting.versions.items())
    counts = Counter(outcome.verdict for outcome in outcomes)
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    parts = [
        f"## vLLM {setting.versions.get('vllm')} on a {setting.kind.upper()}",
        f"{len(outcomes)} families: {found}. {', '.join(setting.machine)}; {versions}; {setting.date}; `{setting.command}`",
    ]
    for kind in KINDS:
        rows = [_row(outcome) for outcome in outcomes if outcome.kind == kind]
        if rows:
            parts += [f"### {kind[0].upper()}{kind[1:]}", table(COLUMNS, rows)]
    parts += list(_reasons(outcomes))
    return "\n\n".join(parts) + "\n"


def _row(outcome: Outcome) -> Sequence[str]:
    pushes = [time(seconds) for seconds in outcome.pushes]
    ways = f"{outcome.direct} / {outcome.rebuilt} / {sum(outcome.reload.values())}"
    return (
        outcome.family,
        f"`{outcome.model}`" if outcome.model else "–",
        ways if pushes else "–",
        *(pushes[index] if len(pushes) > index else "–" for index in (0, 1)),
        f"{outcome.verified} of {outcome.verified + outcome.unread}" if pushes else "–",
        outcome.verdict,
    )


def _reasons(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yields tables: why families are not bit-equal, and why layers are reloaded."""
    other = [outcome for outcome in outcomes if outcome.verdict != "bit-equal"]
    if other:
        yield "### Why not"
        rows = [(outcome.family, outcome.verdict, _cell(outcome.why)) for outcome in other]
        yield table(("family", "verdict", "why"), rows)
    reasons = Counter[str]()
    for outcome in outcomes:
        reasons.update(outcome.reload)
    if reasons:
        yield "### Why layers are reloaded"
        counts = [(str(count), _cell(why)) for why, count in reasons.most_common()]
        yield table(("layers", "why"), counts)


def _cell(text: str) -> str:
    """Returns the text, with the characters escaped that would end a cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def text(results: Path) -> str:
    """Returns the page of all kept results, those of GPUs last."""
    files = sorted(results.glob(MODELS))
    return page([msgspec.json.decode(file.read_bytes(), type=Matrix) for file in files])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(str(__doc__))
    (Path(sys.argv[2]) / "models.md").write_text(text(Path(sys.argv[1])))
