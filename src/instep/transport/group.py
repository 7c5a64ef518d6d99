"""A private process group: torch's own NCCL or Gloo, on a store of its own. Torch's global group is
neither needed nor touched.

The first rank serves the store; the others find it by address. Every wait ends: at its deadline,
when a peer's connection breaks, or when a rank writes into the store why it gives up. A group that
ended in an error cannot be used again: make a new one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import AllreduceOptions, BroadcastOptions, PrefixStore, ReduceOp  # type: ignore[attr-defined]

from instep.digest_cuda import mark
from instep.errors import TransportError
from instep.transport.store import GAVE_UP, address_towards, first_line, tell

LOOK = 0.05  # seconds between two looks for a rank that gave up
NEVER = timedelta(days=365)  # torch's own watchdog ends the whole process: deadlines are kept here instead
CUMEM = "NCCL_CUMEM_ENABLE"
"""How NCCL shares memory. It does not connect processes in which this is not the same."""
QUIET = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


def both_ends(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a trainer's environment that the other processes of a group need
    too."""
    return {CUMEM: environment[CUMEM]} if CUMEM in environment else {}


class Group:
    """Rank `rank` of a private group of `size`. The constructor returns when every rank has joined,
    or raises `TransportError` after `timeout` seconds.

    backend: `nccl` with tensors on `device`, or `gloo` with tensors in host memory.
    key: separates groups that share a store.
    timeout: also the longest that a later deadline may be with Gloo, whose collectives cannot be
    ended from outside.
    why: called when a peer's connection breaks. Raises the reason where the caller knows a better
    one than the connection.
    """

    def __init__(
        self,
        backend: str,
        store: Any,
        key: str,
        rank: int,
        size: int,
        device: torch.device,
        timeout: float,
        why: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size, self.device, self.backend = rank, size, device, backend
        self.why = why
        self.store = PrefixStore(key, store)
        self.timeout = timeout
        self.broken: str | None = None
        self.rooms: list[torch.Tensor] = []
        self.started = time.monotonic()
        self._looked, self._met = 0.0, ""
        try:
            self.store.set(f"settings {rank}", os.environ.get(CUMEM, "unset"))
            self.meet("group")  # before the backend waits, because its waits cannot be ended
            self._group = BACKENDS[backend](self.store, rank, size, store.host, timeout, device)
            first = torch.zeros(1, dtype=torch.uint8, device=device)
            self.wait(self.broadcast(first))  # NCCL connects with its first collective: here, where a deadline is kept
            self.settle()
        except Exception as error:
            raise self.end("cannot form the group" + self._differences(), error) from error

    def _differences(self) -> str:
        """Returns a likely reason why ranks cannot be connected, or an empty text."""
        if self.backend != "nccl":
            return ""
        with suppress(Exception):  # the store may be gone: why it could not be formed is told without this
            told = {self.store.get(f"settings {rank}").decode() for rank in range(self.size) if self.store.check([f"settings {rank}"])}
            if len(told) > 1:
                return f", whose processes differ in {CUMEM} ({' / '.join(sorted(told))}: set it alike in all of them)"
        return ""

    def meet(self, place: str) -> None:
        """Waits until every rank has come here. A broadcast is no such wait: its data may arrive
        before other ranks have come.

        place: a name that is used once. The first rank gives up after half of the time, so that the
        others hear it within theirs. Each rank leaves one key, that of the last place.
        """
        patience = self.timeout if self.rank else self.timeout / 2
        self.store.set(f"{place} {self.rank}", "here")
        places = [f"{place} {rank}" for rank in range(self.size)]
        while not self.store.check(places):
            if time.monotonic() - self.started > patience:
                missing = next(rank for rank, name in enumerate(places) if not self.store.check([name]))
                raise self.end("deadline", TransportError(f"rank {missing} of {self.size} did not come within {patience:g} s"))
            self.look()
            time.sleep(0.0003)
        if self._met:  # every rank has left the last place
            self.store.delete_key(self._met)
        self._met = f"{place} {self.rank}"

    def begin(self, timeout: float) -> None:
        """Sets the deadline of everything that follows."""
        self.started, self.timeout = time.monotonic(), timeout

    def over(self) -> bool:
        return time.monotonic() - self.started > self.timeout

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Any:
        """Starts to send `tensor` (contiguous) from `root` to every other rank. Returns the `Work`;
        callers wait for each one in the order of the calls."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = root, 0, True
        return self._started(lambda group: group.broadcast([tensor], options))

    def all_reduce(self, tensor: torch.Tensor, op: Any = ReduceOp.SUM) -> Any:
        """Starts to combine every rank's `tensor` (contiguous) into all of them. Returns the
        `Work`; so do `send` and `recv`."""
        options = AllreduceOptions()
        options.reduceOp, options.asyncOp = op, True
        return self._started(lambda group: group.allreduce([tensor], options))

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        return self._between(self._started(lambda group: group.send([tensor], to, 0)))

    def recv(self, tensor: torch.Tensor, source: int) -> Any:
        return self._between(self._started(lambda group: group.recv([tensor], source, 0)))

    def _between(self, work: Any) -> Any:
        return work if self.device.type == "cuda" else _InThread(work, self.timeout)

    def _started(self, start: Callable[[Any], Any]) -> Any:
        if self.broken:
            raise TransportError(f"the group ended earlier: {self.broken}")
        try:
            return start(self._group)
        except Exception as error:  # Gloo raises at once where it knows already that a peer is gone
            raise self._failed(error) from error

    def wait(self, work: Any) -> None:
        """Waits until a collective is done. On a GPU it makes the current stream wait for the
        collective."""
        if self.device.type != "cuda":
            self._until(work.is_completed)
        try:
            work.wait()
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> TransportError:
        self.look(now=True)  # a peer that gave up says why
        self.why()
        return self.end("a peer failed", error)

    def mark(self) -> Callable[[], bool]:
        """Returns a function that tells whether the device has finished the work that is in the
        current stream now."""
        return mark(self.device)

    def settle(self, mark: Callable[[], bool] | None = None) -> None:
        """Waits until the device has finished the work in the current stream, or the work before
        `mark` where one is given."""
        self._until(mark or self.mark())

    def _until(self, done: Any) -> None:
        for turn in range(1 << 62):
            if done():
                return
            if self.over():
                raise self.end("deadline", TransportError(f"peers did not take part within {self.timeout:g} s"))
            self.look()
            time.sleep(0 if turn < 50 else 0.0002)

    def look(self, *, now: bool = False) -> None:
        """Raises `TransportError` where another rank gave up, or the store is gone."""
        if not now and time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        try:
            gave_up = self.store.get(GAVE_UP).decode() if self.store.check([GAVE_UP]) else None
        except Exception as error:
            raise self.end("the trainer's store is gone", error) from error
        if gave_up is not None:
            self.close()
            raise TransportError(f"{self.backend} group: another rank gave up: {gave_up}")

    def give_up(self, reason: str) -> None:
        """Ends the waits of every rank. May be called from another thread."""
        if self.broken is None:
            self.broken = reason
            tell(self.store, reason)

    def close(self) -> None:
        """Leaves the group. A Gloo collective that is still running cannot be ended: a thread keeps
        its memory until its own deadline."""
        self.broken = self.broken or "it was closed"
        ending = threading.Thread(target=_abort, args=[[vars(self).pop("_group", None)]], daemon=True)
        ending.start()
        ending.join(1.0)  # a process that ends while NCCL is being torn down crashes

    def end(self, what: str, error: BaseException) -> TransportError:
        """Ends the waits of every rank and returns the error to raise."""
        if isinstance(error, TransportError) and self.broken:
            return error  # reported already
        text = f"{self.backend} group, rank {self.rank} of {self.size}: {what}: {first_line(error)}"
        self.give_up(text)
        self.close()
        return TransportError(text)


class _InThread:
    """Waits for a Gloo send or receive in a thread, because Gloo does not tell when those are
    done."""

    def __init__(self, work: Any, timeout: float) -> None:
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._wait, args=(work, timedelta(seconds=timeout)), daemon=True)
        self.thread.start()

    def _wait(self, work: Any, timeout: timedelta) -> None:
        try:
            work.wait(timeout)
        except Exception as error:
            self.error = error

    def is_completed(self) -> bool:
        return not self.thread.is_alive()

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


def _abort(groups: list[Any]) -> None:
    """Aborts a group. Gloo joins its threads when the last reference goes: hence a list, so that it
    goes here."""
    with suppress(Exception):
        groups[0].abort()
    groups.clear()


def _gloo(store: Any, rank: int, size: int, host: str, timeout: float, _: torch.device) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(host))]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, _host: str, _timeout: float, device: torch.device) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = NEVER
    with environment(QUIET), torch.cuda.device(device):
        return ProcessGroupNCCL(store, rank, size, options)


BACKENDS = {"gloo": _gloo, "nccl": _nccl}


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables within its block, for what NCCL reads from them alone."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
