"""A real vLLM on a GPU follows a trainer through CUDA IPC, with CUDA graphs on: the same tokens as an engine that loads from disk."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_models import PROMPTS, folder, greedy, model, start, stop_vllm

from instep import WeightSync
from instep.errors import DigestMismatch, EngineDirty
from instep.transport.ipc.publish import IpcTransport

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'instep[vllm]'")


@pytest.fixture(scope="module", params=range(2), ids=["one GPU", "two GPUs"])
def llm(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    llm = start(folder("tiny"), str(request.param), enforce_eager=False)
    yield llm
    stop_vllm(llm)


def test_pushes_are_pulled_straight_into_live_storage(llm: Any, from_disk: Any) -> None:
    trainer = model("tiny", 1, "cuda:0")
    with WeightSync(trainer, [llm]) as sync:
        sync.push("one")
        other = greedy(llm, PROMPTS)
        assert other != from_disk
        trainer.load_state_dict(model("tiny", 2, "cuda:0").state_dict())
        receipt = sync.push("two")
        assert greedy(llm, PROMPTS) == from_disk
        assert sync._session.current is not None
        assert sync._session.current.manifest.location.transport == "ipc"
        assert "prepare" not in receipt.seconds  # one call
        (engine,) = receipt.engines
        assert engine.reload == {}
        assert engine.read_back == receipt.tensors
        with torch.no_grad():
            trainer.model.norm.weight[5] = float("nan")
        assert sync.push("three").non_finite == ("model.norm.weight",)


def test_bytes_that_are_not_those_that_the_trainer_summed_up_are_not_served(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker looks at the trainer's sums, which lie on the GPU, and does not go on."""
    trainer = model("tiny", 4, "cuda:0")
    weight, publish = trainer.model.norm.weight, IpcTransport.publish

    def changed(self: IpcTransport, *arguments: Any) -> Any:
        published = publish(self, *arguments)
        torch.cuda.synchronize()  # the sums are taken
        with torch.no_grad():
            weight[3] += 1
        return published

    with WeightSync(trainer, [llm]) as sync:
        sync.push("sound")
        sound, kept = greedy(llm, PROMPTS), weight.detach().clone()
        with monkeypatch.context() as context:
            context.setattr(IpcTransport, "publish", changed)
            with pytest.raises(DigestMismatch, match=r"(?s)model\.norm\.weight.*DIRTY"):
                sync.push("changed")
        with pytest.raises(EngineDirty):
            greedy(llm, PROMPTS)
        with torch.no_grad():
            weight.copy_(kept)
        sync.push("mended")
        assert greedy(llm, PROMPTS) == sound


def test_memory_stays_flat(llm: Any) -> None:
    """200 updates: neither the trainer nor the engine takes more memory."""
    trainer = model("tiny", 3, "cuda:0")
    with WeightSync(trainer, [llm]) as sync:
        free = []
        for update in range(200):
            with torch.no_grad():
                trainer.model.norm.weight.neg_()
            sync.push(f"flat-{update}")
            if update in (20, 199):
                free.append([torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count())])
        assert all(after >= before - (8 << 20) for before, after in zip(*free, strict=True))
