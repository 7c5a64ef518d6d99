"""Open Instruct's weight sync with instep: a trainer brings an engine to its weights, all of them or none.

    python examples/open_instruct.py MODEL

MODEL: a checkpoint directory, or a name on the Hugging Face hub. The engine starts with random weights. Here it is an object of this
process; with Ray it is an actor with the same two methods, and with ZeRO 3 every rank of the trainer calls `broadcast_weights_to_vllm`.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from instep.dropin.answers import in_thread
from instep.dropin.open_instruct import broadcast_weights_to_vllm, init_process_group

PROMPTS = [{"prompt_token_ids": [1, 2, 3, 4, 5]}, {"prompt_token_ids": [9, 8, 7]}]


def main(path: str) -> None:
    on_gpus = torch.cuda.is_available()  # the engine takes the first, the trainer the last
    device = torch.device("cuda", torch.cuda.device_count() - 1) if on_gpus else torch.device("cpu")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(device)
    llm = LLM(model=path, load_format="dummy", worker_extension_cls="instep.dropin.open_instruct.WorkerWrap")
    show("before", llm)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    size = 1 + llm.llm_engine.vllm_config.parallel_config.world_size
    backend = "nccl" if on_gpus else "gloo"
    joining = in_thread(lambda: llm.collective_rpc("init_process_group", args=("127.0.0.1", port, 1, size, "openrlhf", backend)))
    group = init_process_group(backend, f"tcp://127.0.0.1:{port}", world_size=size, rank=0, group_name="openrlhf")
    joining.result(60)
    broadcast_weights_to_vllm(model, [llm], group, deepspeed_stage=0)
    show("after", llm)


def show(what: str, llm: Any) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=0.0, detokenize=False, ignore_eos=True)
    tokens = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, sampling, use_tqdm=False)]
    print(f"{what}: {tokens}")


if __name__ == "__main__":
    main(sys.argv[1])
