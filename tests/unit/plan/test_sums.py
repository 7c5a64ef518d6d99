"""Sums of parts that several workers pulled, against the digest of the whole (invariant 5 for tensors that are in one piece nowhere)."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.digest import MASK, digest, seed_of
from instep.errors import DigestMismatch
from instep.plan.region import whole
from instep.plan.routes import Plan, prove
from instep.plan.sums import check_sums
from instep.protocol import ParamMeta, Region, Route, TensorMeta, WorkerPlan, WorkerReceipt
from instep.receiver.cuda_compare import masked

WHOLE = torch.arange(8 * 16, dtype=torch.int32).view(8, 16)
META = TensorMeta("w", "int32", (8, 16))


def half(rank: int) -> Region:
    """The columns of one of two workers."""
    return Region(8 * rank, (8, 8), (16, 1))


def plan(*regions: list[Region]) -> Plan:
    """regions: that each worker reads, into parameters of their own."""
    workers = []
    for some in regions:
        params = [ParamMeta(f"p{index}", "", "int32", region.shape) for index, region in enumerate(some)]
        routes = [Route("w", region, f"p{index}", whole(region.shape)) for index, region in enumerate(some)]
        workers.append(WorkerPlan(params, routes, {}))
    return prove("engine", [META], workers, cast=False)


def part(region: Region) -> int:
    """What a worker sums up: the tensor with zeros where it reads nothing."""
    return masked(META, region, WHOLE.as_strided(region.shape, region.stride, region.offset))


def receipt(rank: int, *regions: int, whole: int | None = None, proved: bool = False) -> WorkerReceipt:
    """regions: what it tells of each, by number; None of one that it does not tell."""
    parts = {"w": dict(enumerate(regions))} if regions else {}
    wholes = {} if whole is None else {"w": whole}
    return msgspec.structs.replace(WorkerReceipt(rank, {}, [], [], {}, 0), parts=parts, wholes=wholes, proved=proved)


DIGESTS = {"w": digest(WHOLE, META)}
FULL = Region(0, (8, 16), (16, 1))
HALVES = [part(half(0)), part(half(1))]
TOTAL = (DIGESTS["w"] - seed_of(META)) & MASK


def check(regions: list[list[Region]], *receipts: WorkerReceipt) -> None:
    """regions: that each worker reads."""
    check_sums("engine", plan(*regions), [META], DIGESTS, receipts)


def test_two_halves_make_the_whole() -> None:
    check([[half(0)], [half(1)]], receipt(0, HALVES[0]), receipt(1, HALVES[1]))


def test_replicas_count_once() -> None:
    check([[FULL], [FULL]], receipt(0, TOTAL), receipt(1, TOTAL))


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_wrong_half_is_found(wrong: int) -> None:
    with pytest.raises(DigestMismatch, match="parts of w") as caught:
        check([[half(0)], [half(1)]], *(receipt(rank, HALVES[rank] + (rank == wrong)) for rank in range(2)))
    assert caught.value.tensor == "w"


def test_replicas_that_differ_are_found() -> None:
    with pytest.raises(DigestMismatch, match="two workers hold the same part of w"):
        check([[FULL], [FULL]], receipt(0, TOTAL), receipt(1, TOTAL + 1))


def test_a_tensor_that_was_pulled_whole() -> None:
    check([[FULL]], receipt(0, whole=TOTAL))
    with pytest.raises(DigestMismatch, match="rank 0: w was not pulled"):
        check([[FULL]], receipt(0, whole=TOTAL + 1))


SHARED = Region(6 * 16, (2, 16), (16, 1))
OWN = [Region(48 * rank, (3, 16), (16, 1)) for rank in range(2)]
"""Rows of each worker's own, beside two that both read, as a state-space model with one group has them."""


@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3])
def test_a_part_that_workers_share_and_parts_of_their_own(wrong: int | None) -> None:
    sums = [part(OWN[0]), part(SHARED), part(OWN[1]), part(SHARED)]
    if wrong is not None:
        sums[wrong] += 1
    receipts = receipt(0, *sums[:2]), receipt(1, *sums[2:])
    with nullcontext() if wrong is None else pytest.raises(DigestMismatch, match="of w"):
        check([[OWN[0], SHARED], [OWN[1], SHARED]], *receipts)


LARGER = [Region(32 * rank, (6, 16), (16, 1)) for rank in range(2)]


def test_tensors_of_which_parts_overlap_are_summed_up_as_a_whole() -> None:
    proved = plan([LARGER[0]], [LARGER[1]])
    assert proved.wholes == {"w"}
    check([[LARGER[0]], [LARGER[1]]], receipt(0, whole=TOTAL), receipt(1, whole=TOTAL))
    with pytest.raises(DigestMismatch, match="parts of w"):  # parts of it would prove nothing
        check([[LARGER[0]], [LARGER[1]]], receipt(0, part(LARGER[0])), receipt(1, part(LARGER[1])))


@pytest.mark.parametrize("wrong", [0, 1])
def test_one_worker_that_copies_directly_beside_one_that_reloads(wrong: int) -> None:
    """The one that pulls it whole tells its own part too."""
    sums = [HALVES[rank] + (rank == wrong) for rank in range(2)]
    check([[half(0)], [half(1)]], receipt(0, HALVES[0]), receipt(1, HALVES[1], whole=TOTAL))
    with pytest.raises(DigestMismatch, match="parts of w"):
        check([[half(0)], [half(1)]], receipt(0, sums[0]), receipt(1, sums[1], whole=TOTAL))
    with pytest.raises(DigestMismatch, match="parts of w"):
        check([[half(0)], [half(1)]], receipt(0, HALVES[0]), receipt(1, whole=TOTAL))


def test_a_worker_that_does_not_tell_is_found() -> None:
    with pytest.raises(DigestMismatch, match="rank 1 does not tell what it holds of w"):
        check([[FULL], [FULL]], receipt(0, TOTAL), receipt(1))
    check([[FULL], [FULL]], receipt(0, TOTAL), receipt(1, proved=True))  # it has compared the bytes themselves


@given(st.integers(0, 63), st.integers(1, 64), st.sampled_from(["int8", "int16", "int32"]))
def test_parts_of_any_size_add_up(first: int, size: int, dtype: str) -> None:
    """Also where they cut words, and far from the beginning."""
    whole = torch.arange(20_000, dtype=torch.int32).to(getattr(torch, dtype))
    meta = TensorMeta("w", dtype, tuple(whole.shape))
    cuts = [0, 9_000 + first, 9_000 + first + size, 20_000]
    sums = [masked(meta, Region(a, (b - a,), (1,)), whole[a:b]) for a, b in itertools.pairwise(cuts)]
    assert (seed_of(meta) + sum(sums)) & MASK == digest(whole, meta)
