"""The ranks beside rank 0: they answer until they are told how the call has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
import torch

from instep.digest import Bytes
from instep.errors import EngineState, InstepError, SyncError
from instep.faults import error_of, fault_of
from instep.plan.shards import Piece
from instep.protocol import Fault, TensorMeta, decode
from instep.ranks.channel import Channel
from instep.ranks.gather import ByteRange, Join, Meeting, give
from instep.ranks.ipc import Expose, PartSums, Shared, Sharing
from instep.ranks.liveness import Liveness, liveness
from instep.ranks.run import Run
from instep.ranks.segment import Sums, Window, Write, sum_up
from instep.ranks.standing import Standing
from instep.receipt import Receipt
from instep.source import unchanged
from instep.source.sharded import Description, ShardedModule, Told
from instep.transport import at_rest


class Outcome(msgspec.Struct, frozen=True):
    """How a call has ended on rank 0: a receipt, or an error with what each engine serves."""

    receipt: Receipt | None = None
    fault: Fault | None = None
    engines: list[EngineState] = []


def outcome_of(error: BaseException) -> Outcome:
    if isinstance(error, InstepError):
        return Outcome(fault=fault_of(error, otherwise=""), engines=list(error.engines) if isinstance(error, SyncError) else [])
    return Outcome(fault=Fault("SyncError", f"rank 0 of the trainer ended the call: {type(error).__name__}: {error}"))


def result(outcome: Outcome, version: str) -> Receipt:
    """Returns what rank 0 returned, or raises what it raised."""
    if outcome.receipt is not None:
        return outcome.receipt
    assert outcome.fault is not None
    error = error_of(outcome.fault)
    if isinstance(error, SyncError):
        error.version, error.engines = version, tuple(outcome.engines)
    raise error


class Follower:
    """The role of a rank other than 0 in one `WeightSync`. module: None where every rank has all of
    the model. Then rank 0 reads its own copy alone and asks nothing."""

    def __init__(self, channel: Channel, module: ShardedModule | None) -> None:
        self.channel = channel
        if module is not None:
            self.module = module
            self.standing = Standing(module)
        self.meeting, self.window, self.sharing = Meeting(channel), Window(), Sharing()
        self.shared: Description | None = None
        self.given: tuple[list[Piece], list[Piece]] = ([], [])
        self.runs: dict[bool, Run] = {}
        self.written: tuple[Run, Bytes] | None = None

    def follow(self, call: str, version: str) -> Receipt:
        """Takes part in one call of rank 0's. Returns its receipt or raises its error; raises
        `TransportError` where rank 0 is gone."""
        self.channel.join(call, version)
        while True:
            question = self.channel.next()
            if question.what == "end":
                self.channel.answer()
                return result(decode(question.body, Outcome), version)
            try:
                answer = self.answers[question.what](self, question.body)
            except Exception as error:
                self.channel.answer(fault=error)
            else:
                self.channel.answer(answer)

    def begin(self, _: msgspec.Raw) -> Liveness:
        return liveness()

    def describe(self, _: msgspec.Raw) -> Told:
        found = self.module.describe()
        at_rest(self.module.device)  # before anything is read
        return Told(None if found is self.shared else found)

    def share(self, body: msgspec.Raw) -> None:
        """Notes which of the tensors that this rank holds it has to give."""
        tensors, parts = map(set, decode(body, list[tuple[list[str], list[str]]])[self.channel.rank])
        self.shared = described = self.module.describe()
        self.given = (
            [piece for piece in described.pieces if piece.tensor in tensors],
            [piece for piece in described.part_pieces if piece.tensor in parts],
        )
        self.runs = {True: self._run(described.parts, self.given[1])}

    def send(self, body: msgspec.Raw) -> None:
        """Notes the dtypes in which stretches will be asked for."""
        self.runs[False] = self._run(decode(body, list[TensorMeta]), self.given[0])

    def note(self, _: msgspec.Raw) -> None:
        self.standing.note([*self.given[0], *self.given[1]])

    def check(self, _: msgspec.Raw) -> None:
        self.standing.check()

    def write(self, body: msgspec.Raw) -> None:
        wanted = decode(body, Write)
        run = self._run(wanted.tensors, self.given[0])
        view = self.window.open(wanted.segment, run.size)
        self.standing.note(self.given[1])
        with unchanged(self.module):
            run.put(self.channel.rank, self.module.memory, torch.from_numpy(view), 0, run.size)
        self.written = (run, view)

    def sum_up(self, _: msgspec.Raw) -> Sums:
        assert self.written is not None
        (run, view), self.written = self.written, None
        run.compare(self.channel.rank, self.module.memory, torch.from_numpy(view))
        self.standing.check()
        return sum_up(view, run, self.channel.rank, self.channel.size)

    def expose(self, body: msgspec.Raw) -> Shared:
        return self.sharing.expose(self.given[0], decode(body, Expose), self.module.local, self.module.device)

    def sums(self, _: msgspec.Raw) -> PartSums:
        return self.sharing.sums()

    def join(self, body: msgspec.Raw) -> None:
        self.meeting.enter(decode(body, Join), self.module.device)

    def give(self, body: msgspec.Raw) -> None:
        with self.meeting.engaged():
            for stretch in decode(body, list[ByteRange]):
                give(self.meeting, self.runs[stretch.parts], self.module.memory, stretch)
            self.meeting.finish()

    def _run(self, tensors: Sequence[TensorMeta], given: list[Piece]) -> Run:
        return Run(tensors, {self.channel.rank: given})

    def close(self) -> None:
        self.window.close()
        self.sharing.close()
        self.meeting.close()
        self.channel.close()

    answers: ClassVar[dict[str, Callable[[Follower, msgspec.Raw], Any]]] = {
        "begin": begin, "describe": describe, "share": share, "send": send, "note": note, "check": check, "write": write, "sum": sum_up,
        "expose": expose, "sums": sums, "join": join, "give": give,
    }  # fmt: skip
