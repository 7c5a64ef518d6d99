"""Names of TorchRL that callers of its vLLM schemes import along, and that are refused when they
are called."""

from __future__ import annotations

from typing import Any

from instep.errors import ConfigError

SGLANG = "instep updates vLLM, and no SGLang server", "import it from torchrl.weight_update.llm"
ENGINE = (
    "TorchRL's own engines have no way in for a push",
    'give a vllm.LLM with worker_extension_cls="instep.vllm.WorkerExtension", or AsyncVLLM from here',
)
REFUSED = {
    "SGLangWeightSyncScheme": SGLANG,
    "SGLangWeightSender": SGLANG,
    "SGLangCollectiveTransport": SGLANG,
    "get_sglang_model_metadata": SGLANG,
    "make_vllm_worker": ENGINE,
    "RayLLMWorker": ENGINE,
    "LocalLLMWrapper": ENGINE,
}


def refused(name: str) -> type:
    """A class that cannot be made: isinstance answers no, and an import succeeds."""
    reason, next_step = REFUSED[name]

    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError(f"instep.dropin.torchrl has no {name}: {reason}", next_step=next_step)

    return type(name, (), {"__new__": refuse, "__doc__": f"Refused: {reason}.", "__module__": __name__})
