"""Every kind of sharded trainer, to an engine in memory: bit for bit what a fresh engine has that loads the gathered `save_pretrained`.

Each case pushes through shared memory, over CUDA IPC with memory of the ranks' processes in the place of their cards', and by Gloo in
buckets of one tensor, of seven, and gathered whole; before the first forward, between backward and step, and after the step.

`make test` plays each way to shard with one model, each kind of model with several ways, and each
size of a group; `make test-all` plays all.
"""

from __future__ import annotations

import pytest
from helpers.rank_groups import Seen, played

PLAIN = ("qwen3", "llama", "moe")
ADAPTED = ("lora", "lora-tied", "lora-experts")
WRAPS = ("plain", "ddp", "fsdp1", "fsdp2", "fsdp2-ignored", "fsdp2-compiled", "fsdp2-checkpointed", "zero0", "zero1", "zero2", "zero3")
ON_TWO = [
    *(f"push/{wrap}/{model}" for wrap in WRAPS for model in PLAIN),
    *(f"push/{wrap}/lora" for wrap in ("plain", "ddp", "zero0", "zero1", "zero2")),
    *(f"push/{wrap}/{model}" for wrap in ("fsdp2", "zero3") for model in ADAPTED),
    *(f"push/fsdp1-orig/{model}" for model in ADAPTED[:2]),  # peft cannot compute adapted experts in the views of FSDP1
    *(f"push/{wrap}/llama" for wrap in ("fsdp1-orig", "fsdp1-whole", "fsdp1-grad", "fsdp2-unsharded", "fsdp2-columns", "tp")),
    "push/fsdp2-columns/moe",
]
ON_THREE = [*(f"push/{wrap}/qwen3" for wrap in ("fsdp1", "fsdp2", "zero3")), "push/fsdp2/lora"]
ON_FOUR = [*(f"push/{wrap}/llama" for wrap in ("fsdp2-hybrid", "fsdp2-tp", "fsdp1", "tp")), "push/fsdp2/moe"]


IN_SHORT = {
    (2, f"push/{case}")
    for case in (
        "plain/qwen3", "ddp/moe", "fsdp1/llama", "fsdp2/qwen3", "fsdp2-ignored/llama", "fsdp2-compiled/qwen3",
        "fsdp2-checkpointed/moe", "zero0/llama", "zero1/qwen3", "zero2/moe", "zero3/llama",
        "ddp/lora", "zero1/lora", "fsdp2/lora-experts", "zero3/lora-tied", "fsdp1-orig/lora",
        "fsdp1-whole/llama", "fsdp1-grad/llama", "fsdp2-unsharded/llama", "fsdp2-columns/moe", "tp/llama",
    )
} | {(3, "push/zero3/qwen3"), (3, "push/fsdp2/lora"), (4, "push/fsdp2-hybrid/llama"), (4, "push/fsdp2-tp/llama")}  # fmt: skip
ALL = [(size, case) for size, cases in ((2, ON_TWO), (3, ON_THREE), (4, ON_FOUR)) for case in cases]
assert set(ALL) > IN_SHORT


@pytest.mark.parametrize("case", [played(*one, *(() if one in IN_SHORT else [pytest.mark.exhaustive])) for one in ALL])
def test_the_engine_has_what_the_gathered_model_has(case: str, found: Seen) -> None:
    for seen in found:
        assert seen["same"] == dict.fromkeys(seen["same"], True)
        assert len(seen["same"]) == 15
    assert all(seen["digests"] == found[0]["digests"] for seen in found), "every rank has the same receipts"
    digests = found[0]["digests"]
    for way in ("shm", "ipc", "one", "seven", "whole"):
        assert digests[f"first {way}"] == digests[f"pending {way}"] == digests["first shm"], "gradients change nothing"
        assert digests[f"stepped {way}"] == digests["stepped shm"] != digests["first shm"], "the step does"
