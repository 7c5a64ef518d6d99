"""Which copies the kernel makes and which sums it tells, decided without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from instep.plan.region import whole
from instep.plan.rows import Rows, contiguous
from instep.protocol import Region, Route, TensorMeta
from instep.receiver.copies import Copies
from instep.receiver.pull import Moves, moves

META = TensorMeta("w", "bfloat16", (6, 6))
OTHER = TensorMeta("v", "bfloat16", (8,))
HEAD = TensorMeta("head", "bfloat16", (6, 6), alias_of="w")
METAS = {meta.name: meta for meta in (META, OTHER, HEAD)}
FIRST = 4096


def rows(start: int, stop: int, *, param: str = "p", tensor: str = "w") -> Route:
    """To the same rows of a parameter of the same shape."""
    return Route(tensor, Region(6 * start, (stop - start, 6), (6, 1)), param, Region(6 * start, (stop - start, 6), (6, 1)))


V = Route("v", whole((8,)), "v", whole((8,)))


def decided(*routes: Route, beside: Sequence[Route] = (), wholes: Sequence[str] = ()) -> Moves:
    """beside: routes of other layers. wholes: tensors that are summed up as a whole."""
    model = nn.Module()
    model.p, model.q = (nn.Parameter(torch.zeros(6, 6, dtype=torch.bfloat16)) for _ in range(2))
    model.v = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    return moves(Copies(model, frozenset(), routes, [*routes, *beside]), METAS, places, wholes)


def places(meta: TensorMeta) -> list[Rows]:
    return [contiguous(meta.nbytes // 8, (FIRST if meta.name == "w" else 2 * FIRST) // 8)]


def summed(made: Moves, name: str) -> list[tuple[int, int, int]]:
    """Of each run that counts for a tensor the number of its region, first byte and words."""
    numbers = {slot: number for number, slot in made.parts.get(name, {}).items()}
    runs = [run for run in made.runs if run.slot in numbers]
    return [(numbers[run.slot], 8 * run.rows.place - FIRST, run.rows.numel) for run in runs]


def test_routes_of_whole_words_are_one_launch() -> None:
    made = decided(rows(0, 4), rows(4, 6), V)
    assert summed(made, "w") == [(0, 0, 6), (1, 48, 3)]
    assert [run.rows.at for run in made.runs] == [0, 6, 0]
    assert made.parts.keys() == {"w", "v"}
    assert not made.odd


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_one_route_that_is_no_whole_number_of_words_makes_its_tensor_odd(cut: int) -> None:
    """A row has twelve bytes, so that only even cuts fall between words."""
    made = decided(rows(0, cut), rows(cut, 6), V)
    assert list(made.odd) == ["w"]
    assert len(made.odd["w"]) == 2
    assert made.parts.keys() == {"v"}


def test_a_tensor_is_odd_as_a_whole_though_most_of_its_routes_are_not() -> None:
    made = decided(rows(0, 2), rows(2, 4), rows(4, 5), rows(5, 6))
    assert list(made.odd) == ["w"]
    assert len(made.odd["w"]) == 4
    assert not made.runs
    assert not made.parts


@pytest.mark.parametrize("reader", ["w", "head"])
def test_regions_are_numbered_with_those_of_other_layers(reader: str) -> None:
    """So a trainer that adds up what a worker tells knows which ones are meant."""
    made = decided(rows(2, 4), V, beside=[rows(0, 2, tensor=reader), rows(4, 6)])
    assert summed(made, "w") == [(1, 24, 3)]
    assert made.parts.keys() == {"w", "v"}


def test_what_workers_read_overlapping_parts_of_is_pulled_whole() -> None:
    made = decided(rows(0, 4), V, wholes=["w"])
    assert list(made.odd) == ["w"]
    assert made.asked == [rows(0, 4)]
    assert made.parts.keys() == {"v"}


def test_the_same_bytes_for_two_parameters_count_once() -> None:
    made = decided(rows(0, 6), rows(0, 6, param="q", tensor="head"))
    assert len(made.runs) == 2
    assert summed(made, "w") == [(0, 0, 9)]
    assert {run.slot for run in made.runs} == set(range(made.slots))


def test_routes_that_overlap_cannot_be_added_up() -> None:
    made = decided(rows(0, 4), rows(2, 6, param="q"))
    assert list(made.odd) == ["w"]
    assert not made.parts


def test_a_route_that_reads_an_element_twice_cannot_be_added_up() -> None:
    expanded = Route("v", Region(0, (2, 8), (0, 1)), "p", Region(0, (2, 8), (8, 1)))
    assert list(decided(expanded).odd) == ["v"]
