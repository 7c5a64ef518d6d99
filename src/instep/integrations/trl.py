"""TRL: the weight syncs of a trainer with a colocated vLLM become pushes.

    from instep.integrations.trl import follow

    trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="colocate"))
    sync = follow(trainer)
    trainer.train()

TRL itself loads one parameter after the other into the running engine, and proves none of them. A
load that fails half-way leaves weights of two steps in the engine.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from instep.errors import ConfigError
from instep.receipt import Receipt
from instep.source.pairs import PairSource
from instep.sync import WeightSync


def follow(trainer: Any, *, cast: bool = True, **settings: Any) -> WeightSync:
    """Makes every weight sync of a TRL trainer a push into the trainer's own vLLM.

    Returns the `WeightSync` that pushes: `sync.status()` says what the engine serves, and a sink
    (`follow(trainer, sinks=[print])`) is told of each push. When TRL syncs stays TRL's decision.

    trainer: one that has `vllm_generation`, such as `GRPOTrainer` or `RLOOTrainer`, with
    `use_vllm=True, vllm_mode="colocate"`. Its model may be plain or have PEFT adapters, which are
    pushed merged while the trainer's weights are left alone.
    cast: whether weights are converted to the engine's dtype. TRL gives vLLM no dtype, and vLLM
    takes bfloat16 for a model in float32.
    settings: those of `WeightSync`.

    A version is `step-N`, by the trainer's step. A step that is pushed more than once has a number
    behind: `step-N.2`.

    Raises `ConfigError` for a trainer without vLLM, for `vllm_mode="server"`, for tensor
    parallelism, for an engine whose workers run in other processes without instep, and for a
    trainer that follows already. Later, TRL's `sync_weights` raises what `WeightSync.push` raises,
    and the training ends with that error.
    """
    generation = _colocated(trainer)
    spread = generation._dist.is_fsdp or generation._dist.is_zero3
    sync = WeightSync(PairSource() if spread else generation.model, [generation.llm], cast=cast, **settings)
    pushed = Counter[int]()

    def sync_weights() -> Receipt:
        step = trainer.state.global_step
        pushed[step] += 1
        if generation.enable_sleep_mode:
            torch.cuda.empty_cache()  # the engine's weights need the room
            generation.llm.wake_up(tags=["weights"])
        # Parameters of FSDP and ZeRO-3 are gathered one by one, by all ranks: each has an engine of its own.
        pairs = generation._iter_named_params() if spread else None
        receipt = sync.push(f"step-{step}" if pushed[step] == 1 else f"step-{step}.{pushed[step]}", pairs=pairs)
        generation._llm_weights_sleeping = False  # not before: a push that failed brought none
        return receipt

    generation.sync_weights = sync_weights
    return sync


def _colocated(trainer: Any) -> Any:
    """Returns what a trainer generates with. Raises `ConfigError` where that is no colocated vLLM."""
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None:
        raise ConfigError(
            f"{type(trainer).__name__} does not generate with vLLM: there is nothing to push to",
            next_step='give its arguments use_vllm=True and vllm_mode="colocate"',
        )
    if generation.mode != "colocate":
        raise ConfigError(
            f'vllm_mode="{generation.mode}": TRL talks to a server in its own way there',
            next_step='train with vllm_mode="colocate"; to push to servers of `instep serve`, make a WeightSync with their URLs',
        )
    if generation.tensor_parallel_size > 1:
        raise ConfigError(
            f"vllm_tensor_parallel_size={generation.tensor_parallel_size}: each process has one worker of an engine there, and a push "
            "needs all of them at once",
            next_step="train with vllm_tensor_parallel_size=1: each process then has an engine of its own",
        )
    if "sync_weights" in vars(generation):
        raise ConfigError("this trainer's weight syncs are replaced already", next_step="call follow(trainer) once")
    return generation
