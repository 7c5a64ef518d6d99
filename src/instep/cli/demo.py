"""`instep demo`: a language model learns while a live engine follows it."""

from __future__ import annotations

from pathlib import Path

from instep.demo import ModelName, run


def demo(
    *,
    model: ModelName = "smollm2",
    steps: int = 12,
    seed: int = 0,
    out: Path = Path("demo-results"),
    json: bool = False,
    ray: bool = False,
    http: bool = False,
) -> int:
    """Train a small language model with GRPO while a live engine follows it step by step.

    Parameters
    ----------
    model
        `smollm2` is SmolLM2-135M-Instruct and takes minutes; `tiny` is a random model and takes
        seconds.
    steps
        Optimizer steps, each followed by one push.
    seed
        Of the questions, the sampling and the random model.
    out
        Directory for the picture and the log.
    json
        Print the log on stdout; the table goes to stderr.
    ray
        Two actors on Ray answer prompts while the trainer learns, and take its weights in flight.
    http
        The engine is an `instep serve` in another process, which the trainer reaches by its URL.
    """
    return run(model, steps, seed, out, json, ray, http)
