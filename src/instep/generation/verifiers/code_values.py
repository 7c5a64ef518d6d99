"""The first part of the program that `code_peer.py` describes: plain data as JSON, by value."""

import collections
import datetime
import decimal
import fractions
from collections.abc import Callable
from typing import Any

SMALL = 1 << 62
COLLECTIONS: dict[str, Any] = {one.__name__: one for one in (collections.OrderedDict, collections.Counter, collections.deque)}
NUMBERS: dict[str, Any] = {one.__name__: one for one in (decimal.Decimal, fractions.Fraction)}
TIMES: dict[str, Any] = {one.__name__: one for one in (datetime.date, datetime.time, datetime.datetime, datetime.timedelta)}
BASES: tuple[Any, ...] = (str, int, float)
HOLDERS = (list, tuple, set, frozenset, dict)


def is_one(kinds: dict[str, Any], kind: type) -> bool:
    return kinds.get(kind.__name__) is kind


def word(value: Any, pack: Callable[[Any], Any]) -> Any:
    """Returns a value in JSON form; `NotImplemented` if it is no plain data."""
    kind: Any = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and -SMALL < value < SMALL):
        return value
    if kind is int:
        return {"int": hex(value)}
    for base in BASES:
        if isinstance(value, base):  # what a class of its own says of equality does not go along
            return pack(base.__str__(value) if base is str else base.__add__(value, base(0)))
    if kind is list:
        return [pack(one) for one in value]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [pack(one) for one in value]}
    if kind in (dict, collections.defaultdict):
        return {"dict": [[pack(key), pack(one)] for key, one in value.items()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is range:
        return {"range": [value.start, value.stop, value.step]}
    if is_one(COLLECTIONS, kind):
        return {"collection": [kind.__name__, pack(list(value) if kind is collections.deque else dict(value))]}
    if is_one(NUMBERS, kind):
        return {"number": [kind.__name__, str(value)]}
    if is_one(TIMES, kind) and getattr(value, "tzinfo", None) is None:
        return {"time": [kind.__name__, [pack(one) for one in value.__reduce__()[1]]]}
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray" and value.dtype.kind in "biufcSU":
        return {"array": [value.dtype.str, list(value.shape), pack(value.ravel().tolist())]}
    if kind.__module__ == "numpy" and kind.__name__ != "ndarray" and hasattr(value, "item"):
        return pack(value.item())
    return NotImplemented


def held(value: Any) -> Any:
    """Returns a list, tuple, set or dict with the contents of an instance of a subclass; None
    for any other value."""
    return next((base(value) for base in HOLDERS if isinstance(value, base)), None)


def value_of(kind: str, inside: Any, unpack: Callable[[Any], Any]) -> Any:
    """Undoes `word` for types that JSON does not have."""
    if kind == "int":
        return int(inside, 16)
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(unpack, inside))
    if kind == "dict":
        return {unpack(key): unpack(value) for key, value in inside}
    if kind in ("bytes", "bytearray"):
        plain = bytes.fromhex(inside)
        return plain if kind == "bytes" else bytearray(plain)
    if kind == "complex":
        return complex(*inside)
    if kind == "range":
        return range(*inside)
    if kind == "collection":
        return COLLECTIONS[inside[0]](unpack(inside[1]))
    if kind == "number":
        return NUMBERS[inside[0]](inside[1])
    if kind == "time":
        return TIMES[inside[0]](*map(unpack, inside[1]))
    import numpy

    return numpy.array(unpack(inside[2]), dtype=inside[0]).reshape(inside[1])
