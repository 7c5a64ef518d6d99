"""vLLM's own four phases with the backend `instep`: the same receiver, reached another way. The engine here has no worker extension."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import greedy, versions
from models import PROMPTS, tiny
from phases import Weights, takes_over, update

from instep import WeightSync
from instep.engine.vllm.publisher import WeightPublisher
from instep.transport.shm.segment import directory


@pytest.fixture(scope="module")
def llm(engine: Callable[..., Any], checkpoints: Callable[[str, int], Path]) -> Any:
    return engine(checkpoints("llama", 1), worker_extension_cls="", weight_transfer_config={"backend": "instep"})


@pytest.fixture
def weights() -> Weights:
    return dict(tiny("llama", 2).state_dict())


@pytest.fixture
def publisher(llm: Any, weights: Weights) -> WeightPublisher:
    """A new trainer, whose first version the engine serves; its weights are another version by then."""
    return takes_over(llm, weights, "llama")


def serves(llm: Any, reference: Callable[..., Any], seed: int) -> bool:
    llm.reset_prefix_cache()
    return bool(greedy(llm, PROMPTS) == reference("llama", seed))


def test_phases_follow_the_trainer_bit_for_bit(
    llm: Any, publisher: WeightPublisher, weights: Weights, reference: Callable[..., Any]
) -> None:
    """And nothing changes before `finish`."""
    assert serves(llm, reference, 2)
    info = publisher.update_info("staged")
    llm.start_weight_update()
    assert serves(llm, reference, 2)
    llm.update_weights({"update_info": info})
    assert serves(llm, reference, 2)
    llm.finish_weight_update("staged")
    assert serves(llm, reference, 3)
    assert versions(llm, PROMPTS[0]) == [("staged", 0, 3)]
    publisher.finished()
    weights.update(tiny("llama", 2).state_dict())
    update(llm, publisher, "back")  # in the memory of the version before
    assert serves(llm, reference, 2)


def test_a_staged_version_survives_the_publication_of_the_next(llm: Any, publisher: WeightPublisher, reference: Callable[..., Any]) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": publisher.update_info("kept")})
    publisher._source._mapping["model.norm.weight"] = torch.zeros(64).bfloat16()
    publisher.update_info("next")
    llm.finish_weight_update("kept")
    assert serves(llm, reference, 3)


def test_bytes_that_change_on_the_way_are_refused_in_update(llm: Any, publisher: WeightPublisher, reference: Callable[..., Any]) -> None:
    info = publisher.update_info("corrupted")
    next(iter(publisher._transport.segments.values())).view[1000] ^= 1
    llm.start_weight_update()
    with pytest.raises(Exception, match=r"model\..*weight arrived with digest"):
        llm.update_weights({"update_info": info})
    assert serves(llm, reference, 2)
    [status] = llm.collective_rpc("instep_status")
    assert status["state"] == "serving"
    assert "arrived with digest" in status["last_error"]
    update(llm, publisher, "whole")
    assert serves(llm, reference, 3)


REFUSED: list[tuple[str, Callable[[Weights], Any], str]] = [
    ("a tensor is missing", lambda w: w.pop("model.norm.weight"), "model.norm.weight"),
    ("a tensor is unknown", lambda w: w.update({"model.surprise.weight": torch.zeros(2)}), "model.surprise.weight"),
    ("a dtype is another", lambda w: w.update({"model.norm.weight": torch.ones(64)}), "model.norm.weight"),
    ("half a fused layer", lambda w: w.pop("model.layers.1.self_attn.k_proj.weight"), "qkv_proj.weight"),
]


@pytest.mark.parametrize(("change", "name"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_wrong_tensors_are_refused_in_update(
    llm: Any, publisher: WeightPublisher, weights: Weights, reference: Callable[..., Any], change: Callable[[Weights], Any], name: str
) -> None:
    change(weights)
    llm.start_weight_update()
    with pytest.raises(Exception, match=name):
        llm.update_weights({"update_info": publisher.update_info("wrong")})
    assert serves(llm, reference, 2)


def test_finish_without_update_is_refused_and_a_new_update_can_start(
    llm: Any, publisher: WeightPublisher, reference: Callable[..., Any]
) -> None:
    """A label must not name weights that never came."""
    llm.start_weight_update()
    with pytest.raises(Exception, match="no version is staged"):
        llm.finish_weight_update("never-came")
    assert versions(llm, PROMPTS[0])[0][0] != "never-came"
    assert serves(llm, reference, 2)
    update(llm, publisher, "came")
    assert serves(llm, reference, 3)


@pytest.mark.parametrize("info", [{}, {"manifest": "no base64"}, {"manifest": "AAAA"}, {"manifest": 3}, {"names": []}])
def test_update_info_of_another_kind_is_refused(
    llm: Any, publisher: WeightPublisher, reference: Callable[..., Any], info: dict[str, Any]
) -> None:
    llm.start_weight_update()
    with pytest.raises(Exception, match=r"Invalid update_info|holds no manifest"):
        llm.update_weights({"update_info": info})
    assert serves(llm, reference, 2)


@pytest.mark.parametrize("info", [{"timeout": 0}, {"timeout": "soon"}, {"port": 1}])
def test_init_info_of_another_kind_is_refused(llm: Any, publisher: WeightPublisher, info: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"Invalid init_info|timeout must be"):
        llm.init_weight_transfer_engine({"init_info": info})
    update(llm, publisher, f"goes-on-{info}".replace(" ", ""))


def test_a_weight_sync_reaches_the_same_receiver(
    llm: Any, publisher: WeightPublisher, weights: Weights, reference: Callable[..., Any]
) -> None:
    """Without a worker extension; and one trainer does not push over another unnoticed, whichever way it comes."""
    with WeightSync(source=weights, engines=[llm]) as sync:
        sync.push("by-sync")
        assert serves(llm, reference, 3)
        for attempt in (1, 2):
            llm.start_weight_update()
            with pytest.raises(Exception, match="another trainer pushes to it"):
                llm.update_weights({"update_info": publisher.update_info(f"by-phases-{attempt}")})
        [status] = llm.collective_rpc("instep_status")
        assert (status["state"], status["version"], status["prepared"]) == ("serving", "by-sync", None)
        llm.init_weight_transfer_engine({"init_info": publisher.init_info()})
        update(llm, publisher, "taken-over")
        assert [(state.serving, state.version) for state in sync.status()] == [("old", "taken-over")]


class Client:
    """What vLLM's trainer engines talk to, in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.start_weight_update = llm.start_weight_update
        self.finish_weight_update = llm.finish_weight_update

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": update_info})


def test_vllms_own_trainer_factory_sends_weights_with_instep(llm: Any, publisher: WeightPublisher, reference: Callable[..., Any]) -> None:
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    from instep.engine.vllm.plugin import register
    from instep.engine.vllm.trainer import InstepTrainerInitInfo

    register()
    model = tiny("llama", 3).float()
    trainer = WeightTransferTrainerFactory.trainer_init(
        InstepTrainerInitInfo(rank=0, dtype=torch.bfloat16), client=Client(llm), source=ModuleSource(model)
    )
    trainer.send_weights()
    assert serves(llm, reference, 3)
    model.load_state_dict(tiny("llama", 2).float().state_dict())
    trainer.send_weights("named")
    assert serves(llm, reference, 2)
    assert versions(llm, PROMPTS[0]) == [("named", 0, 3)]
    trainer.shutdown()


def test_published_memory_goes_with_the_publisher(publisher: WeightPublisher) -> None:
    publisher.update_info("first")
    publisher.update_info("second")
    segments = [directory() / name for name in publisher._transport.segments]
    assert [path.exists() for path in segments] == [True]
    publisher.close()
    assert [path.exists() for path in segments] == [False]
