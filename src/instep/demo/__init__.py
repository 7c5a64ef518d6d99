"""The smallest complete example: GRPO on one machine, while a live engine follows every
optimizer step. Read `loop.py` first.

loop.py     the story
task.py     questions, and the rewards that can be checked
grpo.py     the loss
model.py    the models that the demo trains
engine.py   the engine that follows: vLLM, or transformers where vLLM is not installed
http_engine.py  the same behind HTTP
ray_loop.py actors on Ray, which answer while the trainer learns
record.py   what a run leaves behind: one JSON file
show.py     the table
picture.py  the picture
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from instep.errors import ConfigError
from instep.extras import require

ModelName = Literal["smollm2", "tiny"]


def run(
    model: ModelName = "smollm2",
    steps: int | None = None,
    seed: int = 0,
    out: Path = Path("demo-results"),
    json: bool = False,
    ray: bool = False,
    http: bool = False,
) -> int:
    """Trains `model`, pushes every step to a live engine, and leaves a picture and a log in `out`.

    steps: optimizer steps; default 12.
    seed: of the questions, the sampling and the random model. The same seed on the same machine
    gives the same run.
    json: the log on stdout; the table goes to stderr.
    http: the engine is an `instep serve` in another process.
    ray: two actors on Ray answer while the trainer learns, so that no run is like another.

    Returns the exit code 0. Raises `ConfigError` where a package is missing or no engine starts,
    `InstepError` where a push fails.
    """
    if ray and http:
        raise ConfigError("the demo runs on Ray or over HTTP, not both")
    if steps is not None and steps < 1:
        raise ConfigError(f"steps must be at least 1, not {steps}")
    require("the demo", "demo", *(("ray", "generation") if ray else ()))
    set_environment(model)
    from instep.demo import engine, loop

    start: loop.Start = engine.start
    if ray:
        from instep.demo import ray_loop

        start = ray_loop.start
    elif http:
        from instep.demo import http_engine

        start = http_engine.start
    return loop.demo(model, steps or 12, seed, out, json, start)


def set_environment(model: ModelName) -> None:
    """Sets the variables that torch, vLLM and transformers read when they are first imported.
    Variables that the user has set stay."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound, vLLM leaves one core to others; here trainer and engine take turns on all of them
        "OMP_NUM_THREADS": "1" if model == "tiny" else str(min(cores, 8)),  # threads of a tiny model wait for each other
        "OMP_WAIT_POLICY": "passive",  # or the threads of the one that waits take the cores from the one that works
        "TORCH_COMPILE_DISABLE": "1",  # vLLM would compile its sampler at the first token, and die where there is no C++ compiler
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
