"""Names and arguments of the drop-in for TorchRL: each does what it says, or is refused before
anything moves."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.dropin_pairs import LATER, METADATA, NEW, OLD, holds

from instep import MemoryEngine
from instep.dropin import torchrl
from instep.dropin.torchrl import (
    VLLMCollectiveTransport,
    VLLMDoubleBufferSyncScheme,
    VLLMDoubleBufferTransport,
    VLLMWeightReceiver,
    VLLMWeightSender,
    VLLMWeightSyncScheme,
)
from instep.dropin.torchrl.collective import free_port
from instep.engine.remote.rpc import Endpoint
from instep.errors import ConfigError, PlanError, SourceError

pytestmark = [
    pytest.mark.usefixtures("segments"),
    pytest.mark.filterwarnings("ignore:state_dict strategy is experimental"),
]

POOL = ThreadPoolExecutor(8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gpus_per_replica": 0}, "gpus_per_replica must be 1 or more"),
        ({"num_replicas": 0}, "num_replicas must be 1 or more"),
        ({"device": "pigeon"}, "device must be"),
        ({"device": None}, "device must be"),
        ({"strategy": "tensors"}, "strategy must be"),
    ],
)
def test_values_that_cannot_be_meant_are_refused_when_the_scheme_is_made(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        VLLMWeightSyncScheme(**arguments)


@pytest.mark.parametrize("device", [0, "cuda", "cuda:0", "cpu", torch.device("cuda", 0)])
def test_a_device_is_one_of_the_trainers(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    VLLMWeightSyncScheme(device=device).check_device()
    engine = MemoryEngine(OLD)
    with pytest.raises(ConfigError, match="there are 1 GPUs here"):
        VLLMWeightSyncScheme(device=1).create_sender().init_all_workers_group(METADATA, engine)
    assert engine.calls == []


@pytest.mark.parametrize(("said", "has"), [(1, 2), (2, 1), (4, 2)])
def test_a_number_of_workers_that_an_engine_has_not_is_refused(said: int, has: int) -> None:
    """The original waits for ranks that never come."""
    engine = MemoryEngine(OLD, tp=has)
    sender = VLLMWeightSyncScheme(gpus_per_replica=said).create_sender()
    with pytest.raises(ConfigError, match=rf"gpus_per_replica={said}, memory\S* has {has} \(tensor"):
        sender.init_all_workers_group(METADATA, engine)
    assert (sender.joined, holds(engine)) == (False, "old")
    sender = VLLMWeightSyncScheme(gpus_per_replica=has).create_sender()
    sender.init_all_workers_group(METADATA, engine)
    sender.update_weights(NEW)
    assert holds(engine) == "new"


def test_the_world_is_the_trainer_and_each_worker() -> None:
    for arguments, size in (
        ({"gpus_per_replica": 2}, 3),
        ({"num_replicas": 2}, 3),
        ({"gpus_per_replica": 2, "num_replicas": 3}, 7),
    ):
        transport = VLLMWeightSyncScheme(master_port=12345, **arguments).create_transport()  # type: ignore[arg-type]
        assert (
            transport.world_size,
            transport.rank,
            transport.master_address,
            transport.master_port,
        ) == (size, 0, "localhost", 12345)


def test_the_transports_of_both_sides_meet() -> None:
    engine, port = MemoryEngine(OLD, tp=2), free_port()
    trainer = VLLMCollectiveTransport("localhost", port, 0, 3, "cuda:0", timeout=20.0)
    worker = VLLMCollectiveTransport("localhost", port, None, 3, vllm_engine=engine, timeout=20.0)
    for transport in (trainer, worker):
        with pytest.raises(ConfigError, match="rank 0 sends"):
            transport.send_weights("vllm_model", NEW)
        assert not transport.check_connection()
    for each in [POOL.submit(one.init_all_workers_group, METADATA, gpus_per_replica=2) for one in (trainer, worker)]:
        each.result(60)
    assert trainer.check_connection()
    assert worker.check_connection()
    assert trainer.send_weights("vllm_model", NEW) is None
    assert worker.receive_weights() is None
    assert holds(engine) == "new"
    with pytest.raises(ConfigError, match="rank 0 sends"):
        worker.send_weights("vllm_model", LATER)
    with pytest.raises(ConfigError, match="takes no arguments"):
        worker.receive_weights(timeout=3.0)
    trainer.shutdown()
    worker.shutdown()
    assert not trainer.check_connection()


def test_a_transport_takes_the_workers_of_an_engine_from_the_worlds_size() -> None:
    transport = VLLMCollectiveTransport("localhost", free_port(), 0, 3, vllm_engine=MemoryEngine(OLD, tp=2))
    transport.init_all_workers_group(METADATA)
    transport.send_weights("vllm_model", NEW)
    assert holds(transport.vllm_engine) == "new"
    with pytest.raises(ConfigError, match="is not 1 \\+ engines × 4 workers"):
        transport.init_all_workers_group(METADATA, gpus_per_replica=4)
    with pytest.raises(ConfigError, match="2 or more, not 1"):
        VLLMCollectiveTransport("localhost", 1, 0, 1)


def test_keywords_that_nobody_looks_at_are_refused(tmp_path: Path) -> None:
    for scheme in (VLLMWeightSyncScheme(), VLLMDoubleBufferSyncScheme(str(tmp_path))):
        with pytest.raises(ConfigError, match="takes no arguments, not pipe"):
            scheme.create_transport(pipe=3)
    with pytest.raises(ConfigError, match="num_threads"):
        VLLMDoubleBufferSyncScheme(str(tmp_path), num_threads=0)
    with pytest.raises(ConfigError, match="weights, model and strategy"):
        VLLMDoubleBufferTransport(str(tmp_path)).receive_weights(model=3)


def test_what_a_directory_holds_is_returned_as_tensors(tmp_path: Path) -> None:
    transport = VLLMDoubleBufferSyncScheme(str(tmp_path), num_threads=128).create_transport()
    with pytest.raises(SourceError, match="nothing was written"):
        transport.receive_weights()
    transport.send_weights("vllm_model", NEW)
    received = transport.receive_weights(timeout=1.0)
    assert set(received.keys()) == set(NEW)
    assert all(torch.equal(received[name], tensor) for name, tensor in NEW.items())
    engine = MemoryEngine(OLD)
    VLLMDoubleBufferSyncScheme(str(tmp_path)).create_receiver(engine).apply_weights(received)
    assert holds(engine) == "new"


def test_the_double_buffer_s_engine_is_found_from_a_context_too(tmp_path: Path) -> None:
    scheme, engine = VLLMDoubleBufferSyncScheme(str(tmp_path)), MemoryEngine(OLD)
    sender, receiver = scheme.create_sender(), scheme.create_receiver()
    sender.update_weights(NEW)
    with pytest.raises(ConfigError, match="has no engine"):
        receiver.poll_and_apply()
    receiver.register_model("policy")
    with pytest.raises(ConfigError, match="set_context"):
        receiver.poll_and_apply()
    receiver.set_context(SimpleNamespace(policy=engine))
    assert receiver.poll_and_apply()
    assert holds(engine) == "new"
    with pytest.raises(ConfigError, match="no int is needed"):
        receiver.register_worker_transport(3)
    with pytest.raises(ConfigError, match="worker 0 needs no int"):
        sender.register_worker(0, 3)


class Actor:
    """As Ray's handle: `answer.remote(...)`, whose result has `future`."""

    def __init__(self, engine: MemoryEngine, number: int) -> None:
        endpoint = Endpoint(engine)

        async def answer(method: str, payload: bytes) -> bytes:
            return b"\x82\xa5fault\xc0\xa4body\xc3" if method == "join" else await endpoint.answer(method, payload)

        def remote(*args: Any) -> Any:
            return SimpleNamespace(future=lambda: POOL.submit(lambda: asyncio.run(answer(*args))))

        self._actor_id = SimpleNamespace(hex=lambda: f"{number}" * 32)
        self.answer = SimpleNamespace(remote=remote)


