"""How sender and receivers of the drop-in for TorchRL find each other: at once, again, and by every way there is."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.dropin_pairs import LATER, METADATA, NEW, OLD, holds, joined, pair, start
from helpers.toys import bare

from instep import MemoryEngine
from instep.dropin.torchrl import VLLMWeightReceiver, VLLMWeightSender, VLLMWeightSyncScheme
from instep.engine.remote.rpc import Answer, Endpoint, LocalRpc, RemoteEngine
from instep.errors import ConfigError, EngineLost, PlanError, SyncError, TransportError

pytestmark = [pytest.mark.usefixtures("segments"), pytest.mark.filterwarnings("ignore:state_dict strategy is experimental")]

POOL = ThreadPoolExecutor(4)


def test_both_sides_learn_that_they_were_told_of_different_models() -> None:
    scheme = VLLMWeightSyncScheme(timeout=20)
    sender, receiver = scheme.create_sender(), scheme.create_receiver(MemoryEngine(OLD))
    other = METADATA | {"model.norm.weight": (torch.float32, torch.Size([8]))}
    for error in start(sender, [receiver], METADATA, other):
        assert isinstance(error, PlanError)
        assert "model.norm.weight is bfloat16 [8] at the trainer, float32 [8] here" in str(error)
    assert not sender.joined
    assert start(sender, [receiver], METADATA) == [None, None]
    sender.shutdown()
    receiver.shutdown()


def test_each_side_waits_no_longer_than_its_timeout() -> None:
    started = time.monotonic()
    with pytest.raises(TransportError, match="0 of 2 engines dialled"):
        VLLMWeightSyncScheme(timeout=0.2, num_replicas=2).create_sender().init_all_workers_group(METADATA)
    with pytest.raises(TransportError, match=r"no trainer came within 0\.2 s; localhost port \d+: ConnectionRefused"):
        VLLMWeightSyncScheme(timeout=0.2).create_receiver(MemoryEngine(OLD)).init_all_workers_group(METADATA)
    uninitialised = VLLMWeightSyncScheme().create_receiver(MemoryEngine(OLD))
    with pytest.raises(TransportError, match=r"was not initialised within 0\.2 s"):
        VLLMWeightSyncScheme(timeout=0.2).create_sender().init_all_workers_group(METADATA, uninitialised)
    assert time.monotonic() - started < 20


def test_schemes_that_do_not_share_a_token_do_not_meet() -> None:
    one = VLLMWeightSyncScheme(timeout=4, token="one")
    two = VLLMWeightSyncScheme(timeout=1, master_port=one.master_port, token="two")
    first, second = start(one.create_sender(), [two.create_receiver(MemoryEngine(OLD))], METADATA)
    for error in (first, second):
        assert isinstance(error, TransportError)
        assert "token was refused" in str(error)
        assert "one address, port and token" in str(error) or "this address, port and token" in str(error)
        assert "IncompleteReadError" not in str(error)


def test_schemes_share_a_token_by_argument_by_the_environment_or_by_their_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert VLLMWeightSyncScheme(token="t").token == "t"
    scheme = VLLMWeightSyncScheme()
    assert scheme.sender is scheme.sender
    sent = pickle.loads(pickle.dumps(scheme))
    assert (sent.token, sent.master_port, sent._sender) == (scheme.token, scheme.master_port, None)
    assert scheme.token == VLLMWeightSyncScheme().token
    (folder,) = tmp_path.iterdir()
    assert [oct(each.stat().st_mode)[-3:] for each in (folder, *folder.iterdir())] == ["700", "600"]
    folder.chmod(0o755)  # others could have read it, or put it there
    assert len({scheme.token, VLLMWeightSyncScheme().token, VLLMWeightSyncScheme().token}) == 3
    monkeypatch.setenv("INSTEP_TOKEN", "from-the-environment")
    assert VLLMWeightSyncScheme().token == "from-the-environment"


def test_the_receivers_process_dies_and_another_takes_its_place() -> None:
    engine = MemoryEngine(OLD)
    with pair(NEW, [engine]) as (sender, (receiver,)):
        receiver.shutdown()
        with pytest.raises(SyncError, match="closed the connection"):
            sender.update_weights()
        fresh = MemoryEngine(OLD)
        successor = receiver._scheme.create_receiver(fresh)
        assert start(sender, [successor], METADATA) == [None, None]
        sender.update_weights()
        assert holds(fresh) == "new"
        successor.shutdown()


def test_a_trainer_that_starts_again_finds_its_receivers() -> None:
    engine = MemoryEngine(OLD)
    with pair(NEW, [engine]) as (sender, (receiver,)):
        sender.update_weights()
        assert receiver.poll_and_apply()
        assert start(sender, [receiver], METADATA) == [None, None]
        assert not receiver.poll_and_apply(0.01)
        sender.shutdown()
        again = receiver._scheme.create_sender()
        again.register_model(LATER)
        again.init_all_workers_group(METADATA)
        again.update_weights()
        assert holds(engine) == "later"
        again.shutdown()


class TestFirstGeneration:
    """`register_model`, `register_worker_transport`, `set_context` and `register_worker`, with what they say."""

    def test_an_engine_is_found_by_its_path_from_the_context(self) -> None:
        class Context:
            policy = SimpleNamespace(model=MemoryEngine(OLD))

        context = Context()
        scheme = VLLMWeightSyncScheme(timeout=20)
        receiver, sender = VLLMWeightReceiver(scheme), VLLMWeightSender(scheme)
        sender.register_model(NEW)
        receiver.set_context(context)
        receiver.register_model("policy.model")
        assert start(sender, [receiver], METADATA) == [None, None]
        sender.update_weights()
        assert holds(context.policy.model) == "new"
        sender.shutdown()
        receiver.shutdown()

    @pytest.mark.parametrize("path", ["policy", "policies[0]", "models['actor']", 'models["actor"].model'])
    def test_a_path_leads_to_a_policy_or_to_its_engine(self, path: str) -> None:
        policy = bare()
        policy.model = engine = MemoryEngine(OLD)
        context = SimpleNamespace(policy=policy, policies=[policy], models={"actor": policy})
        receiver = VLLMWeightSyncScheme(timeout=20).create_receiver()
        receiver.register_model(path)
        receiver.set_context(context)
        receiver.apply_weights(NEW)
        assert holds(engine) == "new"

    @pytest.mark.parametrize(
        ("path", "words"),
        [("polisy", "Context has no polisy"), ("policies[3]", r"Context.policies has no \[3\]"), ("policies.model", "has no model")],
    )
    def test_a_path_that_leads_nowhere_says_how_far_it_leads(self, path: str, words: str) -> None:
        class Context:
            policies = ()

        receiver, context = VLLMWeightSyncScheme().create_receiver(path), Context()
        receiver.set_context(context)
        with pytest.raises(ConfigError, match=words):
            receiver.init_all_workers_group(METADATA)

    @pytest.mark.parametrize("registered", ["both", "receiver"])
    def test_a_pipe_is_a_way_to_the_trainer_and_tcp_another(self, registered: str) -> None:
        """The page registers a pipe with the worker, and its trainer comes over the collective."""
        ours, theirs = multiprocessing.Pipe()
        engine, scheme = MemoryEngine(OLD), VLLMWeightSyncScheme(timeout=20)
        sender, receiver = scheme.create_sender(), scheme.create_receiver()
        sender.register_model(NEW)
        receiver.register_model(engine)
        receiver.register_worker_transport(theirs)
        if registered == "both":
            sender.register_worker(worker_idx=0, pipe_or_context=ours)
        for _ in range(2):  # a trainer that joins again
            assert start(sender, [receiver], METADATA) == [None, None]
            assert (sender.update_weights().engines[0].engine == "pipe") == (registered == "both")
            assert holds(engine) == "new"
            assert receiver.poll_and_apply()
        receiver.shutdown()
        sender.shutdown()

    def test_a_pipe_may_be_registered_again_by_whoever_comes_next(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        scheme, engine = VLLMWeightSyncScheme(timeout=20), MemoryEngine(OLD)
        receiver = scheme.create_receiver(engine)
        for weights, name in ((NEW, "new"), (LATER, "later"), (NEW, "new")):
            receiver.register_worker_transport(theirs)
            sender = scheme.create_sender()
            sender.register_worker(0, ours)
            sender.register_worker(0, ours)
            sender.register_model(weights)
            assert start(sender, [receiver], METADATA) == [None, None]
            sender.update_weights()
            assert holds(engine) == name
        receiver.shutdown()

    def test_the_other_end_of_a_pipe_is_closed(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        sender = VLLMWeightSyncScheme(timeout=20).create_sender()
        sender.register_worker(0, ours)
        theirs.close()
        with pytest.raises(EngineLost, match="closed its end of the pipe"):
            sender.init_all_workers_group(METADATA)

    def test_a_pipe_that_carries_something_else_is_told(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        receiver = VLLMWeightSyncScheme(timeout=1).create_receiver(MemoryEngine(OLD))
        receiver.register_worker_transport(theirs)
        ours.send(("update_weights", None))
        with pytest.raises(TransportError, match="must carry nothing else"):
            receiver.init_all_workers_group(METADATA)

    def test_what_is_no_way_is_refused_when_it_is_registered(self) -> None:
        scheme = VLLMWeightSyncScheme()
        ours, _ = multiprocessing.Pipe(duplex=False)
        closed, _ = multiprocessing.Pipe()
        closed.close()
        refused: list[tuple[Any, str]] = [(7, "int"), (ours, "both read and write"), (closed, "both read and write")]
        for pipe, words in refused:
            with pytest.raises(ConfigError, match=words):
                scheme.create_receiver().register_worker_transport(pipe)
            with pytest.raises(ConfigError, match=words):
                scheme.create_sender().register_worker(0, pipe)

    def test_a_path_without_a_context_is_refused(self) -> None:
        receiver = VLLMWeightSyncScheme().create_receiver("policy.model")
        with pytest.raises(ConfigError, match="set_context"):
            receiver.init_all_workers_group(METADATA)
        receiver.set_context(set())
        with pytest.raises(ConfigError, match="or none any more"):
            receiver.init_all_workers_group(METADATA)

    def test_a_transport_that_was_registered_is_used_instead_of_tcp(self) -> None:
        class Door:
            problem = None
            answer: Answer | None = None
            closed = False

            def serve(self, answer: Answer) -> None:
                self.answer = answer

            def close(self) -> None:
                self.closed = True

        class ToDoor(LocalRpc):
            def __init__(self, door: Door) -> None:
                self.door, self.name = door, "worker-0"

            async def call(self, method: str, payload: bytes) -> bytes:
                while self.door.answer is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                return await self.door.answer(method, payload)

        door, engine = Door(), MemoryEngine(OLD)
        scheme = VLLMWeightSyncScheme(timeout=20)
        sender, receiver = scheme.create_sender(), scheme.create_receiver()
        sender.register_model(NEW)
        sender.register_worker(0, ToDoor(door))
        receiver.register_model(engine)
        receiver.register_worker_transport(door)
        assert start(sender, [receiver], METADATA) == [None, None]
        assert sender.update_weights().engines[0].engine == "worker-0"
        assert holds(engine) == "new"
        assert not door.closed
        receiver.shutdown()
        assert door.closed


def test_engines_are_reached_in_every_form() -> None:
    """An engine, an `Engine` of somewhere else, a receiver of this process, Ray's actors by their handles."""
    scheme = VLLMWeightSyncScheme(timeout=20)

    class Handle:
        """As Ray's: every method has `remote`, whose result has `future`."""

        def __init__(self, receiver: VLLMWeightReceiver) -> None:
            self._actor_id = SimpleNamespace(hex=lambda: "ab" * 16)
            self.answer = SimpleNamespace(remote=lambda *args: SimpleNamespace(future=lambda: POOL.submit(receiver.answer, *args)))

    for form in ("receiver", "handle", "actors"):
        engine = MemoryEngine(OLD)
        sender, receiver = scheme.create_sender(), scheme.create_receiver(engine)
        sender.register_model(NEW)
        given = {"receiver": receiver, "handle": Handle(receiver), "actors": SimpleNamespace(actors=[Handle(receiver)])}[form]
        assert start(sender, [receiver], METADATA, vllm_engine=given) == [None, None]
        sender.update_weights()
        assert holds(engine) == "new"
        receiver.shutdown()
    engine = MemoryEngine(OLD)
    joined(RemoteEngine(LocalRpc(Endpoint(engine).answer))).update_weights()
    assert holds(engine) == "new"
