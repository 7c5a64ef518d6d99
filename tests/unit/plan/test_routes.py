"""The proof of a plan. Invariant 4: nothing is skipped silently, and whatever is wrong is a `PlanError` before a byte moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.errors import PlanError
from instep.plan.region import whole
from instep.plan.routes import check_metadata, prove, signature
from instep.protocol import ParamMeta, Region, Route, TensorMeta, WorkerPlan, decode, encode

Q, K, V = (TensorMeta(f"attn.{name}_proj.weight", "bfloat16", (2, 4)) for name in "qkv")
QKV = ParamMeta("attn.qkv_proj.weight", "attn.qkv_proj", "bfloat16", (6, 4))


def rows(tensor: TensorMeta | None, target: ParamMeta, start: int, count: int, source_start: int = 0) -> Route:
    width = target.shape[1]
    source = Region(source_start * width, (count, width), (width, 1)) if tensor else None
    return Route(tensor.name if tensor else None, source, target.name, Region(start * width, (count, width), (width, 1)))


FUSED = [rows(Q, QKV, 0, 2), rows(K, QKV, 2, 2), rows(V, QKV, 4, 2)]


def worker(*routes: Route, params: tuple[ParamMeta, ...] = (QKV,), computed: dict[str, list[Region]] | None = None) -> WorkerPlan:
    """computed: of what the first parameter is computed, if it is."""
    opaque = params[0] if computed is not None else None
    only = {opaque.layer: "computed"} if opaque else {}
    return WorkerPlan(list(params), list(routes), only, [opaque.name] if opaque else [], computed or {})


def test_a_complete_plan() -> None:
    plan = prove("engine", [Q, K, V], [worker(*FUSED)], cast=False)
    assert (plan.signature, plan.casts, plan.kept()) == (signature([Q, K, V]), {}, {})


def test_a_plan_survives_the_wire() -> None:
    plan = worker(*FUSED, computed={Q.name: [whole(Q.shape)]})
    assert decode(encode(plan), WorkerPlan) == plan


SPLIT = TensorMeta("attn.q_proj.weight", "bfloat16", (3, 4))
WRONG = {
    "only q_proj of a fused layer": ([Q], worker(FUSED[0]), QKV.name, "filled in part only, by attn.q_proj.weight: 16 elements"),
    "the middle part is missing": ([Q, V], worker(FUSED[0], FUSED[2]), QKV.name, "first in row 2"),
    "a parameter without any source": ([Q], worker(), QKV.name, r"nothing in the source fills attn.qkv_proj.weight \[6, 4\]"),
    "rows written twice": ([Q, K, V], worker(*FUSED, rows(K, QKV, 1, 2)), QKV.name, "are written twice, by attn.q_proj.weight"),
    "the same route twice": ([Q, K, V], worker(*FUSED, FUSED[0]), QKV.name, "are written twice"),
    "an unknown tensor": ([Q, K, V, TensorMeta("extra", "bfloat16", (1,))], worker(*FUSED), "extra", "loader has no place for extra"),
    "a tensor larger than its place": ([SPLIT, K, V], worker(*FUSED), SPLIT.name, "only 8 of the 12 elements of attn.q_proj.weight"),
    "a narrower dtype": (
        [TensorMeta(Q.name, "float32", Q.shape), K, V], worker(*FUSED), Q.name, "float32 in the source, bfloat16 in the engine",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "plan", "tensor", "text"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(tensors: list[TensorMeta], plan: WorkerPlan, tensor: str, text: str) -> None:
    with pytest.raises(PlanError, match=text) as caught:
        prove("engine-7", tensors, [plan], cast=False)
    assert caught.value.tensor == tensor
    assert "engine-7" in str(caught.value)
    assert "next:" in str(caught.value)


def test_the_rank_is_named() -> None:
    with pytest.raises(PlanError, match="engine rank 1: nothing in the source fills"):
        prove("engine", [Q, K, V], [worker(*FUSED), worker()], cast=False)


def test_rounded_tensors_are_listed_where_rounding_is_allowed() -> None:
    wide = TensorMeta(Q.name, "float32", Q.shape)
    plan = prove("engine", [wide, K, V], [worker(*FUSED)], cast=True)
    assert (plan.casts, plan.rounded, plan.widened) == ({Q.name: "bfloat16"}, {Q.name: "bfloat16"}, {})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_wider_dtype_needs_no_leave_and_is_what_is_sent(dtype: str) -> None:
    param = ParamMeta(QKV.name, QKV.layer, dtype, QKV.shape)
    plan = prove("engine", [Q, K, V], [worker(*FUSED, params=(param,))], cast=False)
    assert plan.casts == plan.widened == {meta.name: dtype for meta in (Q, K, V)}
    assert plan.rounded == {}


def test_the_refusal_counts_and_names_only_what_would_be_rounded() -> None:
    """K is widened, and comes first. Half precision has not the range of bfloat16."""
    k, v = ParamMeta("k", "k", "float32", (2, 4)), ParamMeta("v", "v", "float16", (2, 4))
    plan = worker(rows(K, k, 0, 2), rows(V, v, 0, 2), params=(k, v))
    with pytest.raises(PlanError, match=rf"1 tensors would be rounded, the first is {V.name}: bfloat16 in the source, float16") as caught:
        prove("engine", [K, V], [plan], cast=False)
    assert caught.value.tensor == V.name
    found = prove("engine", [K, V], [plan], cast=True)
    assert (found.rounded, found.widened) == ({V.name: "float16"}, {K.name: "float32"})
    assert found.casts == {K.name: "float32", V.name: "float16"}


def test_padding_and_kept_rows() -> None:
    """Rows that the loader fills with a constant need no source; rows that nobody writes need a reason."""
    padded = ParamMeta("embed.weight", "embed", "bfloat16", (8, 4))
    embed = TensorMeta("embed.weight", "bfloat16", (6, 4))
    fill = rows(None, padded, 6, 2)
    assert prove("engine", [embed], [worker(rows(embed, padded, 0, 6), fill, params=(padded,))], cast=False).kept() == {}
    spare = ParamMeta("embed.weight", "embed", "bfloat16", (8, 4), spare=8, kept="padded vocabulary rows")
    kept = prove("engine", [embed], [worker(rows(embed, spare, 0, 6), params=(spare,))], cast=False).kept()
    assert kept == {"embed.weight": "padded vocabulary rows"}
    with pytest.raises(PlanError, match="first in row 5"):
        prove("engine", [TensorMeta("embed.weight", "bfloat16", (5, 4))], [worker(rows(embed, spare, 0, 5), params=(spare,))], cast=False)


def test_workers_together_must_read_every_element() -> None:
    half = ParamMeta("w", "", "bfloat16", (3, 4))
    tensor = TensorMeta("w", "bfloat16", (6, 4))
    ranks = [worker(rows(tensor, half, 0, 3, source_start=start), params=(half,)) for start in (0, 3)]
    assert len(prove("engine", [tensor], ranks, cast=False).workers) == 2
    with pytest.raises(PlanError, match="only 12 of the 24 elements of w"):
        prove("engine", [tensor], [ranks[0], ranks[0]], cast=False)


def test_a_row_that_is_repeated_is_read_once() -> None:
    """A loader that broadcasts one row over a parameter has read one row."""
    param, tensor = ParamMeta("w", "", "bfloat16", (3, 4)), TensorMeta("w", "bfloat16", (2, 4))
    with pytest.raises(PlanError, match="only 4 of the 8 elements of w"):
        prove("engine", [tensor], [worker(Route("w", Region(0, (3, 4), (0, 1)), "w", whole((3, 4))), params=(param,))], cast=False)


def test_a_parameter_that_is_not_made_of_copies_is_left_to_the_reload_session() -> None:
    plan = prove("engine", [Q, K, V], [worker(computed={meta.name: [whole(meta.shape)] for meta in (Q, K, V)})], cast=False)
    assert plan.workers[0].reload_only


NORM, WEIGHT = ParamMeta("norm.weight", "norm", "bfloat16", (4,)), TensorMeta("norm.weight", "bfloat16", (4,))
BIAS = ParamMeta("norm.bias", "norm", "bfloat16", (4,))


@pytest.mark.parametrize(
    ("tensors", "read", "text"),
    [
        ([WEIGHT, Q], [whole((4,))], "loader has no place for attn.q_proj.weight"),
        ([TensorMeta("norm.weight", "bfloat16", (6,))], [whole((4,))], "only 4 of the 6 elements of norm.weight"),
        ([WEIGHT], [Region(0, (2,), (1,)), Region(1, (2,), (1,))], "only 3 of the 4 elements of norm.weight"),
    ],
)
def test_of_a_computed_parameter_everything_is_read_and_of_other_tensors_too(
    tensors: list[TensorMeta], read: list[Region], text: str
) -> None:
    with pytest.raises(PlanError, match=text):
        prove("engine", tensors, [worker(params=(NORM,), computed={"norm.weight": read})], cast=False)


def test_another_parameter_of_a_computed_ones_layer_needs_a_source() -> None:
    plan = worker(params=(NORM, BIAS), computed={"norm.weight": [whole((4,))]})
    with pytest.raises(PlanError, match=r"nothing in the source fills norm\.bias"):
        prove("engine", [WEIGHT], [plan], cast=False)


BUFFER = ParamMeta("router.bias", "router", "float32", (4,), buffer=True)


def test_a_buffer_that_a_checkpoint_has_needs_a_source() -> None:
    with pytest.raises(PlanError, match=r"nothing in the source fills the buffer router\.bias") as caught:
        prove("engine", [Q, K, V], [worker(*FUSED, params=(QKV, BUFFER))], cast=False)
    assert "state dict" in str(caught.value)
    sent = TensorMeta("router.bias", "float32", (4,))
    plan = worker(*FUSED, Route(sent.name, whole((4,)), BUFFER.name, whole((4,))), params=(QKV, BUFFER))
    assert prove("engine", [Q, K, V, sent], [plan], cast=False).kept() == {}


def test_a_buffer_that_the_trainers_whole_checkpoint_lacks_is_the_engines_own() -> None:
    assert prove("engine", [Q, K, V], [worker(*FUSED, params=(QKV, BUFFER))], cast=False, whole=True)


def test_a_tensor_that_the_loader_passes_over_since_its_place_is_tied_is_told_so() -> None:
    head = ParamMeta("lm_head.weight", "lm_head", "bfloat16", (2, 4), 8, "the same tensor as embed.weight")
    embed = ParamMeta("embed.weight", "embed", "bfloat16", (2, 4))
    plan = worker(rows(EMBED, embed, 0, 2), params=(embed, head))
    with pytest.raises(PlanError, match=r"no place for lm_head\.weight: there it is the same tensor as embed\.weight") as caught:
        prove("engine", [EMBED, TensorMeta("lm_head.weight", "bfloat16", (2, 4))], [plan], cast=False)
    assert "tie_word_embeddings" in str(caught.value)


HEAD, EMBED = TensorMeta("lm_head.weight", "bfloat16", (2, 4), alias_of="embed.weight"), TensorMeta("embed.weight", "bfloat16", (2, 4))


def test_an_alias_needs_no_reader() -> None:
    embed = ParamMeta("embed.weight", "embed", "bfloat16", (2, 4))
    assert prove("engine", [HEAD, EMBED], [worker(rows(EMBED, embed, 0, 2), params=(embed,))], cast=False).casts == {}


def test_what_is_stored_in_two_dtypes_is_sent_as_the_source_has_it() -> None:
    """Sent in one of them the other place would hold what was rounded for this one. A tied pair that the engine keeps apart."""
    head = ParamMeta("lm_head.weight", "lm_head", "float32", (2, 4))
    embed = ParamMeta("embed.weight", "embed", "bfloat16", (2, 4))
    plan = worker(rows(HEAD, head, 0, 2), rows(EMBED, embed, 0, 2), params=(head, embed))
    found = prove("engine", [HEAD, EMBED], [plan], cast=False)
    assert (found.casts, found.widened, found.rounded) == ({}, {"embed.weight": "float32"}, {})
    wide = [TensorMeta(meta.name, "float32", meta.shape, meta.alias_of) for meta in (HEAD, EMBED)]
    found = prove("engine", wide, [plan], cast=True)
    assert (found.casts, found.widened, found.rounded) == ({}, {}, {"embed.weight": "bfloat16"})


def test_a_widened_alias_is_what_it_stands_for_widened() -> None:
    params = head, embed = [ParamMeta(meta.name, meta.name, "float32", meta.shape) for meta in (HEAD, EMBED)]
    plan = worker(rows(HEAD, head, 0, 2), rows(EMBED, embed, 0, 2), params=(*params,))
    found = prove("engine", [HEAD, EMBED], [plan], cast=False)
    assert found.casts == found.widened == {"embed.weight": "float32"}


def test_what_a_loader_computes_with_is_sent_as_the_source_has_it() -> None:
    """It may compute something else with another dtype."""
    wide = ParamMeta("wide", "wide", "float32", (2, 4))
    plan = worker(rows(Q, wide, 0, 2), params=(QKV, wide), computed={Q.name: [whole(Q.shape)]})
    assert prove("engine", [Q], [plan], cast=False).casts == {}


METADATA = {
    "empty": ([], None, "no tensors"),
    "twice": ([Q, K, Q], Q.name, "twice"),
    "unknown dtype": ([TensorMeta("w", "complex64", (1,))], "w", "dtype complex64 cannot be sent"),
    "alias of nothing": ([HEAD], HEAD.name, "is an alias of 'embed.weight'"),
    "alias of another shape": (
        [HEAD, TensorMeta("embed.weight", "bfloat16", (4, 2))],
        HEAD.name,
        "not a tensor of the same dtype and shape",
    ),
    "alias of another dtype": (
        [HEAD, TensorMeta("embed.weight", "float16", (2, 4))],
        HEAD.name,
        "not a tensor of the same dtype and shape",
    ),
    "alias of an alias": ([HEAD, EMBED, TensorMeta("third", "bfloat16", (2, 4), alias_of="lm_head.weight")], "third", "is an alias"),
    "alias of itself": ([TensorMeta("w", "bfloat16", (1,), alias_of="w")], "w", "is an alias"),
}


@pytest.mark.parametrize(("tensors", "tensor", "text"), METADATA.values(), ids=METADATA)
def test_metadata_that_makes_no_sense(tensors: list[TensorMeta], tensor: str | None, text: str) -> None:
    with pytest.raises(PlanError, match=text) as caught:
        check_metadata(tensors)
    assert caught.value.tensor == tensor


@given(st.permutations([Q, K, V, EMBED, HEAD]))
def test_good_metadata_in_any_order(tensors: list[TensorMeta]) -> None:
    check_metadata(tensors)


@pytest.mark.parametrize("other", [(Q.name, "float16", (2, 4)), (Q.name, "bfloat16", (4, 2)), ("w", "bfloat16", (2, 4))])
def test_a_signature_changes_with_the_list(other: tuple[str, str, tuple[int, ...]]) -> None:
    assert signature([TensorMeta(*other), K]) != signature([Q, K])
    assert signature([Q, K]) != signature([K, Q])
    assert signature([HEAD]) != signature([TensorMeta(HEAD.name, HEAD.dtype, HEAD.shape)])
