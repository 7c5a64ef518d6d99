"""Broadcast over a private group, for engines on other hosts: the trainer is rank 0, the workers of
all engines follow in their order.

The version is one run of bytes (`plan.buckets.layout`), sent in buckets. While one bucket travels
the next is packed, and the one before is summed up. No process holds more than two buckets, unless
it stages the version.

Gloo sends in `prepare`, into each worker's own memory, while engines go on generating. If a peer
dies, every engine keeps what it served. NCCL sends in `commit`, between two engine steps, straight
into live parameters. A GPU has no room for a second model, and the collectives must not run beside
the engine's own. The sums of all tensors follow the last bucket.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from instep.digest_cuda import warm_up
from instep.errors import ApplyError, DigestMismatch, InstepError, SourceError, TransportError
from instep.plan.packed import packed
from instep.protocol import Identity, Location, TensorMeta
from instep.transport import Placed, Published, Sending, elsewhere, uuid_of
from instep.transport.again import check
from instep.transport.bucket_digests import DeviceTally, First, HostTally, Result, Tally, Values, pack, sums_of
from instep.transport.group import Group
from instep.transport.store import give_up, own_address, serve

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a backend sends. bucket: bytes; the fastest size measured. step: the step of a push in
    which the bytes travel."""

    bucket: int
    step: str
    on_gpu: bool


SETTINGS = {"gloo": Settings(32 << 20, "prepare", on_gpu=False), "nccl": Settings(128 << 20, "commit", on_gpu=True)}


