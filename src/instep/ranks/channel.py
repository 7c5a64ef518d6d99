"""Questions of rank 0 and answers of the others, as keys of a store that rank 0 serves.

A *round* is one call that every rank makes (a push). In it rank 0 asks one question after the
other, and all other ranks answer each. The last message says how the round has ended. A rank that
missed a call, because something else failed there, finds the newest round at its next call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Set
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from instep.errors import InstepError, SourceError, TransportError, VersionConflict
from instep.faults import error_of, fault_of
from instep.protocol import Fault, decode, encode, raw
from instep.ranks.liveness import Watch
from instep.transport.store import address_towards, find, serve

PATIENCE = 10
"""How many timeouts a follower waits for the next question: rank 0 waits for engines meanwhile,
step by step."""
GOODBYE = 5.0
"""Seconds that rank 0 waits until all have heard how a call has ended."""

_numbers = count()


class Question(msgspec.Struct, frozen=True):
    what: str
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


class Answer(msgspec.Struct, frozen=True):
    fault: Fault | None = None
    body: msgspec.Raw = msgspec.Raw(b"\xc0")


class Channel:
    """Carries questions and answers between the ranks of torch's default group. rank, size: of that
    group, whose store leads the ranks to rank 0's store. The n-th channel of each rank belongs to
    the n-th of every other. timeout: seconds for each answer. asks: whether rank 0 asks anything.
    If it only tells how its calls have ended, that goes through the default group's store, which
    outlives rank 0's part."""

    def __init__(self, rank: int, size: int, timeout: float, *, asks: bool) -> None:
        self.rank, self.size, self.timeout, self.asks = rank, size, timeout, asks
        self.round, self.turn = 0, 0
        self.spread = False
        """Whether ranks are on several hosts, as far as rank 0 has heard."""
        self.watch = Watch()
        self._place = f"instep/{next(_numbers)}"
        self._served = None
        self._store = None if asks else PrefixStore(self._place, default_store())
        self._keys: deque[list[str]] = deque()  # of the last rounds
        self._kept = 2 if asks else 64  # ranks that are not asked may be behind
        if asks and rank == 0:
            host = own_address()
            self._served = serve(host)
            self.address = (host, self._served.port)
            default_store().set(self._place, f"{host}@{self._served.port}")

    @property
    def store(self) -> Any:
        """The channel's own connection to the store: a wait in one thread does not hold up
        another's."""
        if self._store is None:
            if self.rank:
                self._wait(default_store(), self._place, self.timeout, "rank 0 of the trainer has made no WeightSync")
                host, port = default_store().get(self._place).decode().split("@")
                self.address = (host, int(port))
            self._store = find(*self.address, self.timeout)
        return self._store

    # Rank 0

    def begin(self, call: str, version: str) -> None:
        """Opens a round for one call, without waiting for any rank."""
        while len(self._keys) >= self._kept:
            for key in self._keys.popleft():
                self.store.delete_key(key)
        self._keys.append([])
        self.round, self.turn = self.round + 1, 0
        self._set(f"round {self.round}", f"{call} {version}".encode())

    def ask(self, what: str, body: Any = None) -> list[bytes]:
        """Asks a question and returns the answers of ranks 1, 2, ... Raises the first fault,
        `SourceError` as soon as the process of a rank that is asked has ended, or `TransportError`
        for a rank that does not answer in time."""
        self.tell(what, body)
        return self.collect()

    def tell(self, what: str, body: Any = None) -> None:
        """Sends a question whose answers are collected later, if at all."""
        self.turn += 1
        self._set(self._key(), encode(Question(what, raw(body))))
        self.what = what

    def end(self, outcome: Any) -> None:
        """Closes the round. If ranks were asked, waits a while until they have heard, because the
        store ends with this process."""
        self.tell("end", outcome)
        if self.asks:
            with suppress(InstepError):
                self.collect(min(self.timeout, GOODBYE), self.watch.gone())

    def collect(self, seconds: float | None = None, without: Set[int] = frozenset()) -> list[bytes]:
        waiting = {rank: f"{self._key()}/{rank}" for rank in range(1, self.size) if rank not in without}
        self._keys[-1] += waiting.values()
        found: dict[int, bytes] = {}
        patience = Patience(self.timeout if seconds is None else seconds)
        while waiting:
            for rank, key in [item for item in waiting.items() if self._has(self.store, item[1])]:
                answer = decode(self.store.get(key), Answer)
                if answer.fault is not None:
                    raise error_of(answer.fault, f"trainer rank {rank}: ")
                found[rank] = bytes(answer.body)
                del waiting[rank]
            self.miss(waiting)
            if waiting and not patience.wait():
                raise TransportError(
                    f"trainer rank {min(waiting)} of {self.size} did not answer {self.what!r} within {self.timeout:g} s",
                    next_step="every rank of the trainer must make the call that rank 0 makes; engines keep what they serve",
                )
        return [found[rank] for rank in sorted(found)]

    def miss(self, ranks: Collection[int], seconds: float = 0.0) -> None:
        """Raises `SourceError` if the process of one of `ranks` has ended or ends within `seconds`.
        Processes that cannot be seen from here count as alive."""
        if gone := self.watch.gone(seconds) & set(ranks):
            raise SourceError(
                f"trainer rank {min(gone)} of {self.size} is gone: its process has ended",
                next_step="engines keep what they serve; start the trainer again, all of its ranks",
            )

    # The other ranks

    def join(self, call: str, version: str) -> None:
        """Finds the round for this call, after the last one that this rank took part in. A call of
        rank 0's that this rank missed is skipped; if rank 0 still waits for an answer to it, it
        gets an error.

        version: empty where rank 0 alone knows it. Raises `TransportError` where rank 0 does not
        make this call in time.
        """
        instead = ""
        while True:
            following = f"round {self.round + 1}"
            self._wait(self.store, following, self.timeout, f"rank 0 of the trainer did not {call} {version}{instead}")
            calls = self.store.get(following).decode()
            self.round, self.turn = self.round + 1, 0
            if calls.startswith(f"{call} {version}"):
                return
            instead = f", it made the call {calls}"
            if self.asks:
                self.turn = 1
                self.answer(fault=VersionConflict(f"it makes the call {call} {version}, rank 0 {calls}: all ranks make the same calls"))

    def next(self) -> Question:
        self.turn += 1
        self._wait(self.store, self._key(), PATIENCE * self.timeout, "rank 0 of the trainer stopped asking")
        return decode(self.store.get(self._key()), Question)

    def answer(self, body: Any = None, fault: Exception | None = None) -> None:
        told = encode(Answer(None if fault is None else fault_of(fault, otherwise="SourceError"), raw(body)))
        try:
            self.store.set(f"{self._key()}/{self.rank}", told)
        except Exception as error:
            raise _gone(error) from error

    def close(self) -> None:
        self._served = self._store = None
        self.watch.close()

    def _key(self) -> str:
        return f"{self.round}/{self.turn}"

    def _set(self, key: str, value: bytes) -> None:
        self._keys[-1].append(key)
        self.store.set(key, value)

    def _has(self, store: Any, key: str) -> bool:
        try:
            there: bool = store.check([key])
        except Exception as error:
            raise _gone(error) from error
        return there

    def _wait(self, store: Any, key: str, seconds: float, otherwise: str) -> None:
        patience = Patience(seconds)
        while not self._has(store, key):
            if not patience.wait():
                raise TransportError(f"{otherwise} within {seconds:g} s", next_step="look at rank 0's own error")


class Patience:
    """Polls often at first, because most answers come soon. (A store's own `wait` writes warnings
    when it ends without a result.)"""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.pause = 0.0001

    def wait(self) -> bool:
        """Sleeps a little. Returns False when time is up."""
        time.sleep(self.pause)
        self.pause = min(1.1 * self.pause, 0.003)
        return time.monotonic() < self.end


def _gone(error: Exception) -> TransportError:
    return TransportError(f"rank 0 of the trainer is gone: {(str(error).splitlines() or [''])[0]}")


def default_store() -> Any:
    """Returns the store through which torch's default group was made."""
    return torch.distributed.distributed_c10d._get_default_store()


def own_address() -> str:
    """Returns this process's address on the interface through which the ranks have found each
    other."""
    store = default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return address_towards(getattr(store, "host", "127.0.0.1"))  # a FileStore has no host
