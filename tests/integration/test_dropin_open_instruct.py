"""Open Instruct's weight sync with instep's names, against a real vLLM on the CPU with two workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dropins import error_of, free_port, in_thread, run_example
from engines import Generated, greedy
from helpers.toys import bits
from models import PROMPTS, tiny

from instep.dropin.handles import SEGMENT
from instep.dropin.open_instruct import Communicator, broadcast_weights_to_vllm, init_process_group
from instep.errors import SyncError, TransportError
from instep.transport.shm.segment import Segment

FAMILY = "qwen3"


@pytest.fixture(scope="module")
def llm(engine: Callable[..., Any], checkpoints: Callable[[str, int], Path]) -> Any:
    """Loaded from disk, with the weights of seed 2."""
    return engine(checkpoints(FAMILY, 2), load_format="auto", tensor_parallel_size=2, worker_extension_cls="dropins.FaultyWrap")


@pytest.fixture(scope="module")
def fresh(llm: Any) -> Generated:
    return greedy(llm, PROMPTS)


def generated(llm: Any) -> Generated:
    llm.reset_prefix_cache()
    return greedy(llm, PROMPTS)


def join(llm: Any, minutes: float = 1) -> Communicator:
    port = free_port()
    arguments = ("127.0.0.1", port, 1, 3, "openrlhf", "gloo", False, minutes)
    joining = in_thread(llm.collective_rpc, "init_process_group", args=arguments)
    group = init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", timeout=timedelta(minutes=minutes), world_size=3, rank=0, group_name="openrlhf"
    )
    assert [status["error"] for status in joining.result(60)] == [None, None]
    return group


@pytest.fixture
def group(llm: Any, fresh: Generated) -> Iterator[Communicator]:
    made = join(llm)
    yield made
    made.close()


def test_weights_follow_the_trainer(llm: Any, group: Communicator, fresh: Generated) -> None:
    assert broadcast_weights_to_vllm(tiny(FAMILY, 3), [llm], group, 0) == []
    assert greedy(llm, PROMPTS) != fresh  # without a reset of our own
    broadcast_weights_to_vllm(tiny(FAMILY, 2), [llm], group, 0)
    assert greedy(llm, PROMPTS) == fresh


def one_by_one(llm: Any, group: Communicator, weights: dict[str, torch.Tensor], end: str | None, prefix: str = "torch.") -> Any:
    """A trainer's own loop. end: the name of the last tensor, or None where there is none. The last call."""
    for name, tensor in weights.items():
        dtype = str(tensor.dtype).replace("torch.", prefix)
        calling = in_thread(llm.collective_rpc, "update_weight", args=(name, dtype, list(tensor.shape), name == end))
        group.broadcast(tensor)
        calling.exception(60)
    return calling


def test_a_loop_of_ones_own_and_an_explicit_end(llm: Any, group: Communicator, fresh: Generated) -> None:
    broadcast_weights_to_vllm(tiny(FAMILY, 3), [llm], group, 0)
    one_by_one(llm, group, tiny(FAMILY, 2).state_dict(), None, prefix="")  # with the tied head, as a state dict lists it
    assert generated(llm) != fresh
    version = f"step-{time.monotonic()}"
    statuses = llm.collective_rpc("finish_update", args=(version,))
    assert [(status["ok"], status["committed"], status["version"]) for status in statuses] == [(True, True, version)] * 2
    assert generated(llm) == fresh


def test_an_incomplete_round_is_refused_with_what_is_missing(llm: Any, group: Communicator, fresh: Generated) -> None:
    broadcast_weights_to_vllm(tiny(FAMILY, 2), [llm], group, 0)
    weights = dict(tiny(FAMILY, 3).named_parameters())
    missing = weights.pop("model.layers.1.mlp.up_proj.weight")
    last = list(weights)[-1]
    assert "incomplete, model.layers.1.mlp.up_proj.weight did not come" in error_of(one_by_one(llm, group, weights, last))
    assert generated(llm) == fresh
    assert missing.shape == (96, 64)
    broadcast_weights_to_vllm(tiny(FAMILY, 3), [llm], group, 0)
    assert generated(llm) != fresh


@pytest.mark.parametrize("what", ["another dtype", "an unknown name", "a name that comes twice"])
def test_what_does_not_fit_is_refused(llm: Any, group: Communicator, fresh: Generated, what: str) -> None:
    broadcast_weights_to_vllm(tiny(FAMILY, 2), [llm], group, 0)
    weights = dict(tiny(FAMILY, 3).named_parameters())
    last = list(weights)[-1]
    if what == "another dtype":
        weights = {name: tensor.float() for name, tensor in weights.items()}
        assert "would be rounded" in error_of(one_by_one(llm, group, weights, last))
    elif what == "an unknown name":
        with pytest.raises(SyncError, match=r"model.extra") as failure:
            broadcast_weights_to_vllm({**weights, "model.extra.weight": torch.ones(4, dtype=torch.bfloat16)}, [llm], group, 0)  # type: ignore[arg-type]
        assert [state.serving for state in failure.value.engines] == ["old"]
    else:
        first = {name: weights[name] for name in list(weights)[:2]}
        one_by_one(llm, group, weights, None)
        assert "did not come" in error_of(one_by_one(llm, group, first, list(first)[-1]))
    assert generated(llm) == fresh
    broadcast_weights_to_vllm(tiny(FAMILY, 3), [llm], group, 0)
    assert generated(llm) != fresh


