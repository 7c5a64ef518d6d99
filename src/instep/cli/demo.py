"""`instep demo`: a language model learns while a live engine follows it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from instep.errors import ConfigError


def demo(
    *,
    model: Literal["smollm2", "tiny"] = "smollm2",
    steps: int | None = None,
    seed: int = 0,
    out: Path = Path("demo-results"),
    json: bool = False,
) -> int:
    """Train a small language model with GRPO while a live engine follows it step by step.

    Parameters
    ----------
    model
        `smollm2` is SmolLM2-135M-Instruct and takes minutes; `tiny` is a random model and takes seconds.
    steps
        Optimizer steps, each followed by one push.
    seed
        Seed of the prompts, the sampling and the random model.
    out
        Directory for the picture and the log.
    json
        Print the result as JSON on stdout; progress goes to stderr.
    """
    try:
        from instep.demo import run
    except ModuleNotFoundError as error:
        raise ConfigError(f"the demo needs {error.name}", next_step='pip install "instep[demo]"') from error
    return run(model=model, steps=steps, seed=seed, out=out, json=json)
