"""The backend without vLLM: what it registers, how it fits the versions of vLLM, and two workers that come to one end."""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import vllm_engine
from helpers.toys import Checkpoint, attention
from helpers.vllm_engine import VERSIONS, Engine
from helpers.vllm_stub import install

from instep.engine.vllm import plugin as vllm_plugin
from instep.engine.vllm.config import chosen
from instep.engine.vllm.publisher import WeightPublisher


def test_the_entry_point_names_the_function() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["instep"].partition(":")
    assert getattr(import_module(module), name) is vllm_plugin.register


def test_the_plugin_imports_nothing_heavy() -> None:
    """vLLM loads it in every process, also where nobody asks for instep."""
    program = "import sys, instep.engine.vllm.plugin; print(*[name for name in ('torch', 'numpy', 'vllm') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split() == []


@pytest.mark.parametrize("version", VERSIONS)
def test_registering_twice_is_registering_once(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    vllm = install(monkeypatch, version)
    vllm_plugin.register()
    vllm_plugin.register()
    assert list(vllm.WeightTransferEngineFactory.names) == ["instep"]
    if version >= (0, 26):
        assert list(vllm.WeightTransferTrainerFactory.names) == ["instep"]


def test_versions_with_other_phases_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = install(monkeypatch, (0, 21))
    vllm_plugin.register()
    assert vllm.WeightTransferEngineFactory.names == {}


def test_registering_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An exception in a plug-in keeps vLLM from starting."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "vllm.distributed", None)
    vllm_plugin.register()
    assert caplog.text == ""
    vllm = install(monkeypatch, (0, 32))
    monkeypatch.setattr(vllm, "WeightTransferEngineFactory", None)
    vllm_plugin.register()
    assert "cannot be told of instep" in caplog.text


def test_an_engine_has_chosen_instep_or_not() -> None:
    assert chosen(SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="instep")))
    assert not chosen(SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="nccl")))
    assert not chosen(SimpleNamespace(weight_transfer_config=None))
    assert not chosen(SimpleNamespace())


def test_calls_carry_a_dtype_as_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Encoder:
        def enc_hook(self, obj: Any) -> Any:
            raise TypeError(f"{type(obj)} is not serializable")

    monkeypatch.setitem(sys.modules, "vllm.v1.serial_utils", SimpleNamespace(MsgpackEncoder=Encoder))
    install(monkeypatch, (0, 32))
    vllm_plugin.register()
    vllm_plugin.register()
    assert Encoder().enc_hook(torch.bfloat16) == "torch.bfloat16"
    with pytest.raises(TypeError, match="not serializable"):
        Encoder().enc_hook(object())


@pytest.fixture
def weights() -> Checkpoint:
    return attention(1)


@pytest.fixture
def publisher(segments: Path, weights: Checkpoint) -> WeightPublisher:
    return WeightPublisher(weights, timeout=5)


