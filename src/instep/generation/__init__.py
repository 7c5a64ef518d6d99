"""Rollouts: prompts become samples with tokens, log-probabilities, tool calls and rewards, and
every token knows its weights' version.

    harness = Harness(tokenizer, Limits(max_model_len=8192), await ToolSet.connect([PythonTool()]), vllm_parser("hermes", tokenizer))
    rewards = RewardConfig(verifiers={"maths": Maths()}, non_stop_penalty=0.0)
    reward = rewards.build(tokenizer)

    harness.check(request), rewards.check(request)            # refuse a prompt before anything is spent on it
    result = await answer(request, client, harness, aborted)  # n samples side by side, in turns of the model and of its tools
    result = await reward(result)                             # after the engine's places were given back

An `LLMActor` does this with an engine of its own, and `instep.generation.ray` with a fleet of them:

    actor = LLMActor(partial(start_vllm, "model"), prompt_queue=prompts, results_queue=results, reward_config=rewards)
    sync = WeightSync(model, engines=[actor])

    actor/     the loop, its engine and the trainer that it follows    ray/        actors in a cluster
    rollout/   a prompt becomes samples                                tools/      what models call, and how
    rewards/   verifiers weighed and added                             verifiers/  whether an answer is right
    exchange/  prompts and results, ours and Open Instruct's           sandbox/    programs that nobody has read

What it does around `answer`. *Prefetch*: takes `sampling.n` places of its limit before `answer`,
and gives them back before `reward`. *Pause and drain*: its `Client.complete` waits at a gate, so
that a drain waits for turns under way and not for tools; the engine says in `Completion.versions`
which weights sampled what. *Cancel*: setting `aborted` ends samples soon and keeps what they have;
cancelling the task of `answer` drops them, and closes their environments.
*Errors*: what a client raises comes out of `answer` and ends the run; what tools and verifiers do
wrong is in the records, and ends nothing. *Staleness*: `statistics.lag(sample, history)`.
"""

from typing import Any

from instep.generation.actor.actor import LLMActor
from instep.generation.actor.manager import ActorManager, ActorStatus
from instep.generation.rewards.config import RewardConfig
from instep.generation.rollout.budget import Limits
from instep.generation.rollout.turns import Client, Harness, answer
from instep.generation.sampling import Sampling
from instep.generation.sandbox import SandboxLimits
from instep.generation.tools.http import HttpTool
from instep.generation.tools.parsers import ChatParser, TaggedParser, WholeTurnParser, vllm_parser
from instep.generation.tools.python import PythonTool
from instep.generation.tools.toolset import Environment, Tool, ToolDefinition, ToolOutput, ToolSet
from instep.generation.types import (
    Completion,
    GenerationResult,
    Label,
    PromptId,
    PromptRequest,
    RequestId,
    Sample,
    VersionSpan,
)
from instep.generation.verifiers import Answer, CodeTests, ExactMatch, Format, Instructions, Numeric, Verifier, WordOverlap
from instep.generation.verifiers.maths import Maths

__all__ = [
    "ActorManager",
    "ActorStatus",
    "Answer",
    "ChatParser",
    "Client",
    "CodeTests",
    "Completion",
    "Environment",
    "ExactMatch",
    "Format",
    "GenerationResult",
    "Harness",
    "HttpTool",
    "Instructions",
    "LLMActor",
    "Label",
    "Limits",
    "Maths",
    "Numeric",
    "PromptId",
    "PromptRequest",
    "PythonTool",
    "RequestId",
    "RewardConfig",
    "Sample",
    "Sampling",
    "SandboxLimits",
    "TaggedParser",
    "Tool",
    "ToolDefinition",
    "ToolOutput",
    "ToolSet",
    "Verifier",
    "VersionSpan",
    "WholeTurnParser",
    "WordOverlap",
    "answer",
    "vllm_parser",
]


def __getattr__(name: str) -> Any:
    """`LLMRayActor` is imported when it is asked for by its name: all others do without Ray."""
    if name == "LLMRayActor":
        from instep.generation.ray.actor import LLMRayActor

        return LLMRayActor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
