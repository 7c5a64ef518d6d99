"""vLLM's own four phases with the backend `instep` on a GPU: through host memory, and beside them a push by CUDA IPC to the same engine.

The plug-in is found where instep is installed, that is where its `dist-info` is on the path.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from gpu_models import PROMPTS, greedy, model, start, stop_vllm

from instep import WeightSync
from instep.engine.vllm.publisher import WeightPublisher

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'instep[vllm]'"),
    pytest.mark.skipif(
        not any(entry.name == "instep" for entry in entry_points(group="vllm.general_plugins")),
        reason="instep is not installed as a package",
    ),
]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[Any]:
    """On GPU 0, loaded from disk with the weights of seed 2, with CUDA graphs and without a worker extension."""
    llm = start(
        checkpoint, "0", load_format="auto", enforce_eager=False, worker_extension_cls="",
        weight_transfer_config={"backend": "instep"},
    )  # fmt: skip
    llm.fresh = greedy(llm, PROMPTS)
    yield llm
    stop_vllm(llm)


def finish(llm: Any, version: str) -> None:
    labels = inspect.signature(llm.finish_weight_update).parameters  # none before vLLM 0.27
    llm.finish_weight_update(*([version] if labels else []))


def update(llm: Any, publisher: WeightPublisher, version: str) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": publisher.update_info(version)})
    finish(llm, version)
    publisher.finished()
    llm.reset_prefix_cache()


def test_the_four_phases(llm: Any) -> None:
    trainer = model("tiny", 1, "cuda:0")
    publisher = WeightPublisher(trainer, timeout=60)
    llm.init_weight_transfer_engine({"init_info": publisher.init_info()})
    update(llm, publisher, "one")
    assert greedy(llm, PROMPTS) != llm.fresh
    trainer.load_state_dict(model("tiny", 2, "cuda:0").state_dict())
    info = publisher.update_info("staged")
    llm.start_weight_update()
    llm.update_weights({"update_info": info})
    llm.reset_prefix_cache()
    assert greedy(llm, PROMPTS) != llm.fresh, "a version is staged, not served, before the last phase"
    finish(llm, "staged")
    llm.reset_prefix_cache()
    assert greedy(llm, PROMPTS) == llm.fresh
    publisher.close()


def test_an_update_in_parts(llm: Any) -> None:
    publisher = WeightPublisher(model("tiny", 1, "cuda:0"), timeout=60)
    llm.init_weight_transfer_engine({"init_info": publisher.init_info()})
    before = greedy(llm, PROMPTS)
    first, second, third = publisher.update_infos("parts", 3)
    llm.start_weight_update()
    for info in (first, third):
        llm.update_weights({"update_info": info})
    with pytest.raises(Exception, match="part 2 of 3 did not come"):
        finish(llm, "parts")
    llm.reset_prefix_cache()
    assert greedy(llm, PROMPTS) == before
    llm.start_weight_update()
    for info in (third, first, second):
        llm.update_weights({"update_info": info})
    finish(llm, "parts")
    llm.reset_prefix_cache()
    assert greedy(llm, PROMPTS) != before
    publisher.close()


def test_a_push_reaches_the_same_engine(llm: Any) -> None:
    trainer = model("tiny", 1, "cuda:0")
    with WeightSync(trainer, [llm]) as sync:
        assert sync.push("pushed").transport == "ipc"
        assert greedy(llm, PROMPTS) != llm.fresh
        trainer.load_state_dict(model("tiny", 2, "cuda:0").state_dict())
        sync.push("pushed-back")
        assert greedy(llm, PROMPTS) == llm.fresh
