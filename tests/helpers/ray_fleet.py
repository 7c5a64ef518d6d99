"""What the tests of actors on Ray share. Ray's processes import fake engines from here."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import instep
from helpers.serving import FakeServing
from instep import WeightSync
from instep.errors import SyncError
from instep.generation.types import GenerationResult, PromptId

HERE = Path(__file__).parents[1]
SOON = 60.0


async def fake_vllm(_: str, **__: Any) -> FakeServing:
    """In the place of `start_vllm`: says ten tokens in a fifth of a second."""
    return await FakeServing("abcdefghij", pace=0.02).begin()


def environment(variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """For `ray.init`: processes that find instep and the tests' modules."""
    folders = (HERE, HERE / "integration", HERE / "originals", Path(instep.__file__).parents[1])
    return {"env_vars": {**(variables or {}), "PYTHONPATH": os.pathsep.join(map(str, folders))}}


def collect(results: Any, count: int, sync: WeightSync, within: float = SOON) -> list[GenerationResult]:
    """So many results, as a trainer waits for them: actors that were restarted get the current version meanwhile."""
    found: list[GenerationResult] = []
    deadline = time.monotonic() + within
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} results"
        try:
            found.append(results.get(timeout=1.0))
        except queue.Empty:
            try:
                sync.catch_up()
            except SyncError:  # an actor that is still being restarted
                continue
    return found


def once(results: list[GenerationResult], ids: list[PromptId], n: int) -> None:
    """Each prompt has one result, of n whole samples."""
    assert sorted(result.request.id for result in results) == sorted(ids)
    for result in results:
        assert [sample.id.sample for sample in result.samples] == list(range(n))


def ready(engine: Any) -> bool:
    import ray

    try:
        return bool(ray.get(engine.ready.remote(), timeout=SOON))
    except ray.exceptions.RayActorError:
        return False


def restart(engine: Any) -> None:
    """Kills it. Ray starts it again."""
    import ray

    ray.kill(engine, no_restart=False)
    until(lambda: not ready(engine))


def until(condition: Callable[[], bool], within: float = SOON) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def group_of(_: Any) -> Any:
    """In an actor: the placement group that it is in."""
    import ray

    return ray.util.get_current_placement_group()


def gpus_of(_: Any) -> tuple[list[str], str | None]:
    """In an actor: the GPUs that Ray gave it, and those that it sees."""
    import ray

    return [str(gpu) for gpu in ray.get_gpu_ids()], os.environ.get("CUDA_VISIBLE_DEVICES")


class Trainer:
    def gpus(self) -> list[str]:
        return gpus_of(self)[0]
