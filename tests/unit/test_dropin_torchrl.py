"""The drop-in for TorchRL's collective scheme, by TorchRL's own usage, against engines in memory."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dropin_pairs import pair, start
from toys import attention, checkpoint

from instep import MemoryEngine
from instep.dropin.torchrl import VLLMWeightReceiver, VLLMWeightSender, VLLMWeightSyncScheme, get_model_metadata
from instep.engine.rpc import Answer, Endpoint, LocalRpc, RemoteEngine
from instep.errors import ConfigError, EngineTimeout, InstepError, PlanError, SourceError, SyncError, TransportError

pytestmark = pytest.mark.usefixtures("segments")

OLD, NEW, LATER = map(attention, range(3))
METADATA = get_model_metadata(NEW)
POOL = ThreadPoolExecutor(4)


def holds(engine: MemoryEngine) -> str:
    names = {
        MemoryEngine(weights, tp=len(engine.hosts)).fingerprint(): name for name, weights in (("old", OLD), ("new", NEW), ("later", LATER))
    }
    return names.get(engine.fingerprint(), "mixed")


def joined(engine: Any, model: Any = NEW, **settings: Any) -> VLLMWeightSender:
    """A sender that was given the engine itself."""
    sender = VLLMWeightSyncScheme(timeout=settings.pop("timeout", 20.0), **settings).create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(get_model_metadata(model), vllm_engine=engine)
    return sender


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.parametrize("engines", [[1], [2, 1]], ids=["one", "two"])
def test_the_pages_own_sequence(strategy: str, engines: list[int]) -> None:
    """TorchRL's default strategy raises on this path after it has put the engines to sleep."""
    found = [MemoryEngine(OLD, tp=tp) for tp in engines]
    with pair(NEW, found, strategy=strategy) as (sender, receivers):
        assert [receiver.poll_and_apply(0.01) for receiver in receivers] == [False] * len(found)
        receipt = sender.update_weights()
        assert [holds(engine) for engine in found] == ["new"] * len(found)
        assert {engine.version for engine in found} == {receipt.version}
        assert [receiver.poll_and_apply() for receiver in receivers] == [True] * len(found)
        assert [receiver.poll_and_apply(0.01) for receiver in receivers] == [False] * len(found)
        sender.update_weights(LATER)
        assert [holds(engine) for engine in found] == ["later"] * len(found)
        sender.update_weights()
        assert [holds(engine) for engine in found] == ["new"] * len(found)


def test_a_module_is_sent_under_the_names_it_is_saved_under() -> None:
    model = torch.nn.Module()
    model.norm = torch.nn.LayerNorm(4)
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    engine = MemoryEngine(model.state_dict())
    with torch.no_grad():
        model.norm.weight.fill_(3)
    assert list(get_model_metadata(model)) == ["norm.weight", "norm.bias"]
    assert get_model_metadata(model)["norm.bias"] == (torch.float32, torch.Size([4]))
    joined(engine, model).update_weights()
    assert engine.hosts[0].model.norm.weight.tolist() == [3.0] * 4


def test_nothing_is_sent_that_was_not_announced() -> None:
    """`TensorDict.from_module` takes along buffers that no checkpoint has."""
    engine = MemoryEngine(OLD)
    joined(engine).update_weights(NEW | {"model.rotary_emb.inv_freq": torch.ones(4)})
    assert holds(engine) == "new"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.norm.weight"), r"model\.norm\.weight is missing now, bfloat16 \[8\] as announced"),
        (lambda w: w.update({"model.norm.weight": torch.ones(8)}), r"float32 \[8\] now, bfloat16 \[8\] as announced"),
        (lambda w: w.update({"model.norm.weight": torch.ones(9).bfloat16()}), r"bfloat16 \[9\] now"),
        (lambda w: w.clear(), r"and \d more"),
    ],
)
def test_weights_that_were_not_announced_are_refused_before_anything_moves(change: Callable[[Any], Any], words: str) -> None:
    engine = MemoryEngine(OLD)
    sender = joined(engine)
    weights = dict(NEW)
    change(weights)
    with pytest.raises(PlanError, match=words):
        sender.update_weights(weights)
    assert (holds(engine), engine.calls) == ("old", [])
    sender.update_weights()
    assert holds(engine) == "new"


