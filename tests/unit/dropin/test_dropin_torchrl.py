"""The drop-in for TorchRL's collective scheme, by TorchRL's own usage, against engines in memory."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.dropin_pairs import LATER, METADATA, NEW, OLD, holds, joined, pair, start
from helpers.toys import checkpoint

from instep import MemoryEngine
from instep.dropin.torchrl import VLLMWeightSyncScheme, get_model_metadata
from instep.errors import ConfigError, PlanError, SourceError, SyncError

pytestmark = [pytest.mark.usefixtures("segments"), pytest.mark.filterwarnings("ignore:state_dict strategy is experimental")]


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
    assert engine.hosts[0].model.get_parameter("norm.weight").tolist() == [3.0] * 4


def test_nothing_is_sent_that_was_not_announced() -> None:
    """`TensorDict.from_module` takes along buffers that no checkpoint has."""
    engine = MemoryEngine(OLD)
    joined(engine).update_weights(NEW | {"model.rotary_emb.inv_freq": torch.ones(4)})
    assert holds(engine) == "new"


def test_weights_may_be_pairs_of_a_name_and_a_tensor() -> None:
    engine = MemoryEngine(OLD)
    sender = joined(engine)
    for pairs, version in ((iter(NEW.items()), "new"), (list(OLD.items()), "old")):
        sender.update_weights(pairs)
        assert holds(engine) == version


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
        assert torch.equal(engine.hosts[0].model.get_parameter("embed.weight"), tied.embed.weight)


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


def test_engines_of_other_hosts_are_reached_over_gloo() -> None:
    """Control over TCP, the weights over a process group: nothing is shared."""
    engine = MemoryEngine(OLD)
    with pair(NEW, [engine], transport="gloo") as (sender, _):
        sender.update_weights()
        assert holds(engine) == "new"
        sender.update_weights(LATER)
        assert holds(engine) == "later"


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


def test_an_engine_with_experts_takes_what_the_trainer_saves() -> None:
    weights = checkpoint(1, layers=1, moe=True)
    engine = MemoryEngine(checkpoint(0, layers=1, moe=True), tp=2)
    joined(engine, weights).update_weights()
    assert engine.fingerprint() == MemoryEngine(weights, tp=2).fingerprint()
