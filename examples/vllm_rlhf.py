"""vLLM's RLHF example with instep: a trainer broadcasts its weights to an engine, parameter by parameter.

    python examples/vllm_rlhf.py MODEL

MODEL: a checkpoint directory, or a name on the Hugging Face hub. The engine starts with random weights. On GPUs the engine takes the first
and the trainer the last, which must be another (NCCL); without one both are on the CPU (Gloo).
"""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from instep.dropin.vllm_rlhf import stateless_init_process_group

PROMPTS = [{"prompt_token_ids": [1, 2, 3, 4, 5]}, {"prompt_token_ids": [9, 8, 7]}]


def main(path: str) -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1) if torch.cuda.is_available() else torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(device)
    llm = LLM(model=path, load_format="dummy", worker_extension_cls="instep.dropin.vllm_rlhf.WorkerExtension")
    show("random weights", llm)
    with ThreadPoolExecutor(1) as calls:  # LLM's methods block, and all ranks must come at once
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        workers = llm.llm_engine.vllm_config.parallel_config.world_size
        joining = calls.submit(llm.collective_rpc, "init_weight_update_group", args=("127.0.0.1", port, 1, 1 + workers))
        group = stateless_init_process_group("127.0.0.1", port, 0, 1 + workers, device)
        joining.result()
        for name, p in model.named_parameters():
            handle = calls.submit(llm.collective_rpc, "update_weight", args=(name, str(p.dtype), p.shape))
            group.broadcast(p, src=0)
            statuses = handle.result()
    assert all(status["committed"] for status in statuses), statuses  # with the last parameter all are in place
    llm.reset_prefix_cache()
    show("the trainer's weights", llm)


def show(what: str, llm: Any) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=0.0, detokenize=False, ignore_eos=True)
    tokens = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, sampling, use_tqdm=False)]
    print(f"{what}: {tokens}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main(sys.argv[1])
