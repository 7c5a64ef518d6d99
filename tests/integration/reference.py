"""Run as a program: what a vLLM that loads a checkpoint from disk generates, and what vLLM's own reload makes of it.

    python reference.py OUT CHECKPOINT...

In a process of its own, with the engine inside it: one import of vLLM serves all checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from engines import greedy, start, stop
from models import PROMPTS


def main(out: str, *checkpoints: str) -> None:
    results = {}
    for index, checkpoint in enumerate(checkpoints):
        llm = start(Path(checkpoint), load_format="auto")
        results[checkpoint] = {"fresh": greedy(llm, PROMPTS)}
        if index == 1:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoints[0]})
            llm.reset_prefix_cache()
            results[checkpoints[0]]["stock_reload"] = greedy(llm, PROMPTS)
        stop(llm)
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
