"""vLLM's colocated RLHF example with instep: trainer and engine share a GPU, or a host without one, and the weights go through a buffer.

    python examples/vllm_rlhf_colocate.py MODEL

MODEL: a checkpoint directory, or a name on the Hugging Face hub. The engine starts with random weights.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM

from instep.dropin.vllm_rlhf import ColocateSender


def main(path: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    llm = LLM(
        model=path, load_format="dummy", gpu_memory_utilization=0.3, worker_extension_cls="instep.dropin.vllm_rlhf.ColocateWorkerExtension"
    )
    if torch.cuda.is_available():
        model.to("cuda:0")
    (device,) = llm.collective_rpc("report_device_id")  # one worker; with more of them, a sender for each
    sender = ColocateSender(model, device)
    with ThreadPoolExecutor(1) as calls:
        for step in range(2):
            with torch.no_grad():
                model.get_input_embeddings().weight.mul_(1.01)  # the trainer's step
            taking = calls.submit(llm.collective_rpc, "update_weights_from_ipc", args=(sender.get_zmq_handles(),))
            print("the engine serves", sender.update_weights(version=f"step-{step}"))
            taking.result()


if __name__ == "__main__":
    main(sys.argv[1])
