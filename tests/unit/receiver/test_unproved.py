"""Invariant 5, proof before label: what a worker cannot prove by itself it does not serve before its
trainer has proved it, whoever dies in between."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from helpers.call_by_call import Trainer, refused, serves, weights
from helpers.pretend_cuda import pretend
from helpers.toys import ToyHost, attention

from instep import MemoryEngine, WeightSync
from instep.engine.remote.http_control import Served
from instep.engine.remote.rpc import Endpoint, LocalRpc, RemoteEngine
from instep.errors import DigestMismatch, EngineDirty, SyncError
from instep.protocol import Request, encode
from instep.receiver import state
from instep.receiver.arrival import Pulled, Seen
from instep.receiver.kept import Kept
from instep.receiver.proof import Proof

pytestmark = pytest.mark.usefixtures("segments")
START, ONE, TWO = map(attention, range(3))


class Told(Seen):
    """Bytes that a worker can see, and leaves to its trainer to prove."""

    def prove(self, applier: Any) -> Proof:
        return replace(super().prove(applier), complete=False, wholes={"a.weight": 1}, theirs={"a.weight": 2})


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    def arrive(manifest: Any, reader: Any, launch: int = 0, wholes: Any = ()) -> Told:
        return Told({meta.name: reader.tensor(meta) for meta in manifest.tensors}, manifest.tensors)

    monkeypatch.setattr(state, "arrive", arrive)


@pytest.mark.usefixtures("told")
def test_a_worker_serves_what_it_cannot_prove_when_its_trainer_has(trainer: Trainer, host: ToyHost) -> None:
    reply = trainer.push("v1", 1.0)
    assert (reply.fault, reply.state, reply.version) == (None, "unproved", None)
    assert "v1" in (trainer.receiver.dirty() or "")
    assert trainer.receiver.history == {}
    for _ in range(2):  # it may be told twice
        reply = trainer.ask("accept", "v1")
        assert (reply.fault, reply.state, reply.version) == (None, "serving", "v1")
    assert (serves(host, 1.0), trainer.receiver.dirty()) == (True, None)


@pytest.mark.usefixtures("told")
def test_nobody_but_its_trainer_can_have_it_serve_them(trainer: Trainer) -> None:
    trainer.push("v1", 1.0)
    other = Trainer(trainer.receiver, trainer.transport, "other")
    for asks, version in ((other, "v1"), (trainer, "v2")):
        reply = asks.ask("accept", version)
        refused(reply, "VersionConflict", f"version '{version}' was not committed here")
        assert (reply.state, reply.version) == ("unproved", None)
    assert trainer.ask("abort").state == "unproved"
    assert trainer.prepare("v2", weights(2.0)).fault is None  # a push heals it
    trainer.commit("v2")
    assert trainer.ask("accept", "v2").version == "v2"


def test_a_commit_that_failed_is_not_accepted(trainer: Trainer, host: ToyHost) -> None:
    def half(*_: Any) -> None:
        raise RuntimeError("told to fail")

    trainer.push("v1", 1.0)
    trainer.receiver.kept = Kept()  # every layer takes the session
    trainer.trace()
    host.fill = half
    trainer.prepare("v2", weights(2.0))
    assert trainer.commit("v2").state == "dirty"
    for version in ("v1", "v2"):
        refused(trainer.ask("accept", version), "VersionConflict", "was not committed here")
    assert trainer.ask("status").state == "dirty"


class Dies(RemoteEngine):
    """Its trainer ends as soon as the workers have answered the commit."""

    gone = False

    async def ask(self, kind: Any, method: str, *args: Any) -> Any:
        if self.gone:
            raise SyncError("the trainer is gone")
        answer = await super().ask(kind, method, *args)
        self.gone = args[:1] == ("commit",)
        return answer


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its workers pull from the trainer's memory, and find other sums than the trainer has."""
    pretend(monkeypatch)
    prove = Pulled.prove

    def wrong(self: Pulled, applier: Any) -> Proof:
        proof = prove(self, applier)
        wholes = {name: total ^ 1 for name, total in proof.wholes.items()}
        return replace(proof, wholes=wholes, parts={name: dict.fromkeys(some, 1) for name, some in proof.parts.items()})

    monkeypatch.setattr(Pulled, "prove", wrong)
    return MemoryEngine(START, tp=request.param)


def test_an_engine_whose_trainer_dies_before_the_proof_does_not_go_on(engine: MemoryEngine) -> None:
    endpoint = Endpoint(engine, timeout=0.25)
    with WeightSync(ONE, [Dies(LocalRpc(endpoint.answer))], transport="ipc") as sync:
        with pytest.raises(SyncError):
            sync.push("v1")
        deadline = time.monotonic() + 20
        while endpoint.refusal is None:  # until the endpoint takes it back
            assert time.monotonic() < deadline
            time.sleep(0.005)
        with pytest.raises(EngineDirty, match="its trainer went away in the middle of a push"):
            engine.generate([1], 1)
    assert (endpoint.version, engine.version) == (None, None)
    assert {(one.state, one.version) for one in engine.receivers} == {("unproved", None)}


def test_a_server_says_that_it_is_dirty_meanwhile(engine: MemoryEngine) -> None:
    served = Served(engine, None)
    with (
        WeightSync(ONE, [Dies(LocalRpc(served.endpoint.answer))], transport="ipc") as sync,
        pytest.raises(SyncError),
    ):
        sync.push("v1")
    assert asyncio.run(served.status())["state"] == "dirty"


def test_sums_that_differ_change_neither_version_nor_label(engine: MemoryEngine) -> None:
    with WeightSync(ONE, [engine], transport="ipc") as sync:
        with pytest.raises(DigestMismatch, match="DIRTY"):
            sync.push("v1")
        assert {(one.state, one.version) for one in engine.receivers} == {("unproved", None)}
        status = asyncio.run(engine.call("status", encode(Request(0, ""))))
        assert all(b"v1" in reply for reply in status)  # its last error says of which version
        assert [state.serving for state in sync.status()] == ["dirty"]
