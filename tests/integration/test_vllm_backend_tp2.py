"""vLLM's four phases with two workers: they prove the plan together, end together, and vLLM stays in step with their replies."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import Generated, greedy
from models import PROMPTS, tiny
from phases import Weights, takes_over, update

from instep.engine.vllm.publisher import WeightPublisher
from instep.protocol import Reply, Request, decode, encode


@pytest.fixture(scope="module")
def llm(engine: Callable[..., Any], checkpoints: Callable[[str, int], Path]) -> Any:
    """Loaded from disk, with the weights of seed 2."""
    return engine(
        checkpoints("qwen3", 2),
        load_format="auto",
        tensor_parallel_size=2,
        worker_extension_cls="faulty.FaultyExtension",
        weight_transfer_config={"backend": "instep"},
    )


@pytest.fixture(scope="module")
def from_disk(llm: Any) -> Generated:
    return greedy(llm, PROMPTS)


@pytest.fixture
def weights() -> Weights:
    return dict(tiny("qwen3", 2).state_dict())


@pytest.fixture
def publisher(llm: Any, from_disk: Generated, weights: Weights) -> WeightPublisher:
    """The engine serves this trainer's first version, that of seed 2; its weights are those of seed 3 by then."""
    return takes_over(llm, weights, "qwen3")


def now(llm: Any) -> Generated:
    llm.reset_prefix_cache()
    return greedy(llm, PROMPTS)


def replies(llm: Any) -> list[tuple[int, str, str | None]]:
    """(rank, state, version) of each worker, after it is clear that none of them is a reply behind."""
    for seq in (11, 12, 13):
        found = [decode(data, Reply) for data in llm.collective_rpc("instep_call", args=("status", encode(Request(seq, "test"))))]
        assert [(reply.rank, reply.seq) for reply in found] == [(0, seq), (1, seq)]
    return [(reply.rank, reply.state, reply.version) for reply in found]


def test_two_workers_take_their_slices(llm: Any, publisher: WeightPublisher, weights: Weights, from_disk: Generated) -> None:
    """Away from the weights that were loaded from disk, and back to them: the same tokens and log-probabilities, bit for bit."""
    assert now(llm) == from_disk
    update(llm, publisher, "away")
    assert now(llm) != from_disk
    weights.update(tiny("qwen3", 2).state_dict())
    update(llm, publisher, "back")
    assert now(llm) == from_disk
    assert replies(llm) == [(0, "serving", "back"), (1, "serving", "back")]


def test_what_all_workers_refuse_is_raised_once(llm: Any, publisher: WeightPublisher, weights: Weights, from_disk: Generated) -> None:
    """vLLM loses step with the workers' replies for good after two have raised: its later calls fail, or answer the one before."""
    norm = weights.pop("model.norm.weight")
    llm.start_weight_update()
    with pytest.raises(Exception, match=r"nothing in the source fills model\.norm\.weight"):
        llm.update_weights({"update_info": publisher.update_info("wrong")})
    served = f"start-{id(publisher)}"
    assert replies(llm) == [(0, "serving", served), (1, "serving", served)]
    with pytest.raises(Exception, match="timeout must be"):
        llm.init_weight_transfer_engine({"init_info": {"timeout": -1}})
    llm.start_weight_update()
    with pytest.raises(Exception, match="no version is staged"):
        llm.finish_weight_update("never-came")
    assert replies(llm) == [(0, "serving", served), (1, "serving", served)]
    assert now(llm) == from_disk
    weights["model.norm.weight"] = norm
    update(llm, publisher, "right")
    assert replies(llm) == [(0, "serving", "right"), (1, "serving", "right")]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", ["trace", "prepare"])
