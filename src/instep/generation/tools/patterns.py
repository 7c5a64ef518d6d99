"""Searches a model's text for the regular expressions of a tool's schema, in bounded time.

jsonschema searches with `re`, which may take for ever and stops all threads meanwhile. `regex` looks at the clock while it searches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from instep.errors import ConfigError
from instep.extras import needed_by

SECONDS = 1.0
"""What one search may take."""


def bounded(kind: Any) -> Any:
    """Returns a class of validators whose searches end."""
    with needed_by("a tool"):
        from jsonschema import validators
    own = {"pattern": _pattern, "patternProperties": _pattern_properties, "additionalProperties": _additional_properties}
    return validators.extend(kind, own)


def check(schema: Any) -> None:
    """Raises `ConfigError` for `patternProperties` beside `unevaluatedProperties`, which
    jsonschema searches with `re`."""
    words = {word for part in _parts(schema) for word in part}
    if {"patternProperties", "unevaluatedProperties"} <= words:
        raise ConfigError("a tool's schema cannot have patternProperties beside unevaluatedProperties: use additionalProperties")


def strange(names: Iterable[str], schema: dict[str, Any]) -> list[str]:
    """Returns the names of properties that a schema does not know."""
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    return [name for name in names if name not in known and not any(_found(pattern, name) for pattern in patterns)]


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _parts(inner)


def _found(pattern: str, text: str) -> bool:
    """Whether a pattern occurs in a text. Raises `ValueError` if the search takes longer than
    its time."""
    with needed_by("a tool with patterns in its schema"):
        import regex
    try:
        return regex.search(pattern, text, timeout=SECONDS, concurrent=True) is not None
    except TimeoutError as error:
        raise ValueError(f"it takes longer than {SECONDS:g} seconds to see whether {text[:40]!r}... matches {pattern!r}") from error


def _wrong(message: str) -> Exception:
    with needed_by("a tool"):
        from jsonschema.exceptions import ValidationError
    error: Exception = ValidationError(message)
    return error


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:  # noqa: ARG001
    if validator.is_type(instance, "string") and not _found(pattern, instance):
        yield _wrong(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: dict[str, Any], instance: Any, schema: Any) -> Iterator[Any]:  # noqa: ARG001
    if validator.is_type(instance, "object"):
        for pattern, inner in patterns.items():
            for name, value in instance.items():
                if _found(pattern, name):
                    yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional_properties(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(instance, "object"):
        return
    known, extra = schema.get("properties", {}), strange(instance, schema)
    if validator.is_type(wanted, "object"):
        for name in extra:
            yield from validator.descend(instance[name], wanted, path=name)
    elif not wanted and extra:
        yield _wrong(f"unknown argument {', '.join(extra)}; the arguments are {', '.join(known) or 'none'}")
