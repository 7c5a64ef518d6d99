"""What changes a vLLM's weights by other ways than a push is noticed. The worker here is a stand-in: CPUs have no sleep mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.named_weights import WEIGHTS, Trainer, engine_named, serves
from helpers.toys import bare

from instep.engine.vllm.changes import watch
from instep.errors import PlanError


class Worker:
    """vLLM's worker around the receiver of a `MemoryEngine`."""

    def __init__(self, *, sleeps: bool = True) -> None:
        self.engine = engine_named()
        self.model = bare()
        self.model.load_weights = lambda weights: None
        config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps), weight_transfer_config=None)
        self.vllm_config, self.called = config, list[Any]()
        self.model_runner = SimpleNamespace(get_model=lambda: self.model, reload_weights=lambda: self.called.append("reload"))
        self.pushing = False
        watch(self, self.engine.receivers[0], lambda: self.pushing)

    def sleep(self, level: int = 1) -> None:
        self.called.append(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.called.append(tags)

    def update_weights(self, info: Any) -> None:
        raise RuntimeError("half of it was written")


def pushed(worker: Worker) -> Trainer:
    trainer = Trainer(worker.engine)
    trainer.source.update(WEIGHTS["a"])
    trainer.sync.push("a")
    return trainer


@pytest.mark.parametrize(
    "change",
    [
        lambda worker: worker.model_runner.reload_weights(),
        lambda worker: worker.model.load_weights([]),
        lambda worker: worker.sleep(level=2) or worker.wake_up(),
    ],
    ids=["reload", "load_weights", "sleep"],
)
def test_a_change_by_another_way_withdraws_the_version_and_the_next_push_heals(change: Any) -> None:
    worker = Worker()
    trainer = pushed(worker)
    change(worker)
    assert worker.engine.receivers[0].version is None
    state = trainer.sync.status()[0]
    assert (state.version, worker.engine.version) == (None, "unknown")
    assert "no push brought" in str(state)
    assert "changed" in str(state) or "discarded" in str(state)
    trainer.sync.catch_up()
    assert serves(worker.engine) == ("a", "a")
    change(worker)
    trainer.source.update(WEIGHTS["b"])
    trainer.sync.push("b")
    assert serves(worker.engine) == ("b", "b")


def test_a_change_that_fails_may_have_changed_something() -> None:
    worker = Worker()
    pushed(worker)
    with pytest.raises(RuntimeError, match="half"):
        worker.update_weights({})
    assert worker.engine.receivers[0].version is None


def test_a_push_of_our_own_withdraws_nothing() -> None:
    worker = Worker()
    pushed(worker)
    worker.pushing = True
    worker.model.load_weights([])
    assert worker.engine.receivers[0].version == "a"


def test_an_engine_that_sleeps_is_not_pushed_to_and_keeps_its_label() -> None:
    worker = Worker()
    trainer = pushed(worker)
    worker.sleep()
    trainer.source.update(WEIGHTS["b"])
    with pytest.raises(PlanError, match=r"sleeps \(level 1\)(.|\n)*wake_up"):
        trainer.sync.push("b")
    worker.wake_up(tags=["kv_cache"])
    with pytest.raises(PlanError, match="sleeps"):
        trainer.sync.push("b")
    worker.wake_up(tags=["weights"])
    assert serves(worker.engine) == ("a", "a")
    trainer.sync.push("b")
    assert serves(worker.engine) == ("b", "b")


def test_a_vllm_without_sleep_mode_stays_awake() -> None:
    worker = Worker(sleeps=False)
    trainer = pushed(worker)
    worker.sleep(level=2)
    assert trainer.sync.status()[0].version == "a"