def test_engines_in_actors_are_reached_through_their_receiver() -> None:
    """The page gives the trainer's side no engine."""
    engines = [MemoryEngine(OLD), MemoryEngine(OLD)]
    scheme = VLLMWeightSyncScheme(num_replicas=2, timeout=20)
    sender = VLLMWeightSender(scheme)
    receiver = VLLMWeightReceiver(
        scheme,
        SimpleNamespace(actors=[Actor(engine, number) for number, engine in enumerate(engines)]),
    )
    sender.register_model(NEW)
    for _ in range(2):
        ends = [
            POOL.submit(sender.init_all_workers_group, METADATA),
            POOL.submit(receiver.init_all_workers_group, METADATA),
        ]
        for end in ends:
            end.result(60)
        assert {each.engine for each in sender.update_weights().engines} == {
            "actor-00000000",
            "actor-11111111",
        }
        assert [holds(engine) for engine in engines] == ["new", "new"]
        assert receiver.poll_and_apply() is False
        sender.update_weights(OLD)
    other = METADATA | {"model.norm.weight": (torch.float32, torch.Size([8]))}
    receiver.init_all_workers_group(other)
    with pytest.raises(PlanError, match=r"float32 \[8\] at the receiver"):
        sender.init_all_workers_group(METADATA)
    receiver.shutdown()
    sender.shutdown()


def test_actors_without_a_way_in_are_refused_on_both_sides() -> None:
    """TorchRL's own `AsyncVLLM`, as `vLLMWrapper("a name")` starts it."""
    theirs = SimpleNamespace(actors=[SimpleNamespace(_actor_id="some")])
    with pytest.raises(ConfigError, match="has no method `answer`"):
        VLLMWeightSyncScheme().create_receiver(theirs).init_all_workers_group(METADATA)
    with pytest.raises(ConfigError, match="has no method `answer`"):
        VLLMWeightSyncScheme().create_sender().init_all_workers_group(METADATA, theirs)


@pytest.mark.parametrize(
    "name",
    [
        "SGLangWeightSyncScheme",
        "SGLangWeightSender",
        "SGLangCollectiveTransport",
        "make_vllm_worker",
    ],
)
def test_names_of_other_engines_can_be_imported_and_are_refused_when_they_are_called(
    name: str,
) -> None:
    found = getattr(torchrl, name)
    with pytest.raises(ConfigError, match=f"has no {name}: "):
        found("http://localhost:30000", num_gpus=1)
    assert not isinstance(3, found)


def test_a_name_that_torchrl_has_not_is_none_here() -> None:
    with pytest.raises(AttributeError, match="no attribute 'VLLMWeightScheme'"):
        torchrl.VLLMWeightScheme  # noqa: B018
