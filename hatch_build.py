"""The long description of the package: the README, without links into the repository."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ELSEWHERE = "\nThe documents named here are in the source distribution and in the repository.\n"


class Readme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        without_links = run_path(str(root / "scripts" / "links.py"))["without_links"]
        text = without_links((root / "README.md").read_text()) + ELSEWHERE
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
