"""A colocated engine sleeps while its trainer steps, and wakes for the push: a real vLLM on a GPU, with CUDA graphs on."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from gpu_models import folder, generated, model, start, stop_vllm

from instep import WeightSync
from instep.errors import PlanError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'instep[vllm]'")


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    llm = start(folder("tiny"), enforce_eager=False, enable_sleep_mode=True)
    yield llm
    stop_vllm(llm)


@pytest.mark.parametrize("level", [1, 2])
def test_a_push_waits_for_the_weights_and_not_for_the_caches(llm: Any, from_disk: Any, level: int) -> None:
    trainer = model("tiny", 1, "cuda:0")
    with WeightSync(trainer, [llm]) as sync:
        sync.push("before")
        assert generated(llm) != from_disk
        llm.sleep(level=level)
        trainer.load_state_dict(model("tiny", 2, "cuda:0").state_dict())
        with pytest.raises(PlanError, match=rf"sleeps \(level {level}\)(.|\n)*wake_up"):
            sync.push("too-early")
        llm.wake_up(tags=["weights"])
        sync.push("awake")
        llm.wake_up(tags=["kv_cache"])
        assert generated(llm) == from_disk


def test_a_version_that_sleep_has_discarded_is_brought_again(llm: Any, from_disk: Any) -> None:
    trainer = model("tiny", 2, "cuda:0")
    with WeightSync(trainer, [llm]) as sync:
        sync.push("kept")
        llm.sleep(level=2)
        llm.wake_up()
        (state,) = sync.status()
        assert state.version is None
        sync.catch_up()
        assert generated(llm) == from_disk


def test_a_version_that_sleep_has_kept_is_served_without_a_push(llm: Any, from_disk: Any) -> None:
    with WeightSync(model("tiny", 2, "cuda:0"), [llm]) as sync:
        sync.push("offloaded")
        llm.sleep(level=1)
        llm.wake_up()
        (state,) = sync.status()
        assert state.version == "offloaded"
        assert generated(llm) == from_disk
