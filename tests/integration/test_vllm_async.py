"""Requests in flight while a push lands: none is lost, each ends once, and each says which tokens came from which version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import ARGUMENTS, completion, settings
from models import PROMPTS, tiny

from instep import WeightSync
from instep.errors import ApplyError, EngineDirty

LENGTH = 60


async def generate(llm: Any, prompt: list[int], name: str, tokens: int = LENGTH) -> list[Any]:
    """Every finished output of one request."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True)
    return [output async for output in llm.generate({"prompt_token_ids": prompt}, sampling, name) if output.finished]


async def started(llm: Any, tokens: int) -> None:
    """Returns when every request that the engine knows has this many tokens."""
    states = llm.output_processor.request_states
    while not states or min(state.detokenizer.num_output_tokens() for state in states.values()) < tokens:  # noqa: ASYNC110
        await asyncio.sleep(0.005)  # vLLM tells nobody when a token is out


async def in_flight(llm: Any, reference: Callable[..., Any]) -> None:
    model = tiny("qwen3", 2)
    with WeightSync(source=model, engines=[llm], canary=PROMPTS[0]) as sync:
        await sync.apush("v1")
        fresh = [(await generate(llm, prompt, f"fresh-{i}", 12))[0] for i, prompt in enumerate(PROMPTS)]
        assert [completion(output) for output in fresh] == reference("qwen3", 2)

        running = [asyncio.create_task(generate(llm, [i + 1, 2, 3], f"flight-{i}")) for i in range(6)]
        await started(llm, tokens=5)
        model.load_state_dict(tiny("qwen3", 3).state_dict())
        await sync.apush("v2")
        finished = await asyncio.wait_for(asyncio.gather(*running), 120)
        assert [len(outputs) for outputs in finished] == [1] * 6
        for outputs in finished:
            output = outputs[0].outputs[0]
            assert len(output.token_ids) == LENGTH
            spans = [(span.version, span.start, span.end) for span in output.weight_versions]
            assert [version for version, _, _ in spans] == ["v1", "v2"]
            assert spans[0][1] == 0
            assert spans[0][2] == spans[1][1]
            assert spans[1][2] == LENGTH
        again = [(await generate(llm, prompt, f"again-{i}", 12))[0] for i, prompt in enumerate(PROMPTS)]
        assert [completion(output) for output in again] == reference("qwen3", 3)

        # Dirty: requests in flight end, new ones are refused, and a push heals.
        await llm.collective_rpc("inject", args=("step", 5))
        running = [asyncio.create_task(generate(llm, [i + 1, 2, 3], f"dirty-{i}")) for i in range(3)]
        await started(llm, tokens=1)
        with pytest.raises(ApplyError, match="told to fail"):
            await sync.apush("v3")
        ended = await asyncio.wait_for(asyncio.gather(*running), 60)
        assert [len(outputs) for outputs in ended] == [1] * 3
        assert {outputs[0].outputs[0].finish_reason for outputs in ended} == {"abort"}
        with pytest.raises(EngineDirty):
            await generate(llm, [1, 2, 3], "refused")
        await sync.apush("v4")
        healed = [(await generate(llm, prompt, f"healed-{i}", 12))[0] for i, prompt in enumerate(PROMPTS)]
        assert [completion(output) for output in healed] == reference("qwen3", 3)

        # From another thread, on another loop: the calls find the loop that the engine lives on.
        await asyncio.to_thread(sync.push, "v5")
        assert (await llm.get_weight_version()) == "v5"


def test_requests_in_flight(checkpoints: Callable[[str, int], Path], reference: Callable[..., Any]) -> None:
    async def main() -> None:
        with settings():
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            arguments = {**ARGUMENTS, "worker_extension_cls": "faulty.FaultyExtension", "load_format": "dummy"}
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(checkpoints("qwen3", 1)), **arguments))
        try:
            await in_flight(llm, reference)
        finally:
            llm.shutdown()

    asyncio.run(main())
