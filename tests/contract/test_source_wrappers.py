"""Wrappers around a module, alone and in pairs, leave the names and bits that `save_pretrained` writes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.source_models import MODELS, WRAPPERS, assert_source_equals, checkpoint_layers, compile_layers, llama, lora, make, saved
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from instep.errors import SourceError
from instep.source.module import ModuleSource


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """DDP wants one, of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@cache
def expected(model: str) -> dict[str, torch.Tensor]:
    return saved(make(model))


NESTINGS = [(), *((one,) for one in WRAPPERS), *itertools.permutations(WRAPPERS, 2)]


@pytest.mark.parametrize("wrappers", NESTINGS, ids="+".join)
@pytest.mark.parametrize("model", MODELS)
def test_cases_30_31_33_37_names_and_bits_are_those_of_save_pretrained(model: str, wrappers: tuple[str, ...]) -> None:
    module = make(model)
    for wrapper in wrappers:
        module = WRAPPERS[wrapper](module)
    assert_source_equals(ModuleSource(module), expected(model))


@pytest.mark.parametrize("wrap", [torch.compile, compile_layers, checkpoint_layers])
def test_case_31_an_adapter_around_a_wrapped_model(wrap: Any) -> None:
    torch.manual_seed(0)
    model = lora(llama())
    torch.manual_seed(0)
    assert_source_equals(ModuleSource(lora(wrap(llama()))), saved(model))


def test_a_sharded_parameter_is_refused() -> None:
    model = fully_shard(llama(), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(SourceError, match="is a DTensor"):
        ModuleSource(model).metadata()
