"""A LoRA adapter in a vLLM worker. vLLM's own loader reads it, from a folder that exists for as
long as that takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from instep.engine.vllm.peers import rank_of
from instep.errors import PlanError
from instep.extras import needed_by
from instep.receiver import MERGED
from instep.receiver.adapter import AdapterHost

with needed_by("an adapter in vLLM"):
    from safetensors.torch import save_file

Saved = tuple[Mapping[str, torch.Tensor], str]
"""Tensors and the configuration, as peft saves them."""


class VllmAdapter(AdapterHost):
    """Serves a pushed LoRA adapter in a worker. number: `lora_int_id` of the requests that ask
    for it.

    vLLM forgets adapters: where others need the room, and where the base weights are reloaded. It
    loads them again when a request comes, from the path in the request. What was pushed is given to
    it then, whatever the path.
    """

    def __init__(self, worker: Any, number: int) -> None:
        parallel = worker.vllm_config.parallel_config
        super().__init__(rank_of(worker), parallel.world_size, str(worker.device))
        if (manager := getattr(worker.model_runner, "lora_manager", None)) is None:
            raise PlanError("this vLLM serves no LoRA adapters", next_step=f"start it with enable_lora=True, or {MERGED}")
        if parallel.pipeline_parallel_size > 1:
            raise PlanError("adapters are not pushed to the stages of a pipeline", next_step=MERGED)
        self.worker, self.number = worker, number
        self.served: Saved | None = None
        self.layers = manager._adapter_manager
        self.read_folder = manager._load_adapter
        manager._load_adapter = self.read

    def read(self, request: Any) -> Any:
        """Loads the adapter that a request names, in the place of vLLM's own function."""
        if request.lora_int_id == self.number and self.served is not None:
            return self.parsed(self.served)
        return self.read_folder(request)

    def parsed(self, saved: Saved) -> Any:
        """Returns vLLM's `LoRAModel` of these tensors. Raises whatever vLLM raises."""
        from vllm.lora.request import LoRARequest

        tensors, config = saved
        with TemporaryDirectory(prefix="instep-") as folder:
            save_file(dict(tensors), Path(folder) / "adapter_model.safetensors")
            (Path(folder) / "adapter_config.json").write_text(config)
            return self.read_folder(LoRARequest("instep", self.number, folder))

    def check(self, tensors: Mapping[str, torch.Tensor], config: str) -> None:
        try:
            pairs = self.parsed((tensors, config)).loras
        except Exception as error:
            raise PlanError(f"vLLM does not serve this adapter: {error}", next_step=MERGED) from error
        places = {*self.layers.modules, *(part for parts in self.layers.packed_modules.values() for part in parts)}
        for name in pairs:
            if name not in places and name.removesuffix(".base_layer") not in places:  # under which peft has a part of packed experts
                raise PlanError(f"the adapter changes {name}, where vLLM has no layer that takes one", tensor=name, next_step=MERGED)
        read = [half for pair in pairs.values() for half in (pair.lora_a, pair.lora_b) if half is not None]
        if len(read) < 2 * len(pairs) or len(read) < len(tensors):
            raise PlanError(f"vLLM reads {len(read)} of the adapter's {len(tensors)} tensors, for {len(pairs)} layers", next_step=MERGED)
        self.check_sizes(pairs)

    def check_sizes(self, pairs: Mapping[str, Any]) -> None:
        """Raises `PlanError` for an adapter of another size than its layer. vLLM would write a
        smaller one into a corner of its own tensor."""
        from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

        for layer, module in self.layers.modules.items():
            names = self.layers.packed_modules.get(layer, [layer])
            if not isinstance(module, BaseLinearLayerWithLoRA):
                continue
            for name, (own_in, own_out) in zip(names, _sizes(module.base_layer, len(names)), strict=True):
                if (pair := pairs.get(name)) is None:
                    continue
                takes, gives = pair.lora_a.shape[1], pair.lora_b.shape[0]
                if (takes, gives) != (own_in, own_out):
                    text = f"the adapter of {name} takes {takes} features and gives {gives}, the engine's layer {own_in} and {own_out}"
                    raise PlanError(text, tensor=name, next_step="push it to an engine of the model that it is trained on")

    def install(self, tensors: Mapping[str, torch.Tensor], config: str) -> None:
        from vllm.lora.request import LoRARequest

        before, self.served = self.served, (tensors, config)
        try:
            self.worker.add_lora(LoRARequest("instep", self.number, "pushed by instep", load_inplace=True))
        except BaseException:
            self.served = before
            self.worker.remove_lora(self.number)  # what may be in place in part; the one before is loaded again for the next request
            raise


def _sizes(layer: Any, parts: int) -> list[tuple[int, int]]:
    """Returns the sizes of input and output, of all workers together, for each checkpoint layer
    that a linear layer is made of."""
    if parts == 1:
        return [(layer.input_size, layer.output_size)]
    shared = getattr(layer, "num_kv_head_replicas", 1)  # several workers have the same heads of k and v
    first, *others = layer.output_sizes
    return [(layer.input_size, size) for size in (first, *(size // shared for size in others))]
