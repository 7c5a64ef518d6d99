from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.errors import SourceError
from instep.source.names import WRAPPER_SEGMENTS, canonical, canonical_names, natural_key

segments = st.sampled_from(["model", "layers", "0", "11", "self_attn", "module", "weight"])


@given(st.data())
def test_canonical_removes_wrappers_wherever_they_stand(data: st.DataObject) -> None:
    bare = data.draw(st.lists(segments, min_size=1))
    wrapped = []
    for segment in bare:
        wrapped += data.draw(st.lists(st.sampled_from(sorted(WRAPPER_SEGMENTS)), max_size=2))
        wrapped.append(segment)
    assert canonical(".".join(wrapped)) == ".".join(bare)


@pytest.mark.parametrize("name", ["my_orig_module.weight", "_orig_module.weight", "module.weight", "weight"])
def test_canonical_keeps_names_that_only_look_like_wrappers(name: str) -> None:
    assert canonical(name) == name


def test_canonical_names_keep_the_order_and_the_name_as_given() -> None:
    assert list(canonical_names(["b._orig_mod.w", "a.w"]).items()) == [("b.w", "b._orig_mod.w"), ("a.w", "a.w")]


def test_case_42_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(SourceError, match=r"a\._orig_mod\.w and a\.w both become a\.w") as caught:
        canonical_names(["a._orig_mod.w", "b.w", "a.w"])
    assert caught.value.tensor == "a.w"


def test_natural_order_counts_layers() -> None:
    names = ["layers.10.w", "layers.2.w", "embed", "layers.2.experts.11", "layers.2.experts.3", "7"]
    assert sorted(names, key=natural_key) == ["7", "embed", "layers.2.experts.3", "layers.2.experts.11", "layers.2.w", "layers.10.w"]
