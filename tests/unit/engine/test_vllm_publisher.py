"""The trainer's side of vLLM's four phases: what is published, when memory is used again, and instep among vLLM's own trainer engines."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.toys import Checkpoint, attention, bits
from helpers.vllm_stub import install

from instep.engine.vllm.publisher import WeightPublisher
from instep.errors import ConfigError, PlanError, SourceError
from instep.protocol import Manifest, decode
from instep.source.module import MappingSource
from instep.transport.reader import WorkerContext
from instep.transport.registry import open_location


def manifest(update_info: dict[str, Any]) -> Manifest:
    """After the way through JSON that HTTP means."""
    return decode(b64decode(json.loads(json.dumps(update_info))["manifest"]), Manifest)


def published(found: Manifest) -> Checkpoint:
    reader: Any = open_location(found, WorkerContext("a worker", 5.0))
    tensors = {meta.name: reader.tensor(meta).clone() for meta in found.tensors}
    assert reader.close()
    return tensors


def same(found: Checkpoint, wanted: Checkpoint) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(bits(found[name]), bits(wanted[name])) for name in wanted)


@pytest.fixture
def publisher(segments: Path) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher(attention(1))
    yield publisher
    publisher.close()
    assert list(segments.iterdir()) == []


def test_an_update_is_plain_json_and_holds_the_version(publisher: WeightPublisher) -> None:
    found = manifest(publisher.update_info("v1", base="v0"))
    assert (found.version, found.base) == ("v1", "v0")
    assert same(published(found), attention(1))
    assert json.loads(json.dumps(publisher.init_info())) == {"timeout": 60.0}


def test_floating_point_numbers_are_rounded_to_the_dtype(segments: Path) -> None:
    weights = {"a.weight": torch.tensor([1.0, 1.0 + 2**-10]), "a.count": torch.tensor([3])}
    publisher = WeightPublisher(weights, dtype=torch.bfloat16)
    found = published(manifest(publisher.update_info("v1")))
    assert found["a.weight"].dtype == torch.bfloat16
    assert same(found, {"a.weight": weights["a.weight"].bfloat16(), "a.count": weights["a.count"]})
    publisher.close()


def test_a_version_that_an_engine_has_opened_is_not_overwritten(publisher: WeightPublisher, segments: Path) -> None:
    first = manifest(publisher.update_info("v1"))
    reader: Any = open_location(first, WorkerContext("a worker", 5.0))
    publisher._source = MappingSource(attention(2))
    publisher.update_info("v2")
    assert len(list(segments.iterdir())) == 1
    assert same({meta.name: reader.tensor(meta).clone() for meta in first.tensors}, attention(1))
    assert reader.close()


def test_memory_of_a_finished_version_is_used_again(publisher: WeightPublisher, segments: Path) -> None:
    publisher.update_info("v1")
    inodes = [path.stat().st_ino for path in segments.iterdir()]
    publisher.finished()
    publisher.update_info("v2")
    assert [path.stat().st_ino for path in segments.iterdir()] == inodes


def test_weights_that_change_while_they_are_copied_are_not_published(segments: Path) -> None:
    weights = attention(1)

    class Stepping(MappingSource):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from super().tensors()
            weights["model.norm.weight"].add_(1)

    with pytest.raises(SourceError, match="while they were copied"):
        WeightPublisher(Stepping(weights)).update_info("v1")


@pytest.mark.parametrize(("version", "weights", "error"), [("v 1", attention(1), ConfigError), ("v1", {}, PlanError)])
def test_what_makes_no_sense_is_refused(segments: Path, version: str, weights: Checkpoint, error: type[Exception]) -> None:
    with pytest.raises(error):
        WeightPublisher(weights).update_info(version)
    assert list(segments.iterdir()) == []


class Client:
    """vLLM's side as its trainer engines see it, from 0.27 on."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append(("init", init_info))

    def start_weight_update(self) -> None:
        self.calls.append(("start", None))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        assert same(published(manifest(update_info)), attention(1))
        self.calls.append(("update", manifest(update_info).version))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(("finish", weight_version))


class OldClient(Client):
    """0.26 has no label."""

    def finish_weight_update(self) -> None:  # type: ignore[override]
        self.calls.append(("finish", None))


def weight_source(vllm: Any) -> Any:
    class Source(vllm.WeightSource):
        passes = 0

        def metadata(self) -> list[Any]:
            return [SimpleNamespace(name=name, dtype=tensor.dtype, shape=tensor.shape) for name, tensor in attention(1).items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            self.passes += 1
            yield from attention(1).items()

    return Source()


@pytest.mark.parametrize(("version", "client"), [((0, 26), OldClient()), ((0, 28), Client()), ((0, 32), Client())])
def test_vllms_trainer_engine_sends_whole_versions(
    monkeypatch: pytest.MonkeyPatch, segments: Path, version: tuple[int, int], client: Client
) -> None:
    """Rank 0 talks to the engine; the others take part in gathering, for both reads of each version."""
    vllm = install(monkeypatch, version)
    from instep.engine.vllm.trainer import InstepTrainer, InstepTrainerInitInfo

    sources = [weight_source(vllm), weight_source(vllm)]
    config = {"config": None} if version < (0, 28) else {}
    for rank, source in enumerate(sources):
        trainer = InstepTrainer.trainer_init(InstepTrainerInitInfo(rank=rank, timeout=9), client=client, source=source, **config)
        trainer.send_weights()
        trainer.send_weights("named")
        trainer.shutdown()
    label = client.calls[2][1]
    labels = [None, None] if isinstance(client, OldClient) else [label, "named"]
    assert client.calls == [
        *[("init", {"timeout": 9}), ("start", None), ("update", label), ("finish", labels[0])],
        *[("start", None), ("update", "named"), ("finish", labels[1])],
    ]
    assert [source.passes for source in sources] == [4, 4]
    assert list(segments.iterdir()) == []
    with pytest.raises(ConfigError, match="WeightSource"):
        InstepTrainer.trainer_init(InstepTrainerInitInfo(rank=0), client=client, source=None)
