"""The LoRA adapter of a PEFT model as a source, for engines that serve adapters beside the weights
of their model."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from typing import Any

import msgspec
import torch
from torch import nn

from instep.errors import ConfigError, SourceError
from instep.protocol import AdapterConfig, TensorMeta
from instep.source.bare import peft_model
from instep.source.module import MappingSource
from instep.source.names import canonical

MERGED = "push the model with its adapters merged instead: WeightSync(source=model)"


class Adapter:
    """The active LoRA adapter of a model, instead of all its weights: a push moves A and B,
    megabytes for a model of gigabytes.

        extension = "instep.vllm.WorkerExtension"
        llm = LLM(base, enable_lora=True, max_lora_rank=16, worker_extension_cls=extension)
        sync = WeightSync(source=Adapter(peft_model), engines=[llm])
        sync.push("step-1")
        llm.generate(prompts, lora_request=LoRARequest("policy", 1, "pushed"))

    model: a `peft.PeftModel` with one active adapter, however wrapped, and whole on this rank.
    number: `lora_int_id` of the requests that ask for the adapter. Their path is not looked at.

    Names and values are those that `save_pretrained` writes into `adapter_model.safetensors`. The
    engine's base weights stay as they are: they must be those that the adapter is trained on.

    Raises `ConfigError` for anything else than a model with one active LoRA adapter.
    """

    def __init__(self, model: nn.Module, *, number: int = 1) -> None:
        if number < 1:
            raise ConfigError(f"vLLM counts adapters from 1, not {number}")
        self._model: Any = peft_model(model) if isinstance(model, nn.Module) else None
        if self._model is None:
            text = f"{type(model).__name__} is no peft.PeftModel: it has no adapter to push"
            raise ConfigError(text, next_step="WeightSync(source=model)")
        self._name = _active(self._model)
        self.config = AdapterConfig(number, _config(self._model, self._name))

    def metadata(self) -> list[TensorMeta]:
        """Returns names, dtypes and shapes of the adapter's tensors. Raises `SourceError` where
        another adapter was made active, the configuration was changed, or peft leaves out
        tensors."""
        if (_active(self._model), _config(self._model, self._name)) != (self._name, self.config.config):
            raise SourceError(f"the adapter {self._name!r} is not the one that it was", next_step="make a new WeightSync for it")
        metas = self._now().metadata()
        saved = sum(".lora_" in meta.name for meta in metas)
        pattern = re.compile(rf"\.lora_\w+\.{re.escape(self._name)}(\.|$)")
        held = sum(bool(pattern.search(name)) for name, _ in self._model.named_parameters(remove_duplicate=False))
        if saved < held:
            raise SourceError(f"peft gives {saved} of the adapter's {held} tensors: it does not see into wrapped layers", next_step=MERGED)
        return metas

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._now().tensors()

    def stamp(self) -> Hashable:
        return self._now().stamp()

    def score(self, token_ids: list[int]) -> list[float] | None:  # noqa: ARG002
        """Returns None: an engine scores with its base weights."""
        return None

    def _now(self) -> MappingSource:
        from peft import get_peft_model_state_dict

        state = get_peft_model_state_dict(self._model, adapter_name=self._name, save_embedding_layers=False)
        return MappingSource({canonical(name): tensor for name, tensor in state.items()})


def adapter_of(source: Any) -> AdapterConfig | None:
    """Returns the configuration that engines need before the tensors, or None if the source is no
    adapter."""
    return source.config if isinstance(source, Adapter) else None


def _active(model: Any) -> str:
    names: list[str] = model.active_adapters
    if len(names) != 1:
        raise ConfigError(f"{len(names)} adapters are active, and an engine serves one: {', '.join(names)}", next_step=MERGED)
    if (kind := model.peft_config[names[0]].peft_type) != "LORA":
        raise ConfigError(f"{names[0]} is a {kind.value} adapter, and engines serve LoRA adapters alone", next_step=MERGED)
    return names[0]


def _config(model: Any, name: str) -> str:
    """Returns the adapter's configuration in the JSON that peft writes."""
    config = model.peft_config[name].to_dict()
    return msgspec.json.encode(config, order="sorted").decode()
