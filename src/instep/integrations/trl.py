"""TRL: the weight syncs of a trainer that generates with vLLM become pushes.

    from instep.integrations.trl import follow

    trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="colocate"))
    sync = follow(trainer)
    trainer.train()

TRL itself loads one parameter after the other into the running engine, and proves none of them. A
load that fails half-way leaves weights of two steps in the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import torch

from instep.errors import ConfigError
from instep.receipt import Receipt
from instep.source.pairs import Pair, PairSource
from instep.sync import WeightSync


def follow(trainer: Any, *, cast: bool = True, **settings: Any) -> WeightSync:
    """Makes every weight sync of a TRL trainer a push. When TRL syncs stays TRL's decision.

    Returns the `WeightSync` that pushes: `sync.status()` says what the engine serves, and its sinks
    are given the receipt of each push.

    trainer: one that has `vllm_generation`, such as `GRPOTrainer` or `RLOOTrainer`, with
    `use_vllm=True`. Its model may be plain or have PEFT adapters, which are pushed merged while the
    trainer's weights are left alone. With `vllm_mode="colocate"` the engine is the trainer's own,
    with `vllm_mode="server"` it is a server that `instep serve` started.
    cast: whether weights are converted to the engine's dtype. TRL gives vLLM no dtype, and vLLM
    takes bfloat16 for a model in float32.
    settings: those of `WeightSync`.

    A version is `step-N`, by the trainer's step. A step that is pushed again has a number behind:
    `step-N.2`.

    Raises `ConfigError` for a trainer without vLLM, for tensor parallelism of a colocated engine,
    for an engine that has no receiver, and for a trainer that is followed already. Later, TRL's
    `sync_weights` raises what `WeightSync.push` raises, and the training ends with that error.
    """
    generation = _followed(trainer)
    spread = generation._dist.is_fsdp or generation._dist.is_zero3
    sync = WeightSync(PairSource() if spread else generation.model, _engines(generation), cast=cast, **settings)
    pushed = Counter[int]()

    def sync_weights() -> Receipt:
        step = trainer.state.global_step
        pushed[step] += 1
        asleep = generation.mode == "colocate" and generation.enable_sleep_mode
        if asleep:
            torch.cuda.empty_cache()  # the engine's weights need the room
            generation.llm.wake_up(tags=["weights"])
        # All ranks gather the parameters of FSDP and ZeRO-3 one by one, as TRL does.
        pairs = generation._iter_named_params() if spread else None
        receipt = sync.push(f"step-{step}" if pushed[step] == 1 else f"step-{step}.{pushed[step]}", pairs=pairs)
        if asleep:
            generation._llm_weights_sleeping = False  # not before: a push that failed brought none
        return receipt

    generation.sync_weights = sync_weights
    return sync


def _followed(trainer: Any) -> Any:
    """Returns what a trainer generates with. Raises `ConfigError` where that cannot be followed."""
    generation = getattr(trainer, "vllm_generation", None)
    if generation is None:
        raise ConfigError(
            f"{type(trainer).__name__} does not generate with vLLM: there is nothing to push to",
            next_step='give its arguments use_vllm=True and vllm_mode="colocate"',
        )
    if generation.mode == "colocate" and generation.tensor_parallel_size > 1:
        raise ConfigError(
            f"vllm_tensor_parallel_size={generation.tensor_parallel_size}: each process has one worker of an engine, and a push needs all",
            next_step="train with vllm_tensor_parallel_size=1: each process then has an engine of its own",
        )
    if "sync_weights" in vars(generation):
        raise ConfigError("this trainer's weight syncs are replaced already", next_step="call follow(trainer) once")
    return generation


def _engines(generation: Any) -> list[Any]:
    """Returns this rank's engines: every rank has a colocated one of its own, and rank 0 the
    server."""
    if generation.mode == "colocate":
        return [generation.llm]
    return [generation.vllm_client.base_url] if generation.accelerator.is_main_process else []


class WeightTransfer:
    """Pushes the weights of TRL's `AsyncGRPOTrainer`:
    `AsyncGRPOTrainer(weight_transfer=WeightTransfer(engines))`.

    engines, settings: those of `WeightSync`; the engines are those that its rollout worker asks.
    The n-th push is version `version-n`, by the trainer's `model_version`. `sync` is the
    `WeightSync`. Raises `ConfigError` for what that cannot use.
    """

    def __init__(self, engines: Sequence[Any], **settings: Any) -> None:
        self.sync = WeightSync(PairSource(), engines, **{"cast": True, **settings})
        self._numbers = count(1)

    def send_weights(self, iterator: Iterable[Pair]) -> None:
        """Pushes the pairs. Raises what `WeightSync.push` raises, once all of them are read."""
        self.sync.push(f"version-{next(self._numbers)}", pairs=iterator)

    def pause(self) -> None:
        """Does nothing: a push pauses the engines for its commit alone."""

    init_weight_transfer = resume = pause

    def destroy(self) -> None:
        self.sync.close()