def test_a_tied_name_may_be_announced_or_not() -> None:
    tied = torch.nn.Module()
    tied.embed, tied.head = torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4, bias=False)
    tied.head.weight = tied.embed.weight
    announced = get_model_metadata(tied)
    assert list(announced) == ["embed.weight", "head.weight"]
    for metadata in (announced, {"embed.weight": announced["embed.weight"]}):
        sender = VLLMWeightSyncScheme().create_sender()
        sender.register_model(tied)
        engine = MemoryEngine({"embed.weight": torch.zeros(4, 4)})
        sender.init_all_workers_group(metadata, engine)
        sender.update_weights()
        assert torch.equal(engine.hosts[0].model.embed.weight, tied.embed.weight)


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
    one = VLLMWeightSyncScheme(timeout=0.5)
    two = VLLMWeightSyncScheme(timeout=0.5, master_port=one.master_port)
    first, second = start(one.create_sender(), [two.create_receiver(MemoryEngine(OLD))], METADATA)
    assert isinstance(first, TransportError)
    assert isinstance(second, TransportError)
    assert "another token" in str(second)


def test_schemes_share_a_token_by_argument_by_the_environment_or_by_being_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VLLMWeightSyncScheme(token="t").token == "t"
    scheme = VLLMWeightSyncScheme()
    assert scheme.sender is scheme.sender
    sent = pickle.loads(pickle.dumps(scheme))
    assert (sent.token, sent.master_port, sent._sender) == (scheme.token, scheme.master_port, None)
    assert scheme.token != VLLMWeightSyncScheme().token
    monkeypatch.setenv("INSTEP_TOKEN", "from-the-environment")
    assert VLLMWeightSyncScheme().token == "from-the-environment"


def test_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="strategy"):
        VLLMWeightSyncScheme(strategy="pickle")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="time_out"):
        VLLMWeightSyncScheme(time_out=3)
    with pytest.raises(ConfigError, match="num_replicas=1, there are 2 engines"):
        VLLMWeightSyncScheme().create_sender().init_all_workers_group(METADATA, [MemoryEngine(OLD), MemoryEngine(OLD, name="other")])
    with pytest.raises(ConfigError, match="init_all_workers_group first"):
        VLLMWeightSyncScheme().create_sender().update_weights()
    with pytest.raises(ConfigError, match="cannot push to int"):
        VLLMWeightSyncScheme().create_receiver(7).init_all_workers_group(METADATA)
    sender = VLLMWeightSyncScheme().create_sender()
    sender.init_all_workers_group(METADATA, MemoryEngine(OLD))
    with pytest.raises(SourceError, match="no weights"):
        sender.update_weights()


def test_settings_are_those_of_a_push() -> None:
    engine = MemoryEngine({name: tensor.float() for name, tensor in OLD.items()})
    joined(engine, cast=True).update_weights()
    assert engine.hosts[0].model.get_parameter("model.norm.weight").tolist() == NEW["model.norm.weight"].tolist()


@pytest.mark.parametrize(
    ("point", "kind", "then"),
    [
        *((point, "error", "old") for point in ("hello", "trace", "prepare", "pause")),
        *((point, "hang", "old") for point in ("hello", "trace", "prepare", "pause")),
        ("commit", "hang", "old"),
        ("label", "hang", "new"),
        ("resume", "hang", "new"),
        ("digest", "error", "old"),
        ("tensor", "error", "dirty"),
    ],
)
def test_a_failure_at_each_step_is_bounded_told_and_healed_by_the_next_update(point: Any, kind: Any, then: str) -> None:
    """Of an engine behind TCP. An engine that hangs is behind a request that never ends: the trainer's deadline ends the wait."""
    engine = MemoryEngine(OLD)
    with pair(NEW, [engine], timeout=0.5 if kind == "hang" else 20.0) as (sender, (receiver,)):
        engine.inject(point, kind)
        started = time.monotonic()
        with pytest.raises(SyncError) as caught:
            sender.update_weights()
        assert time.monotonic() - started < 20
        (state,) = caught.value.engines
        assert isinstance(caught.value, EngineTimeout) or kind == "error"
        assert state.serving in {"old": ("old", "unknown"), "new": ("unknown",), "dirty": ("dirty",)}[then]
        if then == "dirty":
            with pytest.raises(InstepError, match="refuses to generate"):
                engine.generate([1], 1)
        else:
            assert holds(engine) == then
        sender.update_weights(LATER)
        assert holds(engine) == "later"
        assert engine.generate([1], 1)
        assert receiver.poll_and_apply()


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
        sender.shutdown()
        again = receiver._scheme.create_sender()
        again.register_model(LATER)
        again.init_all_workers_group(METADATA)
        again.update_weights()
        assert holds(engine) == "later"
        again.shutdown()


