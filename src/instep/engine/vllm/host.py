"""The model of a vLLM worker as a receiver's host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any

import torch

from instep.engine.vllm.experts import check_experts_stay
from instep.engine.vllm.layout import laid_out, never_loaded, tensors_put_back
from instep.engine.vllm.peers import rank_of
from instep.engine.vllm.repairs import (
    View,
    allow_other_tensors,
    forget_expert_kernels,
    get_info,
    name_loaders,
    parted_views,
    refresh_tied,
    remake,
    views_follow,
)
from instep.receiver import Fill, Host
from instep.receiver.layout import Layout


class VllmModel:
    """The model of one vLLM worker: its loader, its reload session and its layers."""

    always_reloads: str | None = None
    decides_beforehand = True

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.world_size: int = worker.vllm_config.parallel_config.world_size
        self.rank = rank_of(worker)
        self.device = str(worker.device)
        self.busy = False  # with the model's loader, for a push
        self.views: list[View] = []  # as the last session has found them
        # Flags that a reload session leaves on the model, set here as it leaves them: they are not
        # derived from weights.
        flag = getattr(self.model, "_do_torchao_reload", False)
        vars(self.model).update(_do_torchao_reload=flag, _original_do_torchao_reload=flag)
        _import_reload()

    @property
    def model(self) -> torch.nn.Module:
        module: torch.nn.Module = self.worker.model_runner.get_model()
        return module

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with self._context():
            self.model.load_weights(tensors)  # type: ignore[operator]

    def checkpoint_layout(self) -> AbstractContextManager[Layout]:
        check_experts_stay(self.worker.vllm_config)
        return laid_out(self.model)

    @contextmanager
    def reload(self) -> Iterator[None]:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model
        self.views = parted_views(model)
        with ExitStack() as stack:
            stack.enter_context(self._context())
            stack.enter_context(views_follow(self.views))
            on_failure = stack.enter_context(tensors_put_back(model.modules()))
            if self.device == "cpu":
                forget_expert_kernels(model)
            for layer in model.modules():
                name_loaders(layer)
            initialize_layerwise_reload(model)
            for layer in model.modules():
                allow_other_tensors(layer, get_info(layer))
            try:
                yield
                finalize_layerwise_reload(model, self.worker.model_runner.model_config)
            except BaseException:
                for layer in model.modules():  # a session cut short is forgotten, or the next one would count its tensors too
                    get_info(layer).reset()
                raise
            on_failure.forget()
            refresh_tied(model.modules())
        if hasattr(self.worker.model_runner, "reset_lora_state"):
            self.worker.model_runner.reset_lora_state()

    def filled(self) -> Iterator[torch.Tensor]:
        """Yields the tensors that generation fills: the KV cache, and the states of recurrent
        layers."""
        return _tensors(getattr(self.worker.model_runner, "kv_caches", ()))

    def spare(self, parameter: str) -> tuple[int, str | None]:
        path, _, leaf = parameter.rpartition(".")
        layer = self.model.get_submodule(path)
        if (buffer := layer._buffers.get(leaf)) is not None and (leaf.startswith("_") or _is_map(leaf, buffer)):
            return buffer.numel(), "vLLM's own, no checkpoint has it"
        if (shard := getattr(layer, "shard_indices", None)) is None:
            return 0, None
        rows = layer.num_embeddings_per_partition - shard.num_org_elements - shard.num_added_elements
        tensor: torch.Tensor = getattr(layer, leaf)  # the weight, or the bias of a head
        return rows * tensor[:1].numel(), "padded vocabulary rows have no weights" if rows else None

    def rebuilds(self, layer: str) -> bool:
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        return isinstance(
            getattr(self.model.get_submodule(layer), "quant_method", None), UnquantizedLinearMethod | UnquantizedEmbeddingMethod
        )

    def rebuild(self, layer: str, fill: Fill) -> None:
        """Does what vLLM's reload does to a layer when its last tensor has arrived, without the
        loaders, which take twice as long as the work."""
        module: Any = self.model.get_submodule(layer)
        views = [view for view in self.views if view.layer is module]
        with self._context(), tensors_put_back([module]), views_follow(views):
            if self.device == "cpu":
                forget_expert_kernels(module)
            remake(module, fill)

    def computes(self, layer: str) -> torch.Tensor:
        module: Any = self.model.get_submodule(layer)
        weight = get_info(module).restore_metadata[0].get("weight")
        if weight is not None and weight.ndim != 2:  # of a convolution, whose caller reads the tensors
            return in_bytes({**vars(module), **module._parameters, **module._buffers})
        width = (
            module.embedding_dim
            if hasattr(module, "embedding_dim")
            else getattr(module, "input_size_per_partition", None) or module.input_size
        )
        dtype = self.worker.vllm_config.model_config.dtype
        if weight is not None and weight.dtype in (torch.float32, torch.float16, torch.bfloat16):  # kernels believe what they are given
            dtype = weight.dtype
        probe = torch.linspace(-1, 1, 3 * width, dtype=torch.float32, device=self.device).to(dtype).view(3, width)
        with self._context():
            made: torch.Tensor = module.quant_method.apply(module, probe, getattr(module, "bias", None))
        return made

    @property
    def software(self) -> str:
        from vllm import __version__

        return f"vLLM {__version__}"

    def refresh(self) -> None:
        with self._context():
            refresh_tied(self.model.modules())

    def adapter(self, number: int) -> Host:
        from instep.engine.vllm.adapter import VllmAdapter

        return VllmAdapter(self.worker, number)

    @contextmanager
    def _context(self) -> Iterator[None]:
        """Sets what vLLM sets while it loads a model."""
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        config = self.worker.vllm_config
        before, self.busy = self.busy, True
        try:
            with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
                yield
        finally:
            self.busy = before


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, list | tuple | dict):
        for item in nested.values() if isinstance(nested, dict) else nested:
            yield from _tensors(item)


def in_bytes(held: dict[str, Any]) -> torch.Tensor:
    """Returns all bytes of the tensors among some attributes, in the order of their names. uint8
    [N]."""
    tensors = (held[name].detach() for name in sorted(held) if isinstance(held[name], torch.Tensor) and held[name].numel())
    return torch.cat([tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in tensors])


def _is_map(name: str, buffer: torch.Tensor) -> bool:
    """Whether a buffer maps experts to places. Other buffers that a session does not wait for
    are weights, such as a router's bias."""
    return name in never_loaded() and not buffer.dtype.is_floating_point


def _import_reload() -> None:
    """Imports the quantisation methods of vLLM's reload. vLLM would import them in the middle of
    a session, which takes seconds."""
    for module in ("vllm.model_executor.layers.quantization.online.fp8", "vllm.model_executor.layers.quantization.online.moe_base"):
        with suppress(ImportError):  # other versions of vLLM have it elsewhere
            import_module(module)
