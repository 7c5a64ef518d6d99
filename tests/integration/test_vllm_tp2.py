"""Tensor parallelism over two workers: their slices by shared memory and by Gloo, which is what an engine on another host gets, a peer that
dies on the way, and a worker that is killed in the middle of a commit. One engine for the whole file."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import Generated, greedy
from models import PROMPTS, tiny

from instep import MemoryEngine, WeightSync
from instep.errors import ApplyError, EngineDirty, EngineLost, TransportError


@pytest.fixture(scope="module")
def llm(engine: Callable[..., Any], checkpoints: Callable[[str, int], Path]) -> Any:
    """Loaded from disk, with the weights of seed 2."""
    return engine(checkpoints("qwen3", 2), load_format="auto", tensor_parallel_size=2, worker_extension_cls="faulty.FaultyExtension")


@pytest.fixture(scope="module")
def from_disk(llm: Any) -> Generated:
    """What it generates before any push."""
    return greedy(llm, PROMPTS)


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_two_workers_take_their_slices(llm: Any, from_disk: Generated, transport: Any) -> None:
    """Away from the weights that were loaded from disk, and back to them by a push: the same tokens and log-probabilities, bit for bit."""
    model = tiny("qwen3", 3)
    with WeightSync(source=model, engines=[llm], transport=transport) as sync:
        sync.push("away")
        assert greedy(llm, PROMPTS) != from_disk
        model.load_state_dict(tiny("qwen3", 2).state_dict())
        sync.push("back")
        assert greedy(llm, PROMPTS) == from_disk


DIES = textwrap.dedent("""
    import os, sys, torch
    from instep.transport.group import Group
    from instep.transport.store import find
    key, host, port = sys.argv[1].split("@")
    group = Group("gloo", find(host, int(port), 20), key, 3, 4, torch.device("cpu"), 20)
    os._exit(0)
""")


def test_a_peer_that_dies_on_the_way_leaves_the_engine_with_what_it_served(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fourth rank, which stands for another engine's worker, joins the group and is gone before the first bucket."""
    before = greedy(llm, PROMPTS)
    with WeightSync(source=tiny("qwen3", 4), engines=[llm], transport="gloo", timeout=20) as sync:
        transport = sync._session.transport.candidates["gloo"]
        publish = transport.publish

        def with_a_peer(tensors: Any, values: Any) -> Any:
            transport.wanted = {**transport.wanted, "another": 3}  # type: ignore[attr-defined]
            published = publish(tensors, values)
            processes.append(subprocess.Popen([sys.executable, "-c", DIES, published.location.address]))
            return published

        processes: list[subprocess.Popen[bytes]] = []
        monkeypatch.setattr(transport, "publish", with_a_peer)
        started = time.monotonic()
        with pytest.raises(TransportError):
            sync.push("never")
        assert time.monotonic() - started < 20
        assert processes[0].wait(timeout=20) == 0
        assert greedy(llm, PROMPTS) == before
        assert [state.serving for state in sync.status()] == ["old"]
        monkeypatch.undo()
        sync.push("now")
        assert greedy(llm, PROMPTS) != before


def test_one_worker_that_fails_makes_the_engine_dirty(llm: Any) -> None:
    """One rank has the new version and the other has not: that is a mixture too."""
    model = tiny("qwen3", 2)
    with WeightSync(source=model, engines=[llm]) as sync:
        sync.push("whole")
        before = greedy(llm, PROMPTS)
        llm.collective_rpc("inject", args=("step", 4))
        with pytest.raises(ApplyError, match="rank 0"):
            sync.push("halved")
        with pytest.raises(EngineDirty):
            greedy(llm, PROMPTS)
        sync.push("whole-again")
        assert greedy(llm, PROMPTS) == before


def test_a_worker_killed_in_a_commit_is_named_and_the_other_engine_goes_on(llm: Any) -> None:
    """Last in this file: the engine does not survive it."""
    weights = {
        name: tensor for name, tensor in tiny("qwen3", 2).state_dict().items() if name != "lm_head.weight"
    }  # the engine ties its head
    other = MemoryEngine(weights, name="other")
    with WeightSync(source=weights, engines=[llm, other], timeout=30) as sync:
        sync.push("before")
        weights.update({name: tensor + 0.5 for name, tensor in weights.items()})
        llm.collective_rpc("inject", args=("die:commit", 1))
        started = time.monotonic()
        with pytest.raises(EngineLost, match="vllm") as failure:
            sync.push("after")
        assert time.monotonic() - started < 35
        assert {state.engine: state.serving for state in failure.value.engines} == {"vllm": "unknown", "other": "new"}
        assert other.version == "after"
        assert other.fingerprint() == MemoryEngine(weights).fingerprint()
        assert {state.engine: state.serving for state in sync.status()} == {"vllm": "unknown", "other": "old"}
