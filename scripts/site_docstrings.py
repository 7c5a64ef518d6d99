"""An extension of griffe: `name: what it means` of a docstring becomes an item of a list.

A name is one only if the object has a parameter or a member of it, so prose stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

import griffe


class Fields(griffe.Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = signature(obj) + with_lists(obj.docstring.value, names(obj))


def signature(obj: Any) -> str:
    """The fields of a msgspec struct, which griffe does not take for a dataclass."""
    if not obj.is_class or not any(str(base) in ("Struct", "msgspec.Struct") for base in obj.bases):
        return ""
    fields = [one for one in obj.attributes.values() if one.annotation and "property" not in one.labels]
    lines = [f"    {one.name}: {one.annotation}{f' = {one.value}' if one.value else ''}," for one in fields]
    return "\n".join(["```python", f"{obj.name}(", *lines, ")", "```", "", ""])


def names(obj: Any) -> Set[str]:
    """Names that a docstring of `obj` may explain."""
    if obj.is_function:
        return {parameter.name.lstrip("*") for parameter in obj.parameters}
    if not obj.is_class:
        return set()
    made = {"__init__", "__new__"} & obj.members.keys()
    return obj.members.keys() | {name for method in made for name in names(obj.members[method])}


def with_lists(text: str, known: Set[str]) -> str:
    """Markdown of a docstring. A field's further lines may be indented; it ends with an empty line or with what is raised."""
    if not known:
        return text
    name = "|".join(sorted(known, key=len, reverse=True))
    field = rf"((?:{name})(?:, (?:{name}))*): "
    lines: list[str] = []
    listed = False
    for part in re.sub(rf"(?<=\.) (?={field})", "\n", text).splitlines():
        found = re.fullmatch(f"{field}(.*)", part)
        if found:
            if lines and lines[-1] and not listed:
                lines.append("")
            explained = ", ".join(f"`{one}`" for one in found[1].split(", "))
            lines.append(f"- {explained}: {found[2]}")
            listed = True
        elif listed and part.strip() and not part.startswith(("Raises ", "Returns ")):
            lines.append(f"  {part.strip()}")
        else:
            lines += ["", part] if listed and part.strip() else [part]
            listed = False
    return "\n".join(lines)
