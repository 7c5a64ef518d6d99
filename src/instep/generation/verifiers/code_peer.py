"""Two programs, each in a sandbox of its own, that use each other's objects over a socket: a
solution, and the judge that tests it.

`CodeTests` runs the texts of this file, `code_values.py` and `code_remote.py` as one program,
twice: standard library only, and one namespace. Plain data goes over by value and is compared where
the tests run, with the types of Python itself. All else, functions and instances, stays where it is
and is asked over the socket. What a solution answers decides nothing but the value of a call: the
tests, and what they say, are in a process that it cannot reach.
"""

import asyncio
import json
import socket
import struct
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instep.generation.verifiers.code_remote import OPERATIONS, Remote, error_named, later, may_ask, names_of, put_back
    from instep.generation.verifiers.code_values import held, value_of, word

CHANNEL = 3
MOST = 1 << 26
"""Bytes of one message."""


class Peer:
    """One end of the socket. own: objects of this process that the other may use, by number.
    trusted: whether the other may do anything with them."""

    def __init__(self, trusted: bool) -> None:
        self.socket = socket.socket(fileno=CHANNEL)
        self.own: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.trusted = trusted
        self.remotes: dict[int, Remote] = {}
        self.errors: dict[int, type[BaseException]] = {}

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self.socket.sendall(struct.pack("I", len(data)) + data)

    def receive(self) -> dict[str, Any]:
        size = struct.unpack("I", self._exactly(4))[0]
        if size > MOST:
            raise EOFError("too long a message")
        message: dict[str, Any] = json.loads(self._exactly(size))
        return message

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self.socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError("the other process has ended")
            data += part
        return bytes(data)

    def ask(self, do: str, on: int, name: str = "", given: tuple[Any, ...] = (), named: dict[str, Any] | None = None) -> Any:
        """Asks the other process to use one of its objects, and answers its own questions
        meanwhile."""
        named = named or {}
        words = {name: self.pack(value) for name, value in named.items()}
        self.send({"do": do, "on": on, "name": name, "given": [self.pack(value) for value in given], "named": words})
        while "do" in (message := self.receive()):
            self.answer(message)
        for value, after in zip((*given, *named.values()), message.get("after", ()), strict=False):
            put_back(value, self.unpack(after))
        if "raised" in message:
            raise self.error(message["raised"])
        return self.unpack(message["value"])

    def answer(self, message: dict[str, Any]) -> None:
        given: list[Any] = []
        try:
            given = [self.unpack(value) for value in message["given"]]
            named = {name: self.unpack(value) for name, value in message["named"].items()}
            value = self.pack(self.perform(message["do"], message["on"], message["name"], given, named))
            given += named.values()
            self.send({"value": value, "after": [self.pack(one) for one in given]})
        except EOFError:
            raise
        except BaseException as error:
            self.send({"raised": self.describe(error), "after": [self.pack(one) for one in given]})

    def perform(self, do: str, on: int, name: str, given: list[Any], named: dict[str, Any]) -> Any:
        target = self.own[on]
        if not self.trusted and not may_ask(target, do, name):
            raise TypeError(f"a solution may not ask for {name or do} of {type(target).__name__}")
        if do == "call":
            return target(*given, **named)
        if do == "get":
            return getattr(target, name)
        if do == "set":
            return setattr(target, name, *given)
        if do == "await":
            return asyncio.run(target)
        if do == "held":
            return held(target)
        if do == "isinstance":
            return isinstance(given[0], target)
        return OPERATIONS[name](target, *given)

    def pack(self, value: Any) -> Any:
        if type(value) is Remote:
            return {"yours": object.__getattribute__(value, "_number")}
        plain = word(value, self.pack)
        return self.refer(value) if plain is NotImplemented else plain

    def refer(self, value: Any) -> dict[str, Any]:
        number = self.numbers.setdefault(id(value), len(self.own))
        if number == len(self.own):
            self.own.append(value)  # which also keeps its id from being another's
        kind = "coroutine" if isinstance(value, types.CoroutineType) else ""
        if isinstance(value, type) and issubclass(value, BaseException):
            kind = "error"
        return {"mine": number, "kind": kind, "names": names_of(value) if kind == "error" else []}

    def unpack(self, packed: Any) -> Any:
        if isinstance(packed, list):
            return [self.unpack(one) for one in packed]
        if not isinstance(packed, dict):
            return packed
        (kind, inside), *more = packed.items()
        if kind == "yours":
            return self.own[inside]
        if kind == "mine":
            return self._remote(inside, dict(more))
        return value_of(kind, inside, self.unpack)

    def _remote(self, number: int, more: dict[str, Any]) -> Any:
        if more["kind"] == "coroutine":
            return later(self, number)
        if more["kind"] == "error":
            if number not in self.errors:
                self.errors[number] = type(str(more["names"][0]), (error_named(more["names"]),), {})
            return self.errors[number]
        if number not in self.remotes:  # the same object each time, for `is`
            self.remotes[number] = Remote(self, number)
        return self.remotes[number]

    def describe(self, error: BaseException) -> dict[str, Any]:
        found = type(error)
        number = None if found.__module__ == "builtins" else self.refer(found)["mine"]
        try:
            words = [self.pack(one) for one in error.args]
        except Exception:
            words = []
        return {"number": number, "names": names_of(found), "words": words}

    def error(self, told: dict[str, Any]) -> BaseException:
        words = [self.unpack(one) for one in told["words"]]
        if told["number"] is None:
            return error_named(told["names"])(*words)
        kind = self._remote(told["number"], {"kind": "error", "names": told["names"]})
        made: BaseException = kind(*words)
        return made
