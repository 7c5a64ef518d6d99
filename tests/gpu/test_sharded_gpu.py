"""Two ranks under FSDP2, on a GPU each where there are two, bring an engine on the second one's to their weights over CUDA IPC: half of
them cross, nothing is gathered."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_models import PROMPTS, folder, greedy, start, stop_vllm
from gpu_ranks import ROWS, Ranks, local
from gpus import OTHER, OTHER_DEVICE
from helpers.far_engine import FarEngine

pytestmark = pytest.mark.timeout(600)
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'instep[vllm]'")

DEVICES = ("cuda:0", OTHER_DEVICE)
TRANSPORT: Any = "ipc"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(DEVICES)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def engine(ranks: Ranks) -> Iterator[FarEngine]:
    engine = FarEngine(ranks.tensors, DEVICES[1])
    yield engine
    engine.stop()


def test_twenty_versions_arrive_bit_by_bit_and_nothing_is_gathered(ranks: Ranks, engine: FarEngine) -> None:
    with ranks.opened("model", engine, TRANSPORT) as sync:
        for version in range(20):
            ranks.step()
            receipt = ranks.push(sync, f"v{version}")
            assert engine.holds(ranks.tensors)
        assert receipt.transport == TRANSPORT
        assert receipt.engines[0].direct
        assert receipt.engines[0].read_back == receipt.tensors
        source: Any = sync._session.source.source
        assert source.meeting.group is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_number_that_is_not_finite_is_found_in_either_rank(ranks: Ranks, engine: FarEngine, rank: int) -> None:
    name = ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"][rank]
    with ranks.opened("model", engine, TRANSPORT) as sync:
        assert ranks.push(sync, f"finite-{rank}").non_finite == ()
        here = local(ranks.sharded, name)
        before = here.clone()
        if rank == 0:
            here.view(-1)[-1] = float("nan")
        else:
            with ranks.peer.doing("poison", name):
                pass
        assert ranks.push(sync, f"poisoned-{rank}").non_finite == (name,)
        if rank == 0:
            here.copy_(before)
        else:
            with ranks.peer.doing("heal"):
                pass
        assert ranks.push(sync, f"healed-{rank}").non_finite == ()
        assert engine.holds(ranks.tensors)


def test_shards_of_any_size_arrive(ranks: Ranks) -> None:
    """Also those that cut a word in two: they are brought together in rank 0, and no others are."""
    engine = FarEngine(ranks.gathered_rows(), DEVICES[1], name="rows")
    try:
        with ranks.opened("rows", engine, TRANSPORT) as sync:
            for version in range(8):
                ranks.negate_rows()
                ranks.push(sync, f"v{version}")
                assert engine.holds(ranks.gathered_rows())
            if TRANSPORT == "ipc":
                (published,) = [one for one in sync._session.transport.candidates.values() if one is sync._session.transport.used]
                assert set(published.laid.staged) == {"cuts-a-word", "odd-vector"} < ROWS.keys()
    finally:
        engine.stop()


@needs_vllm
def test_a_real_vllm_generates_what_one_that_loads_from_disk_does(ranks: Ranks, tmp_path: Path) -> None:
    ranks.step()
    ranks.save(tmp_path)
    ranks.step()
    llm = start(tmp_path, "0", load_format="auto")
    from_disk = greedy(llm, PROMPTS)
    stop_vllm(llm)
    llm = start(folder("tiny"), OTHER)
    try:
        with ranks.opened("model", llm, TRANSPORT) as sync:
            ranks.push(sync, "other")
            assert greedy(llm, PROMPTS) != from_disk
            ranks.step()
            receipt = ranks.push(sync, "saved")
            assert greedy(llm, PROMPTS) == from_disk
            assert receipt.transport == TRANSPORT
            assert receipt.engines[0].reload == {}
    finally:
        stop_vllm(llm)
