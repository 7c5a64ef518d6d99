"""Messages as bytes."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def encode(value: Any) -> bytes:
    return _encoder.encode(value)


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(value))


def decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Raises `msgspec.DecodeError` where the bytes are not a well-formed `kind`."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UnicodeDecodeError as error:  # of which msgspec makes no DecodeError
        raise msgspec.DecodeError(str(error)) from error
