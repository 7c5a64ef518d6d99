"""Which conversions change no value: compared with PyTorch's own, value by value."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from instep.errors import PlanError
from instep.plan.dtypes import common, widens
from instep.protocol import ITEM_BYTES, TensorMeta

SMALL = {name: size for name, size in ITEM_BYTES.items() if size <= 2}
SIZED = {1: torch.uint8, 2: torch.int16}


def values(dtype: str) -> torch.Tensor:
    """Every value of a dtype of one or two bytes, NaNs left out."""
    if dtype == "bool":
        return torch.tensor([False, True])
    size = SMALL[dtype]
    low = 0 if size == 1 else -(2**15)
    every = torch.arange(low, low + 2 ** (8 * size)).to(SIZED[size]).view(getattr(torch, dtype))
    return every[~every.double().isnan()]


@pytest.mark.parametrize(("old", "new"), [pair for pair in product(SMALL, ITEM_BYTES) if pair[1] != "bool"])
def test_a_dtype_widens_another_where_every_value_comes_back(old: str, new: str) -> None:
    every = values(old).double()
    assert widens(old, new) == bool((every.to(getattr(torch, new)).double() == every).all())


WIDE = {
    ("float32", "float64"): True, ("int32", "float64"): True, ("int32", "int64"): True,
    ("float64", "float32"): False, ("float32", "bfloat16"): False, ("int32", "float32"): False, ("int64", "float64"): False,
    ("float32", "int64"): False, ("int8", "bool"): False,
}  # fmt: skip


@pytest.mark.parametrize(("pair", "exact"), WIDE.items(), ids=map("-".join, WIDE))
def test_larger_dtypes(pair: tuple[str, str], exact: bool) -> None:
    assert widens(*pair) == exact


def test_what_is_sent_to_several_engines_has_one_dtype() -> None:
    tensors = [TensorMeta("w", "bfloat16", (1,)), TensorMeta("v", "bfloat16", (1,))]
    assert common([{"w": "float32"}, {"w": "float32"}], tensors) == {"w": "float32"}
    for engines in ([{"w": "float32"}, {}], [{}, {"w": "float32"}]):
        with pytest.raises(PlanError, match="engines store w in different dtypes") as caught:
            common(engines, tensors)
        assert caught.value.tensor == "w"
