"""TorchRL's weight synchronisation for vLLM (`torchrl.weight_update.llm`), over instep.

    from instep.dropin.torchrl import VLLMWeightSyncScheme, get_model_metadata

    scheme = VLLMWeightSyncScheme(master_port=29500, num_replicas=1)
    sender = scheme.create_sender()                # in the trainer's process
    sender.register_model(model)
    receiver = scheme.create_receiver(llm)         # in the engine's process
    sender.init_all_workers_group(metadata)        # both together: each waits for the other
    receiver.init_all_workers_group(metadata)
    sender.update_weights()                        # every engine serves the weights now, or the error says which do not

Methods of both generations are here: those of the released classes, and `register_model`,
`register_worker`, `register_worker_transport` and `set_context` of the classes before them. Works
with TorchRL 0.14 and without it; `AsyncVLLM`, `make_async_vllm_engine`, `RLvLLMEngine`,
`vLLMUpdater` and `vLLMUpdaterV2` need it, and are imported when they are asked for.
`docs/dropins.md` lists what differs from the original.
"""

from importlib import import_module
from typing import Any

from instep.dropin.torchrl.collective import VLLMCollectiveTransport, VLLMWeightSyncScheme
from instep.dropin.torchrl.double_buffer import (
    VLLMDoubleBufferSyncScheme,
    VLLMDoubleBufferTransport,
    VLLMDoubleBufferWeightReceiver,
    VLLMDoubleBufferWeightSender,
)
from instep.dropin.torchrl.receiver import VLLMWeightReceiver
from instep.dropin.torchrl.refused import REFUSED, refused
from instep.dropin.torchrl.sender import VLLMWeightSender
from instep.dropin.torchrl.weights import get_model_metadata

__all__ = [
    "VLLMCollectiveTransport",
    "VLLMDoubleBufferSyncScheme",
    "VLLMDoubleBufferTransport",
    "VLLMDoubleBufferWeightReceiver",
    "VLLMDoubleBufferWeightSender",
    "VLLMWeightReceiver",
    "VLLMWeightSender",
    "VLLMWeightSyncScheme",
    "get_model_metadata",
]

WITH_TORCHRL = {
    "AsyncVLLM": "instep.dropin.torchrl.vllm_async",
    "make_async_vllm_engine": "instep.dropin.torchrl.vllm_async",
    "RLvLLMEngine": "torchrl.modules.llm.backends.vllm",
    "vLLMUpdater": "instep.dropin.torchrl.updater",
    "vLLMUpdaterV2": "instep.dropin.torchrl.updater",
}


def __getattr__(name: str) -> Any:
    if name in REFUSED:
        found: Any = refused(name)
    elif name in WITH_TORCHRL:
        found = getattr(import_module(WITH_TORCHRL[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found