@pytest.mark.parametrize("tp", [1, 2])
def test_phases_bring_a_version(vllm: Any, tp: int, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(vllm, tp, monkeypatch)
    engine.call("init_weight_transfer_engine", publisher.init_info())
    engine.call("start_weight_update")
    engine.call("update_weights", publisher.update_info("v1"))
    assert engine.serves(0)
    engine.call("finish_weight_update")
    assert engine.serves(1)


def test_workers_widen_what_the_phases_bring(newest: Any, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tells the publisher what the engine stores."""
    wide = {seed: {name: tensor.float() for name, tensor in attention(seed).items()} for seed in (0, 1)}
    monkeypatch.setattr(vllm_engine, "attention", wide.__getitem__)
    engine = Engine(newest, 2, monkeypatch)
    for version in ("v1", "v2", "v3"):
        engine.update(publisher, version)
        assert engine.serves(1)
    assert all(host.model.get_parameter("model.norm.weight").dtype == torch.float32 for host in engine.hosts)


def test_what_two_workers_refuse_is_raised_by_one(
    newest: Any, publisher: WeightPublisher, weights: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(newest, 2, monkeypatch)
    removed = weights.pop("model.norm.weight")
    refused: list[tuple[str, tuple[Any, ...], str]] = [
        ("init_weight_transfer_engine", ({"timeout": 0},), "timeout must be"),
        ("init_weight_transfer_engine", ({"port": 1},), "Invalid init_info"),
        ("update_weights", ({"names": []},), "Invalid update_info"),
        ("update_weights", ({"manifest": "AAAA"},), "no manifest"),
        ("update_weights", (publisher.update_info("wrong"),), r"fills model\.norm\.weight"),
        ("finish_weight_update", (), "no version is staged"),
    ]
    for method, args, text in refused:
        if not method.startswith("init"):
            engine.call("start_weight_update")  # so the failure before has ended its update in both workers
        with pytest.raises(RuntimeError, match=text):
            engine.call(method, *args)
        assert engine.states() == ["serving", "serving"]
    weights["model.norm.weight"] = removed
    engine.update(publisher, "right")
    assert engine.serves(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_worker_that_fails_to_commit_makes_both_dirty(
    newest: Any, publisher: WeightPublisher, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both refuse steps that have tokens, and an update heals both."""
    engine = Engine(newest, 2, monkeypatch)
    engine.hosts[rank].fail_at = 2
    with pytest.raises(RuntimeError, match=f"(?s)rank {rank}: .*told to fail.*DIRTY.*next: push again"):
        engine.update(publisher, "halved")
    assert engine.states() == ["dirty", "dirty"]
    for worker in engine.workers:
        worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=0, scheduled_new_reqs=()))
        with pytest.raises(Exception, match="parts of two versions"):
            worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=3, scheduled_new_reqs=()))
        with pytest.raises(Exception, match="parts of two versions"):
            worker.execute_dummy_batch()
        assert worker.steps == [0]
    engine.hosts[rank].fail_at = None
    engine.update(publisher, "healed")
    assert engine.serves(1)
    engine.call("execute_model", SimpleNamespace(total_num_scheduled_tokens=3, scheduled_new_reqs=()))


def test_a_worker_that_gets_something_else_than_the_others_ends_the_update(
    newest: Any, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once; it is named; and the next update finds the workers in step."""
    engine = Engine(newest, 2, monkeypatch)
    engine.call("start_weight_update")
    engine.workers[0].weight_transfer_engine.parse_update_info = dict[str, Any]().__getitem__
    with pytest.raises(RuntimeError, match="rank 0: TypeError"):
        engine.call("update_weights", publisher.update_info("v1"))
    del engine.workers[0].weight_transfer_engine.parse_update_info
    engine.update(publisher, "v2")
    assert engine.serves(1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("method", "state"), [("trace", "serving"), ("prepare", "serving"), ("commit", "dirty")])
def test_a_worker_that_is_late_finds_that_the_other_gave_up(
    newest: Any, publisher: WeightPublisher, method: str, state: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to the answers of all, and must not take that for an update that all have made. The next update finds both in step."""
    engine = Engine(newest, 2, monkeypatch)
    engine.call("init_weight_transfer_engine", {"timeout": 0.3})
    receiver = engine.workers[rank].__dict__["instep_receiver"]
    handle = receiver.handle

    def late(asked: str, payload: bytes) -> bytes:
        if asked == method:
            time.sleep(1.0)
        return bytes(handle(asked, payload))

    receiver.handle = late
    with pytest.raises(RuntimeError, match=rf"did not answer {method} within 0\.3 s: nothing came from rank {rank} within"):
        engine.update(publisher, "late")
    assert engine.states() == [state, state]
    receiver.handle = handle
    engine.update(publisher, "in-time")
    assert engine.serves(1)


def test_where_every_worker_has_its_own_caller_each_raises(newest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(newest, 2, monkeypatch)
    for worker in engine.workers:
        worker.parallel_config.distributed_executor_backend = "external_launcher"
        worker.load_model(newest.WeightTransferEngineFactory)
        worker.start_weight_update()
        with pytest.raises(ValueError, match="Invalid update_info"):
            worker.update_weights({"names": []})


def test_nothing_is_left_in_the_store_but_the_last_update(newest: Any, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(newest, 2, monkeypatch)
    sizes = []
    for number in range(4):
        engine.update(publisher, f"v{number}")
        sizes.append(engine.workers[0].weight_transfer_engine.peers.store.num_keys())
    assert sizes[1:] == sizes[1:2] * 3


def test_a_backend_outside_of_a_worker_says_what_to_use_instead(newest: Any) -> None:
    vllm_plugin.register()
    parallel = SimpleNamespace(world_size=1, distributed_executor_backend="mp")
    with pytest.raises(Exception, match="worker_extension_cls"):
        newest.WeightTransferEngineFactory.found("instep")(None, SimpleNamespace(parallel_config=parallel), "cpu", None)
