"""What travels: plain data in, the same data out, and one kind of error for everything else. Invariant 6: nothing is unpickled."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.protocol import ITEM_BYTES, Fault, Manifest, Region, Reply, Request, Route, TensorMeta, decode, encode, raw

names = st.text(max_size=8)
sizes = st.tuples() | st.tuples(st.integers(0, 2**31), st.integers(0, 9))
metas = st.builds(TensorMeta, name=names, dtype=st.sampled_from(sorted(ITEM_BYTES)), shape=sizes, alias_of=st.none() | names)
regions = st.builds(Region, offset=st.integers(0, 2**40), shape=sizes, stride=sizes)
replies = st.builds(
    Reply, seq=st.integers(-(2**60), 2**60), rank=st.integers(0, 99), state=st.sampled_from(["serving", "dirty"]), version=names,
    fault=st.none() | st.builds(Fault, kind=names, message=names), body=st.just(raw(None)),
)  # fmt: skip


@given(metas | regions | st.builds(Route, tensor=names, source=regions, param=names, target=regions) | replies)
def test_round_trip(value: Any) -> None:
    assert decode(encode(value), type(value)) == value


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_item_bytes_are_pytorchs(dtype: str) -> None:
    assert torch.empty((), dtype=getattr(torch, dtype)).element_size() == ITEM_BYTES[dtype]


class Evil:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("unpickled",))


@given(st.binary(max_size=40))
def test_whatever_is_no_message_is_a_decode_error(data: bytes) -> None:
    for kind in (Request, Reply, Manifest):
        try:
            decode(data, kind)
        except msgspec.DecodeError:
            continue


@pytest.mark.parametrize("data", [pickle.dumps(Evil()), encode(Request(1, "xyz")).replace(b"xyz", b"x\xffz")], ids=["pickle", "no text"])
def test_a_pickle_is_no_message_and_neither_is_a_broken_name(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(data, Request)
