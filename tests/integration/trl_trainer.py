"""A real GRPO trainer of TRL with a colocated vLLM, in a process of its own: vLLM makes it one of a distributed run.

    python trl_trainer.py FOLDER plain|lora|ranks|URL [stock]

writes FOLDER/seen-RANK.json: what was seen at each generation and after each push. `plain` has a push that is refused at its end; `lora`
has a vLLM that loses its weights between generations, as it does in sleep mode on a GPU; `ranks` is for several processes of torchrun, and
shards the model at its end. URL is that of a server. `stock` leaves TRL as it is.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from engines import greedy
from models import add_tokenizer, save, tiny

STEPS = 3
GENERATIONS = 2
"""How often a step generates."""
PROMPTS = [[5, 17, 33], [60, 91]]


class Looking:
    """Looks at what is generated for a trainer: did the engine compute what the trainer computes?"""

    def __init__(self, trainer: Any, seen: list[dict[str, Any]]) -> None:
        self.trainer, self.seen, self.model = trainer, seen, trainer.accelerator.unwrap_model(trainer.model)
        self.generate, trainer.vllm_generation.generate = trainer.vllm_generation.generate, self

    def __call__(self, **arguments: Any) -> Any:
        found = self.generate(**arguments)
        prompts, completions, logprobs, _ = found
        gap = 0.0
        for prompt, tokens, told in zip(prompts, completions, logprobs, strict=True):
            gap = max(gap, (torch.tensor([one for (one,) in told]) - self.of_trainer(prompt, tokens)).abs().max().item())
        self.seen.append({
            "step": self.trainer.state.global_step, "gap": gap, "fixed": self.of_trainer([1, 2, 3], list(range(4, 44))).tolist(),
        })  # fmt: skip
        return found

    def of_trainer(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0].float()
        return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]


def checkpoint(folder: Path) -> Path:
    return add_tokenizer(save(tiny("qwen3", 1, initializer_range=0.04), folder))


def built(folder: Path, kind: str) -> Any:
    import trl.generation.vllm_generation as theirs
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    theirs.LLM = functools.partial(theirs.LLM, enforce_eager=True)  # to compile takes longer than all the rest
    theirs.VLLMClient.init_communicator = lambda self, device: None  # TRL's own way to a server is NCCL
    server = {"vllm_mode": "server", "vllm_server_base_url": kind} if kind.startswith("http") else {"vllm_mode": "colocate"}
    config = GRPOConfig(
        output_dir=str(folder / "out"), max_steps=STEPS, learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=1e6,
        per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=GENERATIONS, steps_per_generation=1,
        max_completion_length=8, use_vllm=True, vllm_max_model_length=64, **server,
        model_init_kwargs={"dtype": "float32"}, gradient_checkpointing=False, use_cpu=True, bf16=False,
        report_to=[], save_strategy="no", disable_tqdm=True, seed=5,
    )  # fmt: skip
    return GRPOTrainer(
        str(folder / "model"),
        reward_funcs=lambda completion_ids, **_: [float(sum(tokens)) for tokens in completion_ids],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["t5 t17 t33", "t60 t91", "t120", "t3 t4 t5 t6"] * 4}),
        peft_config=LoraConfig(r=4, lora_alpha=32, target_modules="all-linear") if kind == "lora" else None,
    )


def loses_its_weights(generation: Any) -> None:
    """Has vLLM's worker do on a CPU, where vLLM does not sleep, what `sleep(level=2)` does to weights on a GPU."""
    engine = generation.llm.llm_engine
    worker = engine.model_executor.driver_worker.worker

    def sleep(level: int = 1) -> None:
        if level == 2:
            for parameter in worker.model_runner.get_model().parameters():
                parameter.data.zero_()

    worker.sleep, worker.wake_up = sleep, lambda tags=None: None
    generation.enable_sleep_mode = generation._llm_weights_sleeping = engine.vllm_config.model_config.enable_sleep_mode = True
    generation.llm.sleep(level=2)


def refused(trainer: Any) -> dict[str, Any]:
    """What becomes of a training whose model has grown, so that the engine cannot take it, and of the next one."""
    llm, model = trainer.vllm_generation.llm, trainer.accelerator.unwrap_model(trainer.model)
    before, error = greedy(llm, PROMPTS), None
    model.resize_token_embeddings(160)
    try:
        trainer.train()
    except Exception as caught:
        error = [type(caught).__name__, str(caught)]
    found = {"error": error, "serves": version(llm), "same": greedy(llm, PROMPTS) == before}
    model.resize_token_embeddings(150)
    trainer.train()
    return found


def sharded(trainer: Any, look: Looking) -> None:
    """Pushes weights that FSDP2 has sharded, and generates. Accelerate shards on GPUs alone."""
    from torch.distributed.fsdp import fully_shard

    from instep.integrations.trl import follow

    generation, model = trainer.vllm_generation, trainer.vllm_generation.model
    for part in (*model.model.layers, model):
        fully_shard(part, reshard_after_forward=True)  # a backward pass does so otherwise
    generation._dist.fsdp_version = 2
    del generation.sync_weights
    follow(trainer)
    for _ in range(2):  # the second push streams what the first has held
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.8)
        trainer.state.global_step += 1
        generation.sync_weights()
        look(prompts=PROMPTS, images=None, num_generations=1)


def version(llm: Any) -> str:
    (told,) = llm.collective_rpc("instep_status")
    return str(told["version"])


def main(folder: Path, kind: str, how: str = "follow") -> dict[str, Any]:
    seen: dict[str, Any] = {"generations": [], "pushes": []}
    trainer = built(folder, kind)
    generation = trainer.vllm_generation
    frozen = {name: param.clone() for name, param in trainer.model.named_parameters() if not param.requires_grad}
    if kind == "lora":
        loses_its_weights(generation)
    if how == "follow":
        from instep.integrations.trl import follow

        sync = follow(trainer, sinks=[lambda event: event.receipt and seen["pushes"].append(event.version)])
    look = Looking(trainer, seen["generations"])
    trainer.train()
    seen["frozen"] = {name: torch.equal(param, frozen[name]) for name, param in trainer.model.named_parameters() if name in frozen}
    if how == "follow":
        seen["serves"] = sync.status()[0].version
    if kind == "plain":
        seen["dtype"] = str(generation.llm.llm_engine.vllm_config.model_config.dtype)
        seen["refused"] = refused(trainer)
    if kind == "ranks":
        sharded(trainer, look)
    return seen


if __name__ == "__main__":
    target = Path(sys.argv[1])
    found = main(target, *sys.argv[2:])
    (target / f"seen-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found, indent=1))
