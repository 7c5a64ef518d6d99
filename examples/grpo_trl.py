"""TRL's GRPO with a colocated vLLM that instep keeps in step: two lines more than TRL's own example.

    python examples/grpo_trl.py MODEL

MODEL: a checkpoint directory, or a name on the Hugging Face hub. Completions of many different letters are rewarded. Without a GPU both run
on the CPU.
"""

from __future__ import annotations

import sys

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from instep.integrations.trl import follow


def reward(completions: list[str], **_: object) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


def main(path: str) -> None:
    gpu = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir="grpo-trl", max_steps=10, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=512, max_completion_length=64,
        use_cpu=not gpu, bf16=gpu,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": ["Write a sentence.", "Say something new.", "Name a place.", "Tell a story."] * 16})
    trainer = GRPOTrainer(path, reward_funcs=reward, args=config, train_dataset=prompts)
    sync = follow(trainer)
    trainer.train()
    print(sync.status()[0])


if __name__ == "__main__":
    main(sys.argv[1])
