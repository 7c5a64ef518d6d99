"""NCCL between two processes, two tensor-parallel workers, and what is taken where CUDA IPC is not to be had."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import PROMPTS, greedy, model, start, stop_vllm
from gpus import OTHER

from instep import WeightSync
from instep.errors import InstepError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'instep[vllm]'")


def used(sync: WeightSync) -> str:
    assert sync._session.current is not None
    return sync._session.current.manifest.location.transport


@pytest.fixture(scope="module")
def other_gpu(checkpoint: Path) -> Iterator[Any]:
    """On the other GPU, loaded from disk."""
    llm = start(checkpoint, OTHER, load_format="auto", enforce_eager=False)
    yield llm
    stop_vllm(llm)


def test_nccl_pushes_are_bit_equal_and_stream_into_live_storage(other_gpu: Any) -> None:
    from_disk = greedy(other_gpu, PROMPTS)
    trainer = model("tiny", 1, "cuda:0")
    with WeightSync(trainer, [other_gpu], transport="nccl") as sync:
        sync.push("one")
        assert greedy(other_gpu, PROMPTS) != from_disk
        trainer.load_state_dict(model("tiny", 2, "cuda:0").state_dict())
        second = sync.push("two")
        assert greedy(other_gpu, PROMPTS) == from_disk
        assert used(sync) == "nccl"
        assert "prepare" not in second.seconds  # one call
        assert second.engines[0].reload == {}
        assert second.engines[0].read_back == second.tensors
        with torch.no_grad():
            trainer.model.norm.weight[5] = float("inf")
        assert sync.push("three").non_finite == ("model.norm.weight",)
        trainer.load_state_dict(model("tiny", 2, "cuda:0").state_dict())
        sync.push("four")
        assert greedy(other_gpu, PROMPTS) == from_disk


def test_memory_stays_flat_over_nccl(other_gpu: Any) -> None:
    trainer = model("tiny", 3, "cuda:0")
    with WeightSync(trainer, [other_gpu], transport="nccl") as sync:
        free = []
        for update in range(100):
            with torch.no_grad():
                trainer.model.norm.weight.neg_()
            sync.push(f"flat-{update}")
            if update in (20, 99):
                free.append([torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count())])
        assert all(after >= before - (8 << 20) for before, after in zip(*free, strict=True))


def test_a_trainer_that_stops_sending_leaves_a_dirty_engine_that_a_push_heals(other_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives up after the first bucket: the engine has part of the new version, says so, refuses, and takes the next push."""
    from instep.transport.broadcast import publish as broadcast

    monkeypatch.setitem(broadcast.SETTINGS, "nccl", broadcast.Settings(256 << 10, "commit", on_gpu=True))
    trainer = model("tiny", 2, "cuda:0")
    with WeightSync(trainer, [other_gpu], transport="nccl", timeout=20) as sync:
        sync.push("whole")
        before = greedy(other_gpu, PROMPTS)
        packed = broadcast.BroadcastTransport._packed

        def breaks(*arguments: Any) -> Iterator[torch.Tensor]:
            for index, bucket in enumerate(packed(*arguments)):
                if index == 3:
                    raise RuntimeError("the trainer's disk is gone")
                yield bucket

        monkeypatch.setattr(broadcast.BroadcastTransport, "_packed", breaks)
        started = time.monotonic()
        with pytest.raises(InstepError, match="disk is gone"):
            sync.push("halved")
        assert time.monotonic() - started < 20
        with pytest.raises(InstepError, match="refuses to generate"):
            greedy(other_gpu, PROMPTS)
        monkeypatch.setattr(broadcast.BroadcastTransport, "_packed", packed)
        sync.push("whole-again")
        assert greedy(other_gpu, PROMPTS) == before


FALLBACK = textwrap.dedent("""
    import logging, sys, torch
    sys.path[:0] = [sys.argv[1]]
    from gpu_models import folder, model, start, stop_vllm
    from gpus import OTHER, on_host
    from instep import WeightSync
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    if __name__ == "__main__":
        on_host("trainer")
        llm = start(folder("tiny"), OTHER)
        trainer = model("tiny", 1, "cuda:0")
        with WeightSync(trainer, [llm]) as sync:
            sync.push("one")
            print("USED", sync._session.current.manifest.location.transport)
        stop_vllm(llm)
""")


def test_expandable_segments_are_explained_and_nccl_is_taken(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FALLBACK)
    done = subprocess.run(
        [sys.executable, program, Path(__file__).parent],
        env={**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "USED nccl" in done.stdout
    assert "not ipc, because the trainer's GPU memory cannot be shared: its memory is in expandable segments" in done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_workers_on_two_gpus_one_of_them_the_trainers(checkpoint: Path) -> None:
    llm = start(checkpoint, load_format="auto", enforce_eager=False, tensor_parallel_size=2)
    try:
        from_disk = greedy(llm, PROMPTS)
        trainer = model("tiny", 1, "cuda:0")
        with WeightSync(trainer, [llm]) as sync:
            sync.push("one")
            assert greedy(llm, PROMPTS) != from_disk
            trainer.load_state_dict(model("tiny", 2, "cuda:0").state_dict())
            receipt = sync.push("two")
            assert greedy(llm, PROMPTS) == from_disk
            assert used(sync) == "ipc"
            assert receipt.engines[0].read_back > 0
        with WeightSync(trainer, [llm], transport="nccl") as sync, pytest.raises(InstepError, match="share a GPU"):
            sync.push("three")
    finally:
        stop_vllm(llm)
