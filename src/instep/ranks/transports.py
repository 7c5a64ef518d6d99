"""The transports of a trainer with several ranks. They differ from those of one process in how a
version is gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from instep.errors import InstepError
from instep.plan.buckets import ALIGN, buckets
from instep.protocol import Identity, TensorMeta, decode
from instep.ranks.gather import ByteRange
from instep.ranks.ipc import SharedIpc
from instep.ranks.lead import RankedSource
from instep.ranks.segment import Sums, Write, add_up, sum_up
from instep.transport import Placed, Transport
from instep.transport.auto import AutoTransport
from instep.transport.broadcast.publish import BroadcastTransport
from instep.transport.bucket_digests import Result, Tally, Values
from instep.transport.http.publish import HttpTransport
from instep.transport.shm.publish import ShmTransport
from instep.transport.shm.segment import Segment


class SharedShm(ShmTransport):
    """Shared memory: every rank writes its own elements into the segment, and nothing is
    gathered."""

    packed = False

    def __init__(self, source: RankedSource) -> None:
        super().__init__()
        self.source = source

    def why_not(self, device: torch.device, workers: Sequence[Identity]) -> str | None:
        return super().why_not(device, workers) or self.source.elsewhere

    def _brought(self, segment: Segment, tensors: list[TensorMeta], _: Values) -> Result:
        source, channel = self.source, self.source.channel
        run = source.run(tensors)
        view = segment.view[: run.size]
        room = torch.from_numpy(view)
        channel.tell("write", Write(segment.name, tensors))
        source.standing.note(source.runs[True].given[0])
        run.clear_gaps(room, 0, run.size)
        run.put(0, source.module.memory, room, 0, run.size)
        channel.collect()
        source.fill_made(run, room, 0, run.size)
        channel.tell("sum")
        run.compare(0, source.module.memory, room)
        source.standing.check()
        own = sum_up(view, run, 0, channel.size)
        return add_up(run, [own, *(decode(answer, Sums) for answer in channel.collect())])

    def _take_back(self, segment: Segment) -> None:
        """Closes the segment instead of keeping it, because a late rank may still write to it."""
        segment.close()


class Gathering(BroadcastTransport):
    """Broadcast: each bucket is gathered in rank 0 before it is sent, and while it travels the next
    one is gathered. A bucket is smaller than that of a trainer in one process, so that all that
    rank 0 holds, with a slice that arrives from another rank, is less than two buckets of that
    size. A slice is so large that two ranks, which give about half each, need no more than one for
    a bucket.

    whole: whether all buckets are gathered before the first is sent, which takes the memory of the
    model.
    """

    def __init__(self, backend: str, timeout: float, source: RankedSource, *, whole: bool) -> None:
        super().__init__(backend, timeout)
        self.source, self.whole = source, whole
        self.step = max(ALIGN, 3 * (self.settings.bucket // ALIGN) // 8 * ALIGN)
        self.settings = replace(self.settings, bucket=self.settings.bucket - self.step)

    def _read(self, tensors: list[TensorMeta], values: Placed) -> None:  # noqa: ARG002
        self.source.note()

    def _read_again(self, tensors: list[TensorMeta], values: Placed, tally: Tally) -> InstepError | None:  # noqa: ARG002
        try:
            self.source.check()
        except InstepError as error:
            return error
        return None

    def _packed(self, tensors: list[TensorMeta], _: Placed, room: Callable[[int, int], torch.Tensor]) -> Iterator[torch.Tensor]:
        run = self.source.run(tensors)
        self.source.channel.ask("send", tensors)
        stretches = [ByteRange(False, low, high, self.step) for low, high in buckets(run.size, self.settings.bucket)]
        rooms = (room(index, stretch.high - stretch.low) for index, stretch in enumerate(stretches))
        if not self.whole:
            yield from self.source.fill(run, self.device, stretches, rooms)
            return
        model = torch.empty(run.size, dtype=torch.uint8, device=self.device)
        everything = [model[stretch.low : stretch.high] for stretch in stretches]
        for _filled in self.source.fill(run, self.device, stretches, iter(everything)):
            pass
        yield from (bucket.copy_(filled) for bucket, filled in zip(rooms, everything, strict=True))

    def _end_group(self, reason: str) -> None:
        """Ends the gathering too: rank 0 may be waiting for the trainer's ranks and not for the
        engines."""
        super()._end_group(reason)
        self.source.meeting.end(reason)


class RankedTransport(AutoTransport):
    """Chooses a transport for a trainer of several ranks."""

    def __init__(self, only: str, timeout: float, source: RankedSource, *, whole: bool) -> None:
        every: dict[str, Transport] = {
            "ipc": SharedIpc(source),
            "nccl": Gathering("nccl", timeout, source, whole=whole),
            "shm": SharedShm(source),
            "gloo": Gathering("gloo", timeout, source, whole=whole),
            "http": HttpTransport(),  # gathers tensor by tensor, into memory of rank 0's
        }
        super().__init__(only, timeout, every)
