"""An actor on Ray with a vLLM over two GPUs: it takes weights in flight, and says what the trainer's own forward says."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import PROMPTS, model

from instep import WeightSync
from instep.generation import PromptId, PromptRequest, Sampling

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'instep[vllm]'"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'instep[ray]'"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SOON = 300.0
CLOSE = 0.25  # nats, bfloat16 in two kernels


class Numbers:
    """A tokenizer for a model without one."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


@pytest.fixture(scope="module")
def actor(checkpoint: Path) -> Iterator[Any]:
    import ray

    from instep.generation.ray.engines import create_vllm_engines

    ray.init(include_dashboard=False)  # what an engine says that does not start comes here
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import this file
    (engine,) = create_vllm_engines(
        1,
        pretrain=str(checkpoint),
        tensor_parallel_size=2,
        max_model_len=128,
        vllm_gpu_memory_utilization=0.1,
        tokenizer=Numbers(),
        engine_args={"skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 30},
        timeout=600.0,
    )
    yield engine
    ray.shutdown()


def ask(name: str, prompt: list[int], length: int) -> PromptRequest:
    sampling = Sampling(n=2, max_tokens=length, ignore_eos=True)
    return PromptRequest(id=PromptId("train", 0, name), prompt_token_ids=prompt, sampling=sampling)


def test_two_workers_follow_a_trainer_on_one_of_their_gpus(actor: Any) -> None:
    import ray

    trainer = model("tiny", 3, "cuda:0")
    with WeightSync(trainer, [actor]) as sync:
        sync.push("one")
        under_way = [actor.generate.remote(ask(f"flight-{index}", prompt, 64)) for index, prompt in enumerate(PROMPTS)]
        trainer.load_state_dict(model("tiny", 2, "cuda:0").state_dict())
        sync.push("two")
        for result in ray.get(under_way, timeout=SOON):
            for sample in result.samples:
                assert {span.version for span in sample.versions} <= {"one", "two"}
                assert sample.versions[-1].end == len(sample.token_ids) == 64
        for index, prompt in enumerate(PROMPTS):
            result = ray.get(actor.generate.remote(ask(str(index), prompt, 12)), timeout=SOON)
            for sample in result.samples:
                assert {span.version for span in sample.versions} == {"two"}
                whole = torch.tensor([prompt + sample.token_ids], device="cuda:0")
                with torch.no_grad():
                    logits = trainer(whole).logits[0, len(prompt) - 1 : -1].float()
                said = logits.log_softmax(-1).gather(1, whole[0, len(prompt) :, None])[:, 0].cpu()
                assert float((said - torch.tensor(sample.logprobs)).abs().max()) < CLOSE
