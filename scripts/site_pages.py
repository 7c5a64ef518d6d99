"""Hooks of MkDocs: the pages at the root of the repository, and links that leave the documentation."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
from links import replace_links

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "DESIGN.md": "design/index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Where a file at the root stands on the site."""


def on_config(config: Any) -> Any:
    """The pages of decisions stand in the order of DESIGN.md, whatever it has."""
    listed = re.findall(r"\(docs/(design/[\w-]+\.md)\)", (ROOT / "DESIGN.md").read_text())
    (design,) = (entry["Design"] for entry in config.nav if "Design" in entry)
    design.extend(listed)
    return config


def on_files(files: Any, config: Any) -> Any:
    for name, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(text: str, page: Any, files: Any, **_: Any) -> str:
    """Links lead from the page's place in the repository; they become links within the site."""
    place = page.file.src_uri
    here = next((name for name, there in PAGES.items() if there == place), f"docs/{place}")

    def target(old: str) -> str | None:
        path, _, anchor = old.partition("#")
        there = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        found = PAGES.get(there, there.removeprefix("docs/"))
        if files.get_file_from_path(found) is None:
            return None  # a file of the repository that is no page
        relative = posixpath.relpath(found, posixpath.dirname(place) or ".")
        return relative + (f"#{anchor}" if anchor else "")

    return replace_links(re.sub(r"^```python no-run$", "```python", text, flags=re.MULTILINE), target)
