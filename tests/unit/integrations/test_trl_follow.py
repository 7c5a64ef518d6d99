"""`follow(trainer)` on what it uses of a TRL trainer. Real ones, with a real vLLM, are in `tests/integration/test_trl.py`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.toys import attention

from instep import MemoryEngine
from instep.engine.memory import Point
from instep.errors import ConfigError, InstepError, PlanError, SyncError, TransportError
from instep.integrations.trl import WeightTransfer, follow
from instep.telemetry import Event


class Generation:
    """What TRL has under `trainer.vllm_generation`."""

    def __init__(self, weights: dict[str, torch.Tensor], **changes: Any) -> None:
        self.model, self.llm = weights, MemoryEngine(attention(1))
        self.mode, self.tensor_parallel_size, self.enable_sleep_mode = "colocate", 1, False
        self._dist = SimpleNamespace(is_fsdp=False, is_zero3=False)
        self.gathered: list[str] = []
        vars(self).update(changes)

    def sync_weights(self) -> None:
        raise AssertionError("TRL's own way was taken")

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.items():
            self.gathered.append(name)
            yield name, tensor.clone()  # its memory is free once the next one is asked for
        self.gathered.append("released")


def trainer_of(generation: Any, step: int = 0) -> Any:
    return SimpleNamespace(vllm_generation=generation, state=SimpleNamespace(global_step=step))


def tokens(weights: dict[str, torch.Tensor]) -> list[int]:
    return MemoryEngine(weights).generate([5, 6, 7], max_tokens=8)


def test_a_sync_is_a_push_of_the_trainers_step() -> None:
    generation = Generation(attention(2))
    trainer = trainer_of(generation)
    with follow(trainer) as sync:
        generation.sync_weights()
        assert generation.llm.version == "step-0"
        trainer.state.global_step = 7
        generation.model.update(attention(3))
        generation.sync_weights()
        assert sync.status()[0].version == generation.llm.version == "step-7"
    assert generation.llm.generate([5, 6, 7], max_tokens=8) == tokens(attention(3)) != tokens(attention(2))


def test_a_step_that_comes_again_with_other_weights_has_a_name_of_its_own() -> None:
    generation, pushed = Generation(attention(2)), list[str]()

    def note(event: Event) -> None:
        pushed.extend([event.version] * (event.kind == "done"))

    with follow(trainer_of(generation), sinks=[note]):
        for seed in (2, 3, 4):  # another training starts at step 0
            generation.model.update(attention(seed))
            generation.sync_weights()
    assert pushed == ["step-0", "step-0.2", "step-0.3"]
    assert generation.llm.generate([5, 6, 7], max_tokens=8) == tokens(attention(4))


@pytest.mark.parametrize("sharded", ["is_fsdp", "is_zero3"])
def test_a_sharded_trainer_gathers_as_trl_does(sharded: str) -> None:
    generation = Generation(attention(2))
    setattr(generation._dist, sharded, True)
    trainer = trainer_of(generation)
    with follow(trainer):
        for step, seed in enumerate((2, 3)):
            trainer.state.global_step = step
            generation.model.update(attention(seed))
            generation.sync_weights()
            assert generation.llm.generate([5, 6, 7], max_tokens=8) == tokens(attention(seed))
    assert generation.gathered == [*attention(2), "released"] * 2


@pytest.mark.parametrize("point", ["prepare", "tensor", "commit"])
def test_all_is_gathered_also_where_a_push_fails(point: Point) -> None:
    generation = Generation(attention(2))
    generation._dist.is_fsdp = True
    with follow(trainer_of(generation)):
        generation.llm.inject(point, "error")
        with pytest.raises(InstepError):
            generation.sync_weights()
        assert generation.gathered == [*attention(2), "released"], "other ranks wait, and PEFT's adapters stay merged"
        generation.sync_weights()
    assert generation.llm.version == "step-0.2"


def test_a_push_that_is_refused_is_an_error_in_the_trainer() -> None:
    generation = Generation(attention(2))
    with follow(trainer_of(generation)):
        generation.sync_weights()
        before = generation.llm.generate([5, 6, 7], max_tokens=8)
        generation.model.popitem()
        with pytest.raises(PlanError):
            generation.sync_weights()
    assert generation.llm.generate([5, 6, 7], max_tokens=8) == before
    assert generation.llm.version == "step-0"


def test_a_server_is_pushed_to_by_rank_0() -> None:
    client, main = SimpleNamespace(base_url=(engine := MemoryEngine(attention(1)))), SimpleNamespace(is_main_process=True)
    generation = Generation(attention(2), mode="server", vllm_client=client, accelerator=main, enable_sleep_mode=True)
    with follow(trainer_of(generation)):
        generation.sync_weights()
    assert engine.version == "step-0"
    generation = Generation(attention(2), mode="server", accelerator=SimpleNamespace(is_main_process=False))
    with pytest.raises(ConfigError, match="needs at least one engine"):  # there is no other rank here that could have it
        follow(trainer_of(generation))


def test_pairs_of_an_asynchronous_trainer_are_pushed() -> None:
    engine, given = MemoryEngine(attention(1)), Generation(attention(2))
    transfer = WeightTransfer([engine])
    transfer.init_weight_transfer()
    for version, seed in ((1, 2), (2, 3)):
        given.model.update(attention(seed))
        transfer.pause()
        transfer.send_weights(given._iter_named_params())
        transfer.resume()
        assert engine.version == f"version-{version}"
        assert engine.generate([5, 6, 7], max_tokens=8) == tokens(attention(seed))
    given.gathered.clear()
    engine.inject("prepare", "error")
    with pytest.raises(SyncError):
        transfer.send_weights(given._iter_named_params())
    assert given.gathered == [*attention(2), "released"]
    transfer.destroy()
    with pytest.raises(TransportError, match="closed"):
        transfer.send_weights(given._iter_named_params())


class Sleeping(MemoryEngine):
    """An engine that notes what vLLM's sleep mode is asked for."""

    def __init__(self) -> None:
        super().__init__(attention(1))
        self.woken: list[list[str]] = []

    def wake_up(self, tags: list[str]) -> None:
        self.woken.append(tags)


def test_an_engine_is_woken_before_its_weights_are_pushed() -> None:
    generation = Generation(attention(2), llm=(llm := Sleeping()), enable_sleep_mode=True, _llm_weights_sleeping=True)
    with follow(trainer_of(generation)):
        llm.inject("prepare", "error")
        with pytest.raises(SyncError):
            generation.sync_weights()
        assert llm.woken == [["weights"]], "its KV cache has no room yet"
        assert vars(generation)["_llm_weights_sleeping"], "TRL pushes before it generates"
        generation.sync_weights()
        assert not vars(generation)["_llm_weights_sleeping"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tensor_parallel_size": 2}, "vllm_tensor_parallel_size=1"),
        ({"sync_weights": print}, "once"),
    ],
)
def test_what_cannot_be_followed_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        follow(trainer_of(Generation(attention(2), **changes)))


def test_a_trainer_without_vllm_is_told_what_to_set() -> None:
    with pytest.raises(ConfigError, match="use_vllm=True"):
        follow(SimpleNamespace())
