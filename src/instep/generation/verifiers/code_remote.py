"""The last part of the program that `code_peer.py` describes: remote objects, and the work of
each of the two processes."""

import ast
import builtins
import copy
import importlib
import json
import operator
import os
import pickle
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instep.generation.verifiers.code_peer import Peer

TESTS = "tests"
"""The module in which tests are run."""
READS = ("iter", "next", "len", "getitem")
SHARED = frozenset({
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json", "math",
    "operator", "random", "re", "statistics", "string", "typing",
})  # fmt: skip
"""Modules whose members a solution imports for its tests too. None is equal to everything, as one
of `unittest.mock` is."""
LIBRARIES = {name: name for name in sorted(SHARED | {
    "base64", "contextlib", "hashlib", "inspect", "io", "numpy", "os", "pandas", "pathlib", "pytest", "sys", "time", "unittest", "warnings",
})} | {"np": "numpy", "pd": "pandas"}  # fmt: skip
"""Names of modules. Where a test takes a member of one, it is the module's, whatever the solution
calls so."""
COMPARISONS = {
    "isclose": "math", "allclose": "numpy", "array_equal": "numpy", "approx": "pytest", "raises": "pytest",
    **dict.fromkeys(("assert_allclose", "assert_almost_equal", "assert_array_equal", "assert_equal"), "numpy.testing"),
}  # fmt: skip
"""Functions, and the module of each, to which a solution gives no meaning of its own."""
MODULES = frozenset(sys.stdlib_module_names) | {"numpy", "pandas", "scipy", "sympy", "torch"}
PREDICATES = frozenset(name for kind in (str, bytes, set, float) for name in dir(kind) if name.startswith(("is", "startswith", "endswith")))
"""What one asks a text or a set. An object that is none is not asked: it would say yes."""
COMPARES = ("almost_equals", "eq", "equal", "equals", "same")
"""What one asks an object about another of its kind."""
ASKED = ("__annotations__", "__dict__", "__doc__", "__name__", "__qualname__", "__wrapped__")

UNARY = ("neg", "pos", "abs", "invert")
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
ORDER = ("lt", "le", "gt", "ge")
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*UNARY, *BINARY, *ORDER, "eq", "getitem", "setitem", "delitem")},
    "iter": iter, "next": next, "len": len, "bool": bool, "int": int, "float": float, "index": operator.index, "round": round,
    "repr": repr, "str": str, "format": format, "copy": copy.copy, "deepcopy": copy.deepcopy, "pickled": pickle.dumps,
    "enter": lambda target: target.__enter__(), "exit": lambda target: target.__exit__(None, None, None),
}  # fmt: skip


PEERS: list["Peer"] = []
"""The judge's, for objects that come out of a pickle."""


class Remote:
    """An object of the other process. It computes nothing with a plain value, which may be what the
    tests expect: the other process would answer what it likes. It equals a plain value that it
    holds, as a named tuple holds a tuple."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: "Peer", number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        if name in PREDICATES or (name.startswith("__") and name not in ASKED):
            raise AttributeError(name)
        found = _ask(self, "get", name)
        return _of_its_kind(found) if name in COMPARES else found

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._peer.ask("call", self._number, "", given, named)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return other._number == self._number or _ask(self, "op", "eq", other) is True
        plain = _ask(self, "held", "")
        return plain is not None and not isinstance(plain, Remote) and bool(plain == other)

    def __hash__(self) -> int:
        return hash(self._number)

    def __iter__(self) -> Any:
        return iter(found) if isinstance(found := _ask(self, "op", "iter"), (list, tuple)) else Steps(found)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and _ask(self, "isinstance", "", value) is True

    def __exit__(self, *_: object) -> None:
        _ask(self, "op", "exit")

    def __deepcopy__(self, memo: Any) -> Any:
        return _ask(self, "op", "deepcopy")

    def __reduce__(self) -> Any:
        return unpickled, (_ask(self, "op", "pickled"),)


def unpickled(data: bytes) -> Any:
    """Makes an object in the other process from its own pickle."""
    return PEERS[0].ask("call", 1, "", (data,))


class Steps:
    """Goes through an iterator of the other process."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> "Steps":
        return self

    def __next__(self) -> Any:
        return _ask(self.source, "op", "next")


def _ask(remote: Any, do: str, name: str, *given: Any) -> Any:
    return remote._peer.ask(do, remote._number, name, given)


def _of_its_kind(method: Any) -> Any:
    def call(*given: Any) -> Any:
        if not all(isinstance(one, Remote) for one in given):
            raise TypeError("an object of the solution's is not asked whether it equals a plain value")
        return method(*given)

    return call


