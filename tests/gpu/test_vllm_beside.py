"""Requests in flight while versions arrive one after the other: none is lost, none waits for a message that does not come."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time
from typing import Any

import pytest
import torch
from gpu_models import EXTENSION, MEMORY, PROMPTS, folder, model, visible
from gpus import ALONE, OTHER, apart

from instep import WeightSync

SECONDS = 30

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'instep[vllm]'")


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
@pytest.mark.parametrize(
    ("gpu", "transports"), [("0", ["ipc"]), (OTHER, ["nccl"] if ALONE else ["ipc", "nccl"])], ids=["the trainer's GPU", "the other GPU"]
)
def test_pushes_for_half_a_minute_beside_requests_in_flight(gpu: str, transports: list[str]) -> None:
    """With vLLM's scheduler a step ahead, as it is on GPUs: it finishes a step before it is paused, and goes on by itself afterwards."""

    async def main() -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        torch.cuda.init()
        arguments = AsyncEngineArgs(
            model=str(folder("tiny")), load_format="dummy", max_model_len=512, max_num_seqs=16, **MEMORY,
            skip_tokenizer_init=True, worker_extension_cls=EXTENSION, enforce_eager=False,
        )  # fmt: skip
        with visible(gpu), apart():
            llm = AsyncLLM.from_engine_args(arguments)
        try:
            assert llm.vllm_config.scheduler_config.async_scheduling
            for transport in transports:
                await _pushes_beside_requests(llm, transport)
        finally:
            llm.shutdown()

    asyncio.run(main())