def test_a_trainer_that_dies_with_the_engine_paused_leaves_it_running() -> None:
    class Witness(MemoryEngine):
        async def pause(self, caches: Any) -> None:
            await super().pause(caches)
            assert sender._listener is not None
            await asyncio.to_thread(sender._listener.close)  # as the system does with the connections of a process that was killed

    engine = Witness(OLD)
    with pair(NEW, [engine]) as (sender, _):
        with pytest.raises(SyncError):
            sender.update_weights()
        deadline = time.monotonic() + 20
        while engine.paused and time.monotonic() < deadline:
            time.sleep(0.01)
    assert (engine.paused, engine.refusal, holds(engine)) == (False, None, "old")


def test_collectors_count_updates_and_their_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Collector:
        version = 0

        def increment_version(self) -> None:
            self.version += 1

    engine, collector = MemoryEngine(OLD), Collector()
    sender = joined(engine)
    sender.register_collector(SimpleNamespace())
    sender.register_collector(collector)
    sender.update_weights()
    assert (collector.version, holds(engine)) == (1, "new")
    assert "a collector did not count it" in caplog.text
    engine.inject("prepare")
    with pytest.raises(SyncError):
        sender.update_weights()
    assert collector.version == 1


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


def test_weights_are_applied_by_hand_while_no_trainer_brings_them() -> None:
    """TorchRL's method ignores what it is given."""
    engine = MemoryEngine(OLD)
    scheme = VLLMWeightSyncScheme(timeout=20)
    sender, receiver = scheme.create_sender(), scheme.create_receiver(engine)
    receiver.apply_weights(None)
    assert engine.calls == []
    receiver.apply_weights(NEW)
    assert holds(engine) == "new"
    with pytest.raises(ConfigError, match="in place"):
        receiver.apply_weights(NEW, inplace=False)
    sender.register_model(LATER)
    assert start(sender, [receiver], METADATA) == [None, None]
    sender.update_weights()
    with pytest.raises(ConfigError, match="a trainer brings this engine's weights"):
        receiver.apply_weights(NEW)
    assert holds(engine) == "later"
    sender.shutdown()
    receiver.shutdown()


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


def test_without_torchrl(tmp_path: Path) -> None:
    """Neither the import nor an update needs it."""
    program = """
import sys
sys.modules["torchrl"] = None
import torch
from instep import MemoryEngine
from instep.dropin.torchrl import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, get_model_metadata
weights = {"layer.weight": torch.ones(2, 2)}
engine = MemoryEngine({"layer.weight": torch.zeros(2, 2)})
sender = VLLMWeightSyncScheme().create_sender()
sender.init_all_workers_group(get_model_metadata(weights), engine)
sender.update_weights(weights)
scheme = VLLMDoubleBufferSyncScheme(sys.argv[1])
scheme.create_sender().update_weights({"layer.weight": torch.full((2, 2), 2.0)})
before = engine.hosts[0].model.get_parameter("layer.weight").tolist()
scheme.create_receiver(engine).poll_and_apply()
print(before, engine.hosts[0].model.get_parameter("layer.weight").tolist(), "tensordict" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[[1.0, 1.0], [1.0, 1.0]] [[2.0, 2.0], [2.0, 2.0]] False", done.stderr


def test_an_engine_with_experts_takes_what_the_trainer_saves() -> None:
    weights = checkpoint(1, layers=1, moe=True)
    engine = MemoryEngine(checkpoint(0, layers=1, moe=True), tp=2)
    joined(engine, weights).update_weights()
    assert engine.fingerprint() == MemoryEngine(weights, tp=2).fingerprint()
