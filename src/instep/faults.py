"""Errors as they travel between processes."""

from __future__ import annotations

from msgspec import structs

from instep.errors import InstepError, by_name
from instep.protocol import Fault


def fault_of(error: BaseException, otherwise: str) -> Fault:
    """Describes an error, by the nearest class that other processes know. otherwise: the kind of
    one that is not instep's."""
    if isinstance(error, InstepError):
        kind = next(cls.__name__ for cls in type(error).__mro__ if by_name(cls.__name__) is cls)
        fault = Fault(kind, str(error.args[0]), error.tensor, vars(error).get("next_step"))
    else:
        fault = Fault(otherwise, f"{type(error).__name__}: {error}")
    return structs.replace(fault, message=fault.message.encode(errors="replace").decode())  # lone surrogates cannot travel


def error_of(fault: Fault, where: str = "") -> InstepError:
    """Returns the error that a fault describes. where: what goes before its message."""
    return by_name(fault.kind)(where + fault.message, tensor=fault.tensor, next_step=fault.next_step)