class BroadcastTransport:
    """The trainer's side. It makes a new group when a worker comes, goes or restarts, and after a
    failure."""

    def __init__(self, backend: str, timeout: float) -> None:
        self.backend, self.timeout, self.settings = backend, timeout, SETTINGS[backend]
        self.digests_apart = self.settings.step == "commit"
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"instep-{backend}")
        self.store: Any = None
        self.group: Group | None = None
        self.key = self.sending = ""
        self.ranks: dict[str, int] = {}
        self.wanted: dict[str, int] = {}
        self.device = torch.device("cpu")
        self.local = True
        self.rooms: list[torch.Tensor] = []
        self.tally: DeviceTally | None = None
        self.first: First | None = None
        self.waiting: tuple[list[TensorMeta], Placed] | None = None
        self.sent: Future[Result] = Future()
        self.running: Future[Any] | None = None
        self.under_way = 0  # how many engines' steps

    def prefetch(self) -> None: ...

    def why_not(self, device: torch.device, workers: Sequence[Identity]) -> str | None:
        self.wanted = {worker.incarnation: 1 + index for index, worker in enumerate(workers)}
        self.local = elsewhere(workers) is None
        if not self.settings.on_gpu:
            return None
        self.device = device
        gpus = [uuid_of(device), *(worker.gpu for worker in workers)]
        if None in gpus:
            return "the trainer or an engine is not on a GPU"
        return "two of trainer and workers share a GPU" if len(set(gpus)) < len(gpus) else None

    def publish(self, tensors: list[TensorMeta], values: Values) -> Published:
        """Opens a version to workers. Nothing is copied yet: the trainer must not change its
        weights before the push is over."""
        host = "127.0.0.1" if self.local else own_address()
        if self.store is None or self.store.host != host:
            self.store = serve(host)
        if self.group is None or self.group.broken or self.ranks != self.wanted:
            self._leave()
            self.key, self.ranks = uuid.uuid4().hex, self.wanted
        if self.device.type == "cuda":  # the trainer may compute on any stream
            self._in_time(torch.cuda.synchronize, self.device)
        self.waiting, self.sent = (tensors, Placed.of(values)), Future()
        self._read(*self.waiting)
        size = packed(tensors, small=False).size
        address = f"{self.key}@{host}@{self.store.port}"
        self.sending = uuid.uuid4().hex
        location = Location(self.backend, address, size, bucket=self.settings.bucket, ranks=self.ranks, sending=self.sending, live=True)
        return Published(location, {})

    def _in_time(self, action: Callable[..., object], *arguments: Any) -> None:
        """Runs an action in the sending thread. Raises `TransportError` where the trainer's GPU has
        not finished in time."""
        try:
            self.thread.submit(action, *arguments).result(self.timeout)
        except TimeoutError:
            raise TransportError(f"the trainer's {self.device} was still busy after {self.timeout:g} s") from None

    @asynccontextmanager
    async def serving(self, step: str) -> AsyncIterator[Sending]:
        """Runs the trainer's part of a step in a thread while workers take theirs."""
        self.running = self.thread.submit(self._take_part, step)
        try:
            yield self
        except BaseException:
            self._give_up("the push was cancelled")
            raise
        finally:
            await asyncio.wait([asyncio.wrap_future(self.running)])
        if step == "prepare" and isinstance(failure := self.running.result(), SourceError):
            raise failure  # a commit's error comes from the engines, which say what they serve now

    async def abort_on_failure(self, step: Awaitable[T]) -> T:
        self.under_way += 1
        try:
            return await step
        except InstepError as error:
            if isinstance(error, ApplyError) and self.under_way > 1 and self.running is not None:
                # A worker whose loader failed receives the rest too: slower ones need it.
                await asyncio.wait([asyncio.wrap_future(self.running)], timeout=self.timeout / 2)
            self._give_up(str(error.args[0]))
            raise
        finally:
            self.under_way -= 1

    @property
    def digests_before_commit(self) -> bool:
        return not self.digests_apart or self.first is not None

    def finish(self, published: Published) -> Published:
        try:
            if self.first is not None and self.waiting is not None:  # nothing is sent yet
                digests, flagged = self.thread.submit(self.first.result).result(self.timeout)
            else:
                digests, flagged = self.sent.result(timeout=self.timeout)
        except TimeoutError:
            raise TransportError(f"the trainer did not send everything within {self.timeout:g} s") from None
        return Published(published.location, digests, flagged)

    def release_all_but(self, held: Set[str]) -> None:
        """Does nothing: the memory is the trainer's own."""

    def close(self) -> None:
        self._leave()
        self.thread.shutdown(wait=False)
        self.store, self.waiting, self.tally, self.first = None, None, None, None
        self.rooms.clear()

    def _leave(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = None

    def _give_up(self, reason: str) -> None:
        """Ends the group unless it has sent everything. A group that was ended cannot be used
        again."""
        if self.running is not None and not self.running.done():
            self._end_group(reason)

    def _end_group(self, reason: str) -> None:
        if self.group is not None:
            self.group.give_up(reason)
        else:
            give_up(self.store, self.key, reason)

    def _take_part(self, step: str) -> InstepError | None:
        try:
            with torch.no_grad(), self._on_device():
                if self.group is None:
                    warm_up(self.device)
                    self.group = Group(self.backend, self.store, self.key, 0, 1 + len(self.ranks), self.device, self.timeout)
                if step == self.settings.step:
                    sent = self._send(self.group)
                    if isinstance(sent, InstepError):  # the group can be used again
                        self.sent.set_exception(sent)
                        return sent
                    self.sent.set_result(sent)
                elif self.waiting is not None:
                    self._tally(self.waiting[0])  # while engines still generate
        except Exception as error:
            self._end_group(str(error.args[0]) if error.args else repr(error))
            self._leave()  # what is still on its way would keep the trainer's GPU waiting
            failure = error if isinstance(error, InstepError) else TransportError(f"the trainer cannot send: {error!r}")
            if not self.sent.done():
                self.sent.set_exception(failure)
            return failure
        return None

    def _read(self, tensors: list[TensorMeta], values: Placed) -> None:
        """Takes the first read of the source on a GPU, where sending is the second one. It runs in
        the sending thread so that the GPU's work keeps this order."""
        if self.settings.on_gpu:
            if self.first is None or self.first.tensors != tensors:
                self.first = First(tensors, self.device)
            self._in_time(self.first.take, values)

    def _read_again(self, tensors: list[TensorMeta], values: Placed, tally: Tally) -> InstepError | None:
        """Takes the second read of the source, where sending was the first one. Returns the error
        if they differ."""
        if self.first is None:
            try:
                check(tensors, values, tally.result()[0])
            except InstepError as error:
                return error
        return None

    def _send(self, group: Group) -> Result | InstepError:
        """Sends the version. Returns its digests, or an error if the source changed meanwhile: then
        workers are told sums that match nothing."""
        assert self.waiting is not None
        (tensors, values), self.waiting = self.waiting, None
        group.begin(self.timeout)
        group.meet(self.sending)
        tally = self._tally(tensors)
        promised = self._promised(tensors, values)
        under_way: deque[Any] = deque()

        def room(index: int, size: int) -> torch.Tensor:
            if len(under_way) == 2:
                group.wait(under_way.popleft())
            return self._room(index, size)

        for index, bucket in enumerate(self._packed(tensors, values, room)):
            under_way.append(group.broadcast(bucket))
            tally.add(index, bucket)
        changed = self._read_again(tensors, values, tally)
        if (sums := tally.told()) is not None:
            told = (sums if promised is None else promised) + (changed is not None)
            under_way.append(group.broadcast(told))
        while under_way:
            group.wait(under_way.popleft())
        group.settle()
        if changed is None and sums is not None and promised is not None:
            changed = self._different(sums, promised)
        return changed or tally.result()

    def _promised(self, tensors: list[TensorMeta], values: Placed) -> torch.Tensor | None:
        """Returns the sums that the sent bytes must have, if they are known before sending."""
        if self.digests_apart and values.digests is not None:
            return sums_of(values.digests, tensors, self.device)
        return self.first.told() if self.first is not None else None

    def _different(self, sent: torch.Tensor, promised: torch.Tensor) -> InstepError | None:
        assert self.tally is not None
        slot = next(iter((sent != promised).nonzero().flatten().tolist()), None)
        return None if slot is None else DigestMismatch.changed(self.tally.own[slot].name)

    def _packed(self, tensors: list[TensorMeta], values: Placed, room: Callable[[int, int], torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yields each bucket when it is filled."""
        return self.tally.pack(values, room) if self.tally else pack(tensors, values, self.settings.bucket, room)

    def _tally(self, tensors: list[TensorMeta]) -> Tally:
        if not self.settings.on_gpu:
            return HostTally(tensors, self.settings.bucket, flags=True)
        if self.tally is None or self.tally.tensors != tensors:
            self.tally = DeviceTally(tensors, self.settings.bucket, [self._room(index, self.settings.bucket) for index in range(2)])
        self.tally.begin()
        return self.tally

    def _on_device(self) -> Any:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _room(self, index: int, size: int) -> torch.Tensor:
        if len(self.rooms) <= index % 2:
            self.rooms.append(torch.empty(self.settings.bucket, dtype=torch.uint8, device=self.device))
        return self.rooms[index % 2][:size]