def test_a_commit_that_fails_says_which_engine_is_dirty_and_the_next_one_heals(llm: Any, group: Communicator, fresh: Generated) -> None:
    llm.collective_rpc("inject", args=("step", 3))
    with pytest.raises(SyncError, match="told to fail in the middle") as failure:
        broadcast_weights_to_vllm(tiny(FAMILY, 3), [llm], group, 0)
    assert [state.serving for state in failure.value.engines] == ["dirty"]
    broadcast_weights_to_vllm(tiny(FAMILY, 2), [llm], group, 0)
    assert generated(llm) == fresh


def test_an_engine_that_fails_on_the_way_stops_the_others_and_a_retry_works(llm: Any, group: Communicator, fresh: Generated) -> None:
    """Another engine, whose third call fails: nobody has got a last tensor."""
    broadcast_weights_to_vllm(tiny(FAMILY, 2), [llm], group, 0)
    calls: list[str] = []

    def update_weight(name: str, **_: Any) -> list[dict[str, Any]]:
        calls.append(name)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return [{"ok": True, "error": None, "rank": 0, "version": None, "committed": False, "dirty": None}]

    other = SimpleNamespace(update_weight=update_weight)
    with pytest.raises(SyncError, match="engine 1: out of memory") as failure:
        broadcast_weights_to_vllm(tiny(FAMILY, 3), [llm, other], group, 0)
    assert [state.serving for state in failure.value.engines] == ["old", "unknown"]
    assert len(calls) == 3
    assert generated(llm) == fresh
    broadcast_weights_to_vllm(tiny(FAMILY, 3), [llm, other], group, 0)
    assert generated(llm) != fresh


def test_an_engine_that_does_not_take_part_is_not_waited_for(llm: Any, group: Communicator, fresh: Generated) -> None:
    """It is asked, fails at once, and the collective of the others would wait for it."""
    broadcast_weights_to_vllm(tiny(FAMILY, 2), [llm], group, 0)

    def update_weight(**_: Any) -> None:
        raise RuntimeError("the actor died")

    started = time.monotonic()
    with pytest.raises(SyncError, match="the actor died"):
        broadcast_weights_to_vllm(tiny(FAMILY, 3), [SimpleNamespace(update_weight=update_weight)], group, 0)
    assert time.monotonic() - started < 20
    assert generated(llm) == fresh
    broadcast_weights_to_vllm(tiny(FAMILY, 3), [llm], join(llm), 0)
    assert generated(llm) != fresh


def test_a_trainer_that_stops_is_not_waited_for(llm: Any, fresh: Generated) -> None:
    group = join(llm, minutes=0.05)
    broadcast_weights_to_vllm(tiny(FAMILY, 2), [llm], group, 0, timeout=3)
    started = time.monotonic()
    waiting = in_thread(llm.collective_rpc, "update_weight", args=("model.norm.weight", "bfloat16", [64], True))
    assert "rank 0 did not broadcast within 3 s" in error_of(waiting)
    assert time.monotonic() - started < 20
    assert generated(llm) == fresh
    with pytest.raises(TransportError):
        group.broadcast(torch.ones(64, dtype=torch.bfloat16))


def test_arguments_that_make_no_group_are_told(llm: Any) -> None:
    for arguments, text in (
        (("127.0.0.1", 1, 1, 3, "", "gloo"), "all three are needed"),
        (("127.0.0.1", 1, 1, 3, "openrlhf", "nccl"), "NCCL needs a GPU"),
        (("127.0.0.1", 1, 1, 3, "openrlhf", "gloo", True), "neither"),
    ):
        assert text in error_of(in_thread(llm.collective_rpc, "init_process_group", args=arguments))
    assert "in no group" in error_of(in_thread(llm.collective_rpc, "update_weight", args=("model.norm.weight", "bfloat16", [64])))


class TestSharedMemory:
    """`update_weight_cuda_ipc`, with segments in the place of CUDA's handles."""

    def send(self, llm: Any, weights: dict[str, torch.Tensor], devices: list[str], wrong: str | None = None) -> Any:
        segment = Segment(max(tensor.nbytes for tensor in weights.values()))
        try:
            for index, (name, tensor) in enumerate(weights.items(), 1):
                torch.from_numpy(segment.view)[: tensor.nbytes].copy_(bits(tensor))
                handles = {device: (SEGMENT, [segment.name, segment.size]) for device in devices}
                shape = [1, *tensor.shape, 7] if name == wrong else list(tensor.shape)
                arguments = (name, str(tensor.dtype), shape, handles, index == len(weights))
                calling = in_thread(llm.collective_rpc, "update_weight_cuda_ipc", args=arguments)
                calling.exception(60)
        finally:
            segment.close()
        return calling

    def test_the_sequence(self, llm: Any, fresh: Generated) -> None:
        devices = llm.collective_rpc("report_device_id")
        for seed in (3, 2):
            statuses = self.send(llm, dict(tiny(FAMILY, seed).named_parameters()), devices).result()
            assert [status["committed"] for status in statuses] == [True, True]
        assert generated(llm) == fresh

    def test_a_device_without_a_handle_is_refused(self, llm: Any, fresh: Generated) -> None:
        devices = llm.collective_rpc("report_device_id")
        self.send(llm, dict(tiny(FAMILY, 2).named_parameters()), devices)
        assert "nothing is meant for this worker's device" in error_of(
            self.send(llm, dict(tiny(FAMILY, 3).named_parameters()), devices[:1])
        )
        wrong = self.send(llm, dict(tiny(FAMILY, 3).named_parameters()), devices, wrong="model.layers.0.self_attn.o_proj.weight")
        assert "shape" in error_of(wrong)
        assert generated(llm) == fresh


def test_the_example_runs(
    llm: Any, fresh: Generated, checkpoints: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("open_instruct.py", llm, checkpoints(FAMILY, 2), monkeypatch)
    assert f"after: [{fresh[0][0]}" in capsys.readouterr().out
