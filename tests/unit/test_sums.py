"""Sums of parts that several workers pulled, against the digest of the whole (invariant 5 for tensors that are in one piece nowhere)."""

from __future__ import annotations

import msgspec
import pytest
import torch

from instep.digest import MASK, digest, seed_of
from instep.errors import DigestMismatch
from instep.plan.routes import Plan, check_sums, prove
from instep.protocol import ParamMeta, Region, Route, TensorMeta, WorkerPlan, WorkerReceipt

WHOLE = torch.arange(8 * 16, dtype=torch.int32).view(8, 16)
META = TensorMeta("w", "int32", (8, 16))


def half(rank: int) -> Region:
    """The columns of one of two workers."""
    return Region(8 * rank, (8, 8), (16, 1))


def plan(*regions: Region) -> Plan:
    workers = [
        WorkerPlan(
            [ParamMeta("p", "", "int32", region.shape)], [Route("w", region, "p", Region(0, region.shape, (region.shape[1], 1)))], {}
        )
        for region in regions
    ]
    return prove("engine", [META], workers, cast=False)


def part(region: Region) -> int:
    """What a worker sums up: the tensor with zeros where it reads nothing."""
    seen = torch.zeros_like(WHOLE)
    seen.as_strided(region.shape, region.stride, region.offset).copy_(WHOLE.as_strided(region.shape, region.stride, region.offset))
    return (digest(seen, META) - seed_of(META)) & MASK


def receipt(rank: int, **sums: dict[str, int]) -> WorkerReceipt:
    return msgspec.structs.replace(WorkerReceipt(rank, {}, [], [], {}, 0), **sums)


DIGESTS = {"w": digest(WHOLE, META)}
FULL = Region(0, (8, 16), (16, 1))


def test_two_halves_make_the_whole() -> None:
    receipts = [receipt(rank, parts={"w": part(half(rank))}) for rank in range(2)]
    check_sums("engine", plan(half(0), half(1)), [META], DIGESTS, receipts)


def test_replicas_count_once() -> None:
    check_sums("engine", plan(FULL, FULL), [META], DIGESTS, [receipt(rank, parts={"w": part(FULL)}) for rank in range(2)])


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_wrong_half_is_found(wrong: int) -> None:
    sums = [part(half(rank)) + (rank == wrong) for rank in range(2)]
    with pytest.raises(DigestMismatch, match="parts of w") as caught:
        check_sums("engine", plan(half(0), half(1)), [META], DIGESTS, [receipt(rank, parts={"w": sums[rank]}) for rank in range(2)])
    assert caught.value.tensor == "w"


def test_replicas_that_differ_are_found() -> None:
    with pytest.raises(DigestMismatch, match="two workers hold the same part of w"):
        check_sums("engine", plan(FULL, FULL), [META], DIGESTS, [receipt(rank, parts={"w": part(FULL) + rank}) for rank in range(2)])


def test_a_tensor_that_was_pulled_whole() -> None:
    check_sums("engine", plan(FULL), [META], DIGESTS, [receipt(0, wholes={"w": part(FULL)})])
    with pytest.raises(DigestMismatch, match="rank 0: w was not pulled"):
        check_sums("engine", plan(FULL), [META], DIGESTS, [receipt(0, wholes={"w": part(FULL) + 1})])
