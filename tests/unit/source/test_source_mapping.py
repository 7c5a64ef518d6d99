from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from helpers.source_models import assert_source_equals, llama

from instep.errors import ConfigError, SourceError
from instep.source import Source, device_of, open_source
from instep.source.module import MappingSource


def test_names_order_and_values_are_as_given() -> None:
    mapping = {"z": torch.randn(2, 3), "a": torch.arange(4, dtype=torch.int16), "scalar": torch.tensor(2.0)}
    source = open_source(mapping)
    assert isinstance(source, MappingSource)
    assert isinstance(source, Source)
    assert [meta.name for meta in source.metadata()] == ["z", "a", "scalar"]
    assert_source_equals(source, mapping)
    assert [tensor.data_ptr() for _, tensor in source.tensors()] == [tensor.data_ptr() for tensor in mapping.values()]
    assert source.score([1, 2]) is None


def test_case_65_the_first_of_two_tied_names_keeps_the_bytes() -> None:
    state = llama(tied=True).state_dict()
    metas = MappingSource(state).metadata()
    assert [(meta.name, meta.alias_of) for meta in metas if meta.alias_of] == [("lm_head.weight", "model.embed_tokens.weight")]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda base: base[1:], id="offset"),
        pytest.param(lambda base: base.view(2, 8), id="shape"),
        pytest.param(lambda base: base.t(), id="stride"),
        pytest.param(lambda base: base.view(torch.int32), id="dtype"),
        pytest.param(torch.clone, id="storage"),
    ],
)
def test_only_the_same_elements_in_the_same_order_are_an_alias(other: Any) -> None:
    base = torch.randn(4, 4)
    mapping = {"base": base, "other": other(base), "same": base.detach()}
    assert [meta.alias_of for meta in MappingSource(mapping).metadata()] == [None, None, "base"]
    assert_source_equals(MappingSource(mapping), {"base": base, "other": other(base)})


@pytest.mark.parametrize(
    "strided",
    [torch.randn(4, 6).t(), torch.randn(8, 6)[::2], torch.randn(4, 6).narrow(1, 1, 3), torch.randn(4, 1).expand(4, 6)],
    ids=["transpose", "step", "narrow", "expand"],
)
def test_case_73_strided_tensors_give_their_logical_values(strided: torch.Tensor) -> None:
    assert_source_equals(MappingSource({"w": strided}), {"w": strided.clone()})


def _packed() -> torch.Tensor:
    tensor = torch.zeros(8, 1, dtype=torch.uint8)
    tensor.quant_state = object()  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    ("mapping", "error", "text"),
    [
        ({1: torch.ones(2)}, ConfigError, "names as keys, not 1"),
        ({"w": [1.0]}, ConfigError, "w is a list, not a tensor"),
        ({"w": None}, ConfigError, "w is a NoneType, not a tensor"),
        ({"w": torch.ones(2, device="meta")}, SourceError, "w is on the meta device"),
        ({"w": torch.ones(2).to_sparse()}, SourceError, "w has layout torch.sparse_coo"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, SourceError, "w has dtype complex64, which cannot travel"),
        ({"w": torch.ones(0)}, SourceError, "w has no elements"),  # case 76
        ({"w": _packed()}, SourceError, "w is quantised"),  # case 83
    ],
)
def test_what_cannot_travel_is_refused_at_once(mapping: dict[Any, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        open_source(mapping)


def test_the_mapping_is_read_anew_at_each_call() -> None:
    mapping = {"a": torch.zeros(3)}
    source = MappingSource(mapping)
    stamp = source.stamp()
    assert source.stamp() == stamp
    mapping["a"].add_(1)
    assert source.stamp() != stamp
    mapping["b"] = torch.ones(2)
    assert_source_equals(source, mapping)


def test_a_mapping_tells_its_device_without_a_look_at_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    source = MappingSource({"_orig_mod.w": torch.ones(3), "v": torch.ones(2)})
    monkeypatch.setattr(MappingSource, "metadata", lambda self: pytest.fail("all tensors were looked at"))
    assert device_of(source) == torch.device("cpu")


def test_tensors_made_in_inference_mode_are_read() -> None:
    with torch.inference_mode():
        mapping = {"w": torch.ones(3)}
    source = MappingSource(mapping)
    assert_source_equals(source, mapping)
    assert source.stamp() == source.stamp()


def test_neither_transformers_nor_peft_nor_safetensors_is_needed_for_tensors() -> None:
    """In a fresh interpreter where importing any of them fails."""
    program = """
import sys
for name in ("transformers", "peft", "safetensors"):
    sys.modules[name] = None
import torch
from instep.errors import ConfigError
from instep.source import open_source
module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
for source in (open_source(module), open_source(module.state_dict())):
    assert [name for name, _ in source.tensors()] == list(module.state_dict())
    assert source.score([1, 2]) is None
try:
    open_source(".")
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == 'reading a checkpoint needs the package safetensors\n  next: pip install "instep[cli]"\n'
