"""A mixture whose experts lie in several workers: expert parallelism, data-parallel attention, and vLLM's load balancing."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import EXTENSION, MEMORY, PROMPTS, greedy, start, stop_vllm

from instep import WeightSync
from instep.bench.subjects import ENVIRONMENT
from instep.errors import PlanError
from instep.transport.group import environment

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'instep[vllm]'"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SETTINGS = {"enable_expert_parallel": True, "load_format": "auto"}


def mixture(seed: int) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=1024, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2,
        decoder_sparse_step=1, norm_topk_prob=True, initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("cuda:0"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    mixture(2).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(saved: Path) -> Iterator[Any]:
    found = start(saved, tensor_parallel_size=2, **SETTINGS)
    yield found
    stop_vllm(found)


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_two_workers_take_their_experts(llm: Any, transport: Any) -> None:
    trainer, from_disk = mixture(3), greedy(llm, PROMPTS)
    with WeightSync(trainer, [llm], transport=transport) as sync:
        sync.push("away")
        assert greedy(llm, PROMPTS) != from_disk
        trainer.load_state_dict(mixture(2).state_dict())
        for version in ("back", "again"):
            sync.push(version)
            assert greedy(llm, PROMPTS) == from_disk


def test_an_engine_that_balances_experts_is_refused_by_name_and_serves_on(saved: Path) -> None:
    engine = start(
        saved,
        tensor_parallel_size=2,
        enable_eplb=True,
        eplb_config={"num_redundant_experts": 2, "step_interval": 40, "window_size": 10},
        **SETTINGS,
    )
    try:
        from_disk = greedy(engine, PROMPTS)
        with WeightSync(mixture(3), [engine]) as sync, pytest.raises(PlanError, match="enable_eplb"):
            sync.push("v1")
        assert [tokens for tokens, _ in greedy(engine, PROMPTS)] == [tokens for tokens, _ in from_disk]
    finally:
        stop_vllm(engine)


async def tokens(llm: Any, name: str) -> list[list[int]]:
    """What each of two data-parallel ranks makes of the prompts."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=16, temperature=0.0, detokenize=False, ignore_eos=True)

    async def one(prompt: list[int], rank: int, at: int) -> list[int]:
        request = llm.generate({"prompt_token_ids": prompt}, sampling, f"{name}-{rank}-{at}", data_parallel_rank=rank)
        return list([output async for output in request][-1].outputs[0].token_ids)

    return [await one(prompt, rank, at) for at, prompt in enumerate(PROMPTS) for rank in (0, 1)]


async def replicas(saved: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        str(saved), data_parallel_size=2, enforce_eager=True, max_model_len=512, max_num_seqs=8, skip_tokenizer_init=True,
        worker_extension_cls=EXTENSION, **SETTINGS, **MEMORY,
    )  # fmt: skip
    with environment({**ENVIRONMENT, "VLLM_USE_FLASHINFER_SAMPLER": "0"}):
        llm = AsyncLLM.from_engine_args(arguments)
    try:
        from_disk, trainer = await tokens(llm, "disk"), mixture(3)
        with WeightSync(trainer, [llm]) as sync:
            await sync.apush("away")
            assert await tokens(llm, "away") != from_disk
            trainer.load_state_dict(mixture(2).state_dict())
            for version in ("back", "again"):
                await sync.apush(version)
                assert await tokens(llm, version) == from_disk
            under_load = [asyncio.create_task(tokens(llm, f"load-{at}")) for at in range(4)]
            for at in range(4):
                trainer.load_state_dict(mixture(3 if at % 2 == 0 else 2).state_dict())
                await sync.apush(f"load-{at}")
            await asyncio.wait_for(asyncio.gather(*under_load), 120)
            assert await tokens(llm, "after") == from_disk
    finally:
        llm.shutdown()


def test_data_parallel_replicas_that_share_experts_are_pushed_as_one(saved: Path) -> None:
    torch.cuda.init()
    asyncio.run(replicas(saved))
