"""Links of the repository's Markdown, for readers who have only some of its files."""

from __future__ import annotations

import re
from collections.abc import Callable

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def replace_links(text: str, target: Callable[[str], str | None]) -> str:
    """Gives each relative link the target that `target` returns for its own.

    Where that is None the link becomes its text, and a picture goes. Links to hosts stay.
    """

    def replaced(link: re.Match[str]) -> str:
        picture, words, old = link.groups()
        if old.startswith(("http://", "https://", "#")):
            return link[0]
        new = target(old)
        return f"{picture}[{words}]({new})" if new is not None else "" if picture else words

    return LINK.sub(replaced, text)


def without_links(text: str) -> str:
    """For a package index, which has none of the repository's files."""
    return replace_links(text, lambda _: None)
