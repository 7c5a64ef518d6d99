"""How the tensors of a live module lie in the checkpoint that `save_pretrained` would write.

transformers renames, splits and joins tensors when it saves (packed experts are saved one by one).
That conversion runs here once over tensors on the meta device. A checkpoint tensor that only moves
data becomes a region of a live one. Any other is listed with the live tensors it is made of, and
`convert` computes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from instep.errors import SourceError
from instep.protocol import Region, TensorMeta, dtype_name

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint tensor. parts: the live tensors it is made of, in model order. view: its
    region of the only part, in that tensor's flat index space; None where it has to be converted.
    whole: whether it is all of that part, in order."""

    meta: TensorMeta
    parts: tuple[str, ...]
    view: Region | None
    whole: bool

    def of(self, part: torch.Tensor) -> torch.Tensor:
        """Returns this tensor as a view of the only part. The part must be contiguous unless all of
        it is wanted."""
        if self.whole:
            return part
        assert self.view is not None
        return part.as_strided(self.view.shape, self.view.stride, part.storage_offset() + self.view.offset)


def layout(module: nn.Module, state: Mapping[str, torch.Tensor], same: Mapping[str, Hashable]) -> list[Saved]:
    """Returns the checkpoint tensors of `module` with the state dict `state`, in the model's order.
    Tied names are aliases.

    same: maps each name to a key that names of the same bytes share. Raises `SourceError` where
    transformers cannot save the module, or where its conversion loses a tensor.
    """
    if _is_pretrained(module):
        ignored: Any = module._keys_to_ignore_on_save or ()
        state = {name: tensor for name, tensor in state.items() if name not in ignored}
    shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state.items()}
    moves = _Moves(shapes)
    with moves:
        outputs = convert(module, shapes)
    saved = [
        Saved(TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape)), *moves.origin(tensor)) for name, tensor in outputs.items()
    ]
    if lost := shapes.keys() - {part for one in saved for part in one.parts}:
        name = min(lost)
        raise SourceError(f"the checkpoint format has no place for {name}: another tensor takes its name, or it is left out", tensor=name)
    order = {name: index for index, name in enumerate(state)}
    saved.sort(key=lambda one: [order[part] for part in one.parts])
    return _with_aliases(saved, _kept_names(module, {name: same[name] for name in state}))


def _with_aliases(saved: list[Saved], kept: Mapping[str, str]) -> list[Saved]:
    """Turns tensors that are made of tied names into aliases of those that are made of the kept
    names."""
    by_origin: dict[Any, str] = {(one.parts, one.view): one.meta.name for one in saved if one.view is not None}
    result = []
    for one in saved:
        parts = tuple(kept[part] for part in one.parts)
        if parts == one.parts:
            result.append(one)
        elif (original := by_origin.get((parts, one.view))) is not None:  # `save_pretrained` leaves out the others
            result.append(replace(one, meta=msgspec.structs.replace(one.meta, alias_of=original)))
    return result


def convert(module: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns what `save_pretrained` of the installed transformers would write for `state`. For any
    other module it returns the same entries.

    Raises `SourceError` where the conversion fails.
    """
    if not _is_pretrained(module):
        return dict(state)
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise SourceError("this transformers cannot tell its checkpoint names", next_step="pip install 'transformers>=5'") from error
    try:
        converted: dict[str, torch.Tensor] = revert_weight_conversion(module, dict(state))
    except Exception as error:
        raise SourceError(f"transformers cannot convert {type(module).__name__} to its checkpoint format: {error}") from error
    return converted


def _is_pretrained(module: nn.Module) -> bool:
    # A transformers model can only exist where its base class is imported, so this imports nothing.
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def _kept_names(module: nn.Module, same: dict[str, Hashable]) -> dict[str, str]:
    """Maps each name to the one that keeps the bytes when tied names are saved once."""
    keepers = {value: name for name, value in reversed(same.items())}
    if len(keepers) < len(same) and _is_pretrained(module):
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        # The rule compares memory alone, so one element stands for each tensor and nothing is
        # cloned.
        tokens = {value: torch.empty(1) for value in keepers}
        try:
            names = remove_tied_weights_from_state_dict({name: tokens[value] for name, value in same.items()}, module)
        except RuntimeError as error:
            raise SourceError(f"transformers would not save the tied weights of {type(module).__name__}: {error}") from error
        keepers = {same[name]: name for name in names}
    return {name: keepers[value] for name, value in same.items()}


class _Moves(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows tensors without bytes through a conversion and notes which inputs each storage is
    made of.

    A copy that changes strides alone is not made, so that an output which only moves data ends as a
    view of its input.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inputs = {_storage(tensor): tensor for tensor in inputs.values()}
        self._order = {name: index for index, name in enumerate(inputs)}
        self._parts = {_storage(tensor): {name} for name, tensor in inputs.items()}

    def origin(self, tensor: torch.Tensor) -> tuple[tuple[str, ...], Region | None, bool]:
        """Returns the inputs that `tensor` is made of, its region if it is a view of the only
        input, and whether it is all of that input."""
        storage = _storage(tensor)
        parts = tuple(sorted(self._parts.get(storage, ()), key=self._order.__getitem__))
        source = self._inputs.get(storage)
        if source is None or source.dtype != tensor.dtype:
            return parts, None, False
        view, whole = (Region(int(one.storage_offset()), tuple(one.shape), one.stride()) for one in (tensor, source))
        return parts, view, view == whole

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.clone.default:
            func, kwargs = aten.alias.default, {}
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            if func not in (aten.view.default, aten._unsafe_view.default):
                raise
            # The conversion relied on a copy that was left out.
            copied = args[0].contiguous()
            self._note(args[0], copied)
            args = (copied, *args[1:])
            result = func(*args, **kwargs)
        self._note((args, kwargs), result)
        if func._schema.is_mutable:  # type: ignore[attr-defined]
            for tensor in _tensors((args, kwargs)):
                self._inputs.pop(_storage(tensor), None)  # no longer the trainer's values
        return result

    def _note(self, given: Any, made: Any) -> None:
        parts = {part for tensor in _tensors(given) for part in self._parts.get(_storage(tensor), ())}
        for tensor in _tensors(made):
            self._parts[_storage(tensor)] = parts


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