def test_one_worker_that_refuses_ends_the_update_in_both(
    llm: Any, publisher: WeightPublisher, from_disk: Generated, rank: int, method: str
) -> None:
    llm.init_weight_transfer_engine({"init_info": publisher.init_info()})
    llm.collective_rpc("inject", args=(f"refuse:{method}", 0, rank))
    llm.start_weight_update()
    with pytest.raises(Exception, match=f"vllm rank {rank}: unknown method 'told to refuse'"):
        llm.update_weights({"update_info": publisher.update_info(f"refused-{method}-{rank}")})
    served = f"start-{id(publisher)}"
    assert replies(llm) == [(0, "serving", served), (1, "serving", served)]
    assert [status["prepared"] for status in llm.collective_rpc("instep_status")] == [None, None]
    assert now(llm) == from_disk
    update(llm, publisher, f"again-{method}-{rank}")
    assert now(llm) != from_disk


@pytest.mark.parametrize("rank", [0, 1])
def test_one_worker_that_fails_to_commit_makes_both_dirty_and_an_update_heals(
    llm: Any, publisher: WeightPublisher, weights: Weights, from_disk: Generated, rank: int
) -> None:
    """The other one holds the new version, whole: together they are a mixture."""
    llm.collective_rpc("inject", args=("step", 4, rank))
    llm.start_weight_update()
    llm.update_weights({"update_info": publisher.update_info(f"halved-{rank}")})
    with pytest.raises(Exception, match=f"(?s)vllm rank {rank}: .*told to fail.*DIRTY.*next: "):
        llm.finish_weight_update(f"halved-{rank}")
    assert [state for _, state, _ in replies(llm)] == ["dirty", "dirty"]
    assert all("told to fail" in status["last_error"] for status in llm.collective_rpc("instep_status"))
    update(llm, publisher, f"healed-{rank}")
    assert replies(llm) == [(0, "serving", f"healed-{rank}"), (1, "serving", f"healed-{rank}")]
    weights.update(tiny("qwen3", 2).state_dict())
    update(llm, publisher, f"back-{rank}")
    assert now(llm) == from_disk


def test_a_worker_that_is_late_is_not_waited_for(llm: Any, publisher: WeightPublisher, from_disk: Generated) -> None:
    """The deadline is that of `init_info`. vLLM itself waits until every worker has answered."""
    llm.init_weight_transfer_engine({"init_info": {"timeout": 1.0}})
    llm.collective_rpc("inject", args=("hang:prepare", 3.0, 0))
    llm.start_weight_update()
    started = time.monotonic()
    with pytest.raises(Exception, match="vllm did not answer prepare within 1 s"):
        llm.update_weights({"update_info": publisher.update_info("late")})
    assert time.monotonic() - started < 20
    served = f"start-{id(publisher)}"
    assert replies(llm) == [(0, "serving", served), (1, "serving", served)]
    assert now(llm) == from_disk
    update(llm, publisher, "in-time")
    assert replies(llm) == [(0, "serving", "in-time"), (1, "serving", "in-time")]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_commit_that_one_worker_gave_up_waiting_for_is_no_success_in_the_other(llm: Any, publisher: WeightPublisher, rank: int) -> None:
    """The late one finds the answers of all when it comes: it must not report a version that the other refuses to serve."""
    llm.init_weight_transfer_engine({"init_info": {"timeout": 1.0}})
    llm.start_weight_update()
    llm.update_weights({"update_info": publisher.update_info(f"late-{rank}")})
    llm.collective_rpc("inject", args=("hang:commit", 3.0, rank))
    with pytest.raises(Exception, match="did not answer commit within 1 s"):
        llm.finish_weight_update(f"late-{rank}")
    assert [state for _, state, _ in replies(llm)] == ["dirty", "dirty"]
    llm.init_weight_transfer_engine({"init_info": {"timeout": 60.0}})  # a busy machine takes longer than a second to heal
    update(llm, publisher, f"healed-after-late-{rank}")
    assert [state for _, state, _ in replies(llm)] == ["serving", "serving"]


def test_a_dirty_engine_ends_rather_than_generate(llm: Any, publisher: WeightPublisher) -> None:
    """Last in this file: the engine does not survive it."""
    llm.collective_rpc("inject", args=("finish", 0, 1))
    llm.start_weight_update()
    llm.update_weights({"update_info": publisher.update_info("halved")})
    with pytest.raises(Exception, match="DIRTY"):
        llm.finish_weight_update("halved")
    with pytest.raises(Exception, match="EngineCore"):
        greedy(llm, PROMPTS)
