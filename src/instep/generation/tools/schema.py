"""Checks a tool's arguments against its JSON schema. Models write `"3"` for 3: a value with one
obvious meaning is converted, any other is an error."""

from __future__ import annotations

import json
from typing import Any

from instep.errors import ConfigError
from instep.extras import needed_by
from instep.generation.text import plain
from instep.generation.tools import patterns

MESSAGE = 1000
"""Characters that a model is told of a wrong argument."""
TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,), "integer": (int,), "number": (int, float), "array": (list,), "object": (dict,), "null": (type(None),),
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
        patterns.check(schema)
        self.validator = patterns.bounded(kind)(schema)

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
        if not allowed and (unknown := sorted(patterns.strange(arguments, self.schema))):
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
