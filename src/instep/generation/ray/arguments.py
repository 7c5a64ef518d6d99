"""Converts Open Instruct's arguments of an actor to those of an `LLMActor`. Arguments that
cannot be honoured are refused here, before anything starts."""

from __future__ import annotations

import inspect
from typing import Any

from instep.errors import ConfigError
from instep.generation.actor.actor import LLMActor, check_queues
from instep.generation.ray.tools import connect, parser
from instep.generation.rewards.config import RewardConfig
from instep.generation.rewards.dataset import DatasetRewards
from instep.generation.rollout.budget import Limits

CALLS = 5
WRAP = "instep.dropin.open_instruct.WorkerWrap"
OWN = frozenset(inspect.signature(LLMActor).parameters) - {"start"}
OPTIONS = OWN | {"tool_actors", "tool_parser_type", "train_dataset", "eval_dataset"}
"""The arguments of `actor_options`."""


def actor_options(
    *,
    tool_actors: Any = None,
    tool_parser_type: str = "legacy",
    max_tool_calls: int = CALLS,
    reward_config: Any = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Returns the options of an `LLMActor`. options: those that are passed on as they are.

    Raises `ConfigError` for what it has not, and for arguments that do not go together.
    """
    if strange := sorted(options.keys() - OWN):
        raise ConfigError(f"an actor has no argument {', '.join(strange)}", next_step="give vLLM's own arguments as engine_args")
    check_queues(options.get("prompt_queue"), options.get("results_queue"), options.get("eval_results_queue"), options.get("actor_manager"))
    if isinstance(max_tool_calls, bool) or not isinstance(max_tool_calls, int):
        raise ConfigError(f"max_tool_calls is a number of calls of one sample, not {max_tool_calls!r}")
    Limits(max_model_len=1, max_tool_calls=max_tool_calls)
    if options.get("limits") is None:
        options["max_tool_calls"] = max_tool_calls
    elif max_tool_calls != CALLS:
        raise ConfigError("max_tool_calls and limits are both given: limits.max_tool_calls is the same")
    connected = connect(tool_actors)
    made = parser(tool_parser_type, connected)
    options["tools"] = [*options.get("tools", ()), *connected]
    if options.get("tool_parser") is None:
        options["tool_parser"] = made
    datasets = train_dataset is not None or eval_dataset is not None
    if reward_config is not None and (datasets or not isinstance(reward_config, RewardConfig)):
        reward_config = DatasetRewards(reward_config, train_dataset, eval_dataset)
    elif datasets and reward_config is None:
        raise ConfigError("datasets say what answers are verified against, and there is no reward_config that verifies them")
    return {**options, "reward_config": reward_config}


def engine_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of vLLM's engine. They name the worker extension that takes Open
    Instruct's updates, unless another way was chosen."""
    if arguments.get("weight_transfer_config") is not None:
        return arguments
    return {"worker_extension_cls": WRAP, **arguments}
