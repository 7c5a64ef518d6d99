"""NCCL between two GPUs, two tensor-parallel workers, requests in flight, and what is taken where CUDA IPC is not to be had."""

from __future__ import annotations

import asyncio
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
from gpu_models import EXTENSION, MEMORY, PROMPTS, folder, greedy, model, start, stop_vllm, visible

from instep import WeightSync
from instep.errors import InstepError

SECONDS = 30

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'instep[vllm]'"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def used(sync: WeightSync) -> str:
    assert sync._session.current is not None
    return sync._session.current.location.transport


@pytest.fixture(scope="module")
def other_gpu(checkpoint: Path) -> Iterator[Any]:
    """On GPU 1, loaded from disk."""
    llm = start(checkpoint, "1", load_format="auto", enforce_eager=False)
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
                free.append([torch.cuda.mem_get_info(device)[0] for device in range(2)])
        assert all(after >= before - (8 << 20) for before, after in zip(*free, strict=True))


def test_a_trainer_that_stops_sending_leaves_a_dirty_engine_that_a_push_heals(other_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives up after the first bucket: the engine has part of the new version, says so, refuses, and takes the next push."""
    from instep.transport import broadcast

    monkeypatch.setitem(broadcast.WAYS, "nccl", broadcast.Way(256 << 10, "commit", on_gpu=True))
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
    from gpu_models import folder, greedy, model, start
    from instep import WeightSync
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    if __name__ == "__main__":
        llm = start(folder("tiny"), "1")
        trainer = model("tiny", 1, "cuda:0")
        with WeightSync(trainer, [llm]) as sync:
            sync.push("one")
            print("USED", sync._session.current.location.transport)
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


async def _generate(llm: Any, prompt: list[int], name: str, tokens: int) -> Any:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, detokenize=False, ignore_eos=True)
    return [output async for output in llm.generate({"prompt_token_ids": prompt}, sampling, name) if output.finished]


async def _pushes_beside_requests(llm: Any, transport: Any) -> None:
    """Requests all the time, pushes all the time: each request ends once with all of its tokens, and the last version is right."""
    trainer, tokens, finished, stop = model("tiny", 2, "cuda:0"), 64, 0, False
    with WeightSync(trainer, [llm], transport=transport) as sync:
        await sync.apush("first")
        reference = [list((await _generate(llm, prompt, f"r-{i}", 12))[0].outputs[0].token_ids) for i, prompt in enumerate(PROMPTS)]

        async def stream(lane: int) -> int:
            count = 0
            while not stop:
                outputs = await _generate(llm, [lane + 1, count % 500, 3], f"lane-{lane}-{count}", tokens)
                assert [len(output.outputs[0].token_ids) for output in outputs] == [tokens]
                count += 1
            return count

        lanes = [asyncio.create_task(stream(lane)) for lane in range(8)]
        began, pushes, slowest = time.monotonic(), 0, 0.0
        while time.monotonic() - began < SECONDS:
            with torch.no_grad():
                for param in trainer.parameters():
                    param.neg_()
            receipt = await sync.apush(f"v-{pushes}")
            slowest = max(slowest, receipt.pause)
            pushes += 1
            await asyncio.sleep(0)
            assert not any(lane.done() for lane in lanes)
        stop = True
        finished = sum(await asyncio.wait_for(asyncio.gather(*lanes), 60))
        if pushes % 2:
            with torch.no_grad():
                for param in trainer.parameters():
                    param.neg_()
            await sync.apush("last")
        again = [list((await _generate(llm, prompt, f"a-{i}", 12))[0].outputs[0].token_ids) for i, prompt in enumerate(PROMPTS)]
        assert again == reference
        assert (await sync.astatus())[0].serving == "old"
        print(f"{transport}: {pushes} pushes, {finished} requests of {tokens} tokens in {SECONDS} s, longest pause {1e3 * slowest:.0f} ms")
        assert pushes > 20
        assert finished > 20


@pytest.mark.timeout(400)
def test_pushes_for_half_a_minute_beside_requests_in_flight(checkpoint: Path) -> None:
    async def main() -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        torch.cuda.init()
        arguments = AsyncEngineArgs(
            model=str(folder("tiny")), load_format="dummy", max_model_len=512, max_num_seqs=16, **MEMORY,
            skip_tokenizer_init=True, worker_extension_cls=EXTENSION, enforce_eager=False,
        )  # fmt: skip
        with visible("1"):
            llm = AsyncLLM.from_engine_args(arguments)
        try:
            for transport in ("ipc", "nccl"):
                await _pushes_beside_requests(llm, transport)
        finally:
            llm.shutdown()

    asyncio.run(main())
