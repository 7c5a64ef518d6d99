"""Reinforcement learning without waiting, on one machine: two actors answer prompts with the weights that they have, a trainer learns from
the answers as they come, and pushes its weights into the running engines after each step.

    python examples/grpo_ray.py MODEL [STEPS]

MODEL: a checkpoint directory, or a name on the Hugging Face hub. It learns to say tokens of small numbers: nothing of use, but a random
model learns it within ten steps. `instep demo --ray` is the same with a model that speaks, a table and a picture.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from statistics import mean
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM

from instep import WeightSync
from instep.demo import grpo
from instep.demo.ray_loop import Numbers, group_of
from instep.generation import Label, PromptId, PromptRequest, RewardConfig, Sampling
from instep.generation.ray import RolloutQueues, create_vllm_engines

BATCH, SAMPLES, LENGTH = 8, 8, 8
AHEAD = 2  # batches that are under way while the trainer learns
WAIT = 300.0  # seconds for a result


async def small_numbers(answer: Any, bound: int) -> float:
    """A verifier: the share of the reply's tokens that are below `bound`. It runs in the actors."""
    token_ids = answer.sample.token_ids
    return sum(token < bound for token in token_ids) / len(token_ids)


def prompts(vocabulary: int) -> Iterator[PromptRequest]:
    rng = random.Random(0)
    number = 0
    while True:
        tokens = [rng.randrange(vocabulary) for _ in range(8)]
        yield PromptRequest(
            id=PromptId("train", 0, str(number)),
            prompt_token_ids=tokens,
            sampling=Sampling(n=SAMPLES, max_tokens=LENGTH, ignore_eos=True),
            labels=(Label("small", vocabulary // 4),),
        )
        number += 1


def main(path: str, steps: int) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    queues = RolloutQueues()
    engines = create_vllm_engines(
        2,
        pretrain=path,
        enforce_eager=True,
        max_model_len=64,
        prompt_queue=queues.prompts,
        results_queue=queues.results,
        tokenizer=Numbers(),  # a chat model's own is the default
        reward_config=RewardConfig(verifiers={"small": small_numbers}, verification_reward=1.0),
        engine_args={"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 28},
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source = prompts(model.config.vocab_size)
    with WeightSync(model, engines) as sync:
        sync.push("step-0")
        for _ in range(AHEAD * BATCH):
            queues.prompts.put(next(source))
        for step in range(1, steps + 1):
            groups = []
            versions: set[str] = set()
            for _ in range(BATCH):
                result = queues.results.get(timeout=WAIT)
                queues.prompts.put(next(source))
                groups.append(group_of(result))
                versions |= {span.version for sample in result.samples for span in sample.versions}
            batch = grpo.pack(groups)
            grpo.loss(grpo.token_logprobs(model, batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            receipt = sync.push(f"step-{step}")  # the actors go on meanwhile
            reward = mean(reward for group in groups for reward in group.rewards)
            pause = max(engine.pause for engine in receipt.engines)
            print(f"step {step}: reward {reward:.2f}, tokens of {', '.join(sorted(versions))}, actors paused {1e3 * pause:.0f} ms")
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 12)
