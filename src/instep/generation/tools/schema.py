"""Checks a tool's arguments against its JSON schema. Models write `"3"` for 3: a value with one
obvious meaning is converted, any other is an error.

jsonschema searches with `re`, which may take for ever and stops all threads meanwhile. `regex`
looks at the clock while it searches a model's text for a schema's patterns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from instep.errors import ConfigError
from instep.extras import needed_by
from instep.generation.text import plain

SECONDS = 1.0
"""Seconds that one search may take."""
MESSAGE = 1000
"""Characters that a model is told of a wrong argument."""
TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,), "integer": (int,), "number": (int, float),
    "array": (list,), "object": (dict,), "null": (type(None),),
}  # fmt: skip
"""The types of Python that `json` gives for those of a schema."""


class Arguments:
    """Checks the arguments of one tool. `schema` is a JSON schema of an object. Raises
    `ConfigError` if it is not."""

    def __init__(self, schema: dict[str, Any]) -> None:
        with needed_by("a tool"):
            from jsonschema import validators
            from jsonschema.exceptions import SchemaError
        if schema.get("type", "object") != "object":
            raise ConfigError(f"a tool takes an object of named arguments, not {schema['type']!r}")
        kind = validators.validator_for(schema)
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            raise ConfigError(f"not a JSON schema: {error.message}") from error
        self.schema = schema
        _check_patterns(schema)
        self.validator = _bounded(kind)(schema)

    def read(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the converted arguments. Raises `ValueError` with a text that helps the model
        to correct its call."""
        try:
            return self._read(arguments)
        except RecursionError as error:
            raise ValueError("lists and objects are nested too deep") from error

    def _read(self, arguments: dict[str, Any]) -> dict[str, Any]:
        properties = self.schema.get("properties", {})
        allowed = self.schema.get("additionalProperties", False)
        if not allowed and (unknown := sorted(_strange(arguments, self.schema))):
            raise ValueError(f"unknown argument {', '.join(unknown)}; the arguments are {', '.join(properties) or 'none'}")
        read: dict[str, Any] = {name: coerce(value, properties.get(name, {})) for name, value in arguments.items()}
        read = plain(read)
        for problem in self.validator.iter_errors(read):
            where = "".join(f"{part}: " for part in problem.absolute_path)
            raise ValueError(f"{where}{problem.message}"[:MESSAGE])  # which repeats the argument
        return read


def coerce(value: Any, schema: dict[str, Any]) -> Any:
    """Returns text as the type that `schema` wants, if the text can only mean that. Returns any
    other value unchanged."""
    kinds = schema.get("type")
    if not isinstance(value, str) or not isinstance(kinds, str | list):
        return value
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "string" in kinds:
        return value
    try:
        read = json.loads(value.lower() if value.lower() in ("true", "false", "null") else value)
    except (ValueError, RecursionError):
        return value
    return read if any(type(read) in TYPES.get(kind, ()) for kind in kinds) else value


def _bounded(kind: Any) -> Any:
    """Returns a class of validators whose searches end."""
    with needed_by("a tool"):
        from jsonschema import validators
    own = {"pattern": _pattern, "patternProperties": _pattern_properties, "additionalProperties": _additional_properties}
    return validators.extend(kind, own)


def _check_patterns(schema: Any) -> None:
    """Raises `ConfigError` for `patternProperties` beside `unevaluatedProperties`, which
    jsonschema searches with `re`."""
    words = {word for part in _parts(schema) for word in part}
    if {"patternProperties", "unevaluatedProperties"} <= words:
        raise ConfigError("a tool's schema cannot have patternProperties beside unevaluatedProperties: use additionalProperties")


def _strange(names: Iterable[str], schema: dict[str, Any]) -> list[str]:
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
    known, extra = schema.get("properties", {}), _strange(instance, schema)
    if validator.is_type(wanted, "object"):
        for name in extra:
            yield from validator.descend(instance[name], wanted, path=name)
    elif not wanted and extra:
        yield _wrong(f"unknown argument {', '.join(extra)}; the arguments are {', '.join(known) or 'none'}")