def _special(name: str, only: bool) -> Callable[..., Any]:
    def method(self: Any, *given: Any) -> Any:
        if only and not all(isinstance(one, Remote) for one in given):
            return NotImplemented
        return _ask(self, "op", name, *given)

    return method


for _names, _only in ((("next", "len", "bool", "int", "float", "index", "round", "repr", "str", "format", "enter", "copy"), False),
                      (("getitem", "setitem", "delitem", *UNARY), False), ((*BINARY, *ORDER), True)):  # fmt: skip
    for _name in _names:
        setattr(Remote, f"__{_name.strip('_')}__", _special(_name, _only))


async def later(peer: "Peer", number: int) -> Any:
    """Stands for a coroutine of the other process."""
    return peer.ask("await", number)


def may_ask(target: Any, do: str, name: str) -> bool:
    """Whether a solution may do this with a test's object. Functions may be called, iterators
    read, and instances of the test's own classes used."""
    tests = (target if isinstance(target, type) else type(target)).__module__ == TESTS
    if do in ("get", "set"):
        return tests and not name.startswith("_")
    functions = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
    return (do == "op" and name in READS) or (do == "call" and (tests or isinstance(target, functions)))


def put_back(value: Any, after: Any) -> None:
    """Repeats on a list, dict or set of this process the changes that a call made to its copy."""
    if type(value) is not type(after) or type(value) not in (list, dict, set, bytearray) or value == after:
        return
    if isinstance(value, (list, bytearray)):
        value[:] = after
    else:
        value.clear()
        value.update(after)


def names_of(error: type[BaseException]) -> list[str]:
    return [one.__name__ for one in error.__mro__]


def error_named(names: list[str]) -> type[BaseException]:
    """Returns the first of these names that is one of Python's own exceptions."""
    found = (getattr(builtins, name, None) for name in names)
    return next((one for one in found if isinstance(one, type) and issubclass(one, BaseException)), Exception)


def solve() -> None:
    """Runs a solution, and then serves its judge."""
    sys.set_int_max_str_digits(0)
    program = json.loads(sys.stdin.read())
    peer = Peer(trusted=True)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(program, "solution.py", "exec"), module.__dict__)
    peer.own.append(lambda names: {name: described(module.__dict__[name]) for name in names if name in module.__dict__})
    peer.own.append(pickle.loads)
    peer.send({"ready": True})
    try:
        while True:
            peer.answer(peer.receive())
    finally:
        os._exit(0)


def described(value: Any) -> Any:
    """Describes a value of a solution's module. A library's member is described by its name
    there."""
    if isinstance(value, types.ModuleType):
        return ("module", value.__name__)
    home, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if home in SHARED and isinstance(name, str) and getattr(sys.modules.get(home), name, None) is value:
        return ("member", home, name)
    return ("value", value)


def judge() -> None:
    """Runs tests that use a solution's names, and prints the number of each that passed."""
    sys.set_int_max_str_digits(0)
    verdicts = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    tests = json.loads(sys.stdin.read())
    peer = Peer(trusted=False)
    PEERS.append(peer)
    if peer.receive() != {"ready": True}:
        raise EOFError
    space: dict[str, Any] = {"__name__": TESTS}
    module = types.ModuleType(TESTS)
    module.__dict__.update(space)
    sys.modules[TESTS] = module
    given: dict[str, Any] = {}
    for number, test in enumerate(tests):
        try:
            fetch(peer, test, module.__dict__, given)
            exec(compile(test, "test", "exec"), module.__dict__)
        except BaseException:
            continue
        os.write(verdicts, f"{number}\n".encode())
    os._exit(0)


def member(home: str, name: str) -> Any:
    """Returns a function or class of a shared module; None for any other name."""
    found = None if home not in SHARED or name.startswith("_") else getattr(importlib.import_module(home), name, None)
    return found if callable(found) else None


def fetch(peer: "Peer", test: str, space: dict[str, Any], given: dict[str, Any]) -> None:
    """Gives a test the solution's names that it uses, unless an earlier test has assigned them."""
    tree = ast.parse(test)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    bases = {node.value.id for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    wanted = {name for name in used if not hasattr(builtins, name) and (name not in space or space[name] is given.get(name, space))}
    answered = peer.ask("call", 0, "", (sorted(wanted),)) if wanted else {}
    for name in wanted & set(answered):
        kind, *what = answered[name]
        value: Any
        if name in bases and name in LIBRARIES:
            value = importlib.import_module(LIBRARIES[name])
        elif name in COMPARISONS:
            value = getattr(importlib.import_module(COMPARISONS[name]), name)
        elif kind == "member":
            value = member(*what)
        elif kind == "module":
            value = importlib.import_module(what[0]) if what[0].partition(".")[0] in MODULES else None
        else:
            value = what[0]
        space[name] = given[name] = value
