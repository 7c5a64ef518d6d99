"""Outcomes of all tested families, as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from instep.bench.models.families import FAMILIES

Verdict = Literal[
    "bit-equal",
    "refused",
    "not started",
    "different",
    "dirty",
    "says nothing",
    "out of time",
    "ended",
]
VERDICTS: dict[Verdict, str] = {
    "bit-equal": "after each push the engine is the same as one that loaded the weights from disk",
    "refused": "the push ended with an error before it changed anything; the engine goes on",
    "not started": "vLLM itself fails with a checkpoint of this family, so nothing was pushed",
    "different": "a push returned, and the engine is not the same as one that loaded from disk",
    "dirty": "a push failed and the engine refuses to generate",
    "says nothing": "two models of the family answer alike, so equal answers would show nothing",
    "out of time": "ended at the deadline",
    "ended": "its process ended without a result",
}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Says where and how the outcomes came about. kind: "gpu" or "cpu"."""

    kind: str
    machine: list[str]
    versions: dict[str, str]
    date: str
    command: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one family.

    kind: the heading it stands under. model: its class in transformers.
    why, advice: the first line of the error that decided, and its next step.
    pushes: seconds of each push that returned. direct, rebuilt: layers of the last one.
    reload: the layers of the last one that took the engine's reload session, by why they did.
    live: tensors of the engine's model that were compared with those of one that loaded from disk.
    verified: how many of the trainer's tensors `verify` found equal. unread: those that it cannot
    read back.
    took: seconds with the starts of the engines.
    """

    family: str
    kind: str
    verdict: Verdict
    model: str = ""
    why: str = ""
    advice: str = ""
    pushes: list[float] = []
    direct: int = 0
    rebuilt: int = 0
    reload: dict[str, int] = {}
    live: int = 0
    verified: int = 0
    unread: int = 0
    took: float = 0.0


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes of all families in one setting."""

    setting: Setting
    outcomes: list[Outcome]

    def write(self, folder: Path) -> Path:
        """Writes `models-cpu.json` or `models-gpu.json` into `folder`. The file's outcomes of
        other families stay if they came from the same machine and versions."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"models-{self.setting.kind}.json"
        new = {outcome.family for outcome in self.outcomes}
        kept = [outcome for outcome in self._before(file) if outcome.family not in new]
        together = {outcome.family: outcome for outcome in kept + self.outcomes}
        in_order = [together[name] for name in FAMILIES if name in together]  # a family may have been removed
        every = msgspec.structs.replace(self, outcomes=in_order)
        file.write_bytes(msgspec.json.format(msgspec.json.encode(every), indent=1) + b"\n")
        return file

    def _before(self, file: Path) -> list[Outcome]:
        if not file.exists():
            return []
        before = msgspec.json.decode(file.read_bytes(), type=Matrix)
        ours, theirs = self.setting, before.setting
        same = (ours.machine, ours.versions) == (theirs.machine, theirs.versions)
        return before.outcomes if same else []
