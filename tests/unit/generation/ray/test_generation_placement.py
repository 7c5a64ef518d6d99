"""Where engines go, as data."""

from __future__ import annotations

import pytest

from instep.errors import ConfigError
from instep.generation.ray.placement import Place, bundles, node_order, places


def test_an_engine_has_a_bundle_with_all_its_workers() -> None:
    assert bundles(2, 4) == [{"GPU": 4.0, "CPU": 4.0}] * 2


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ({0: "a", 1: "a", 2: "b"}, [0, 1, 2]),
        ({0: "b", 1: "a", 2: "b", 3: "a"}, [0, 2, 1, 3]),
        ({2: "c", 0: "a", 1: "b", 3: "a"}, [0, 3, 1, 2]),
        ({}, []),
    ],
)
def test_bundles_of_one_node_come_one_after_the_other(nodes: dict[int, str], expected: list[int]) -> None:
    assert node_order(nodes) == expected


def test_engines_on_gpus_of_their_own_take_whole_ones_in_the_order_of_nodes() -> None:
    assert places(3, 2, {0: "b", 1: "a", 2: "b"}, shared=False) == [Place(2, 2.0, 0), Place(2, 2.0, 2), Place(2, 2.0, 1)]


def test_engines_beside_a_trainer_take_a_part_and_no_cpu() -> None:
    assert places(2, 1, {0: "a", 1: "a"}, shared=True) == [Place(0.0, 0.5, 0), Place(0.0, 0.5, 1)]
    assert places(1, 1, {0: "a", 1: "a"}, shared=True, gpus=0.2) == [Place(0.0, 0.2, 0)]


def test_without_a_gpu_each_worker_has_a_cpu() -> None:
    assert places(2, 2, None, shared=False) == [Place(2, 0.0)] * 2


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 engines do not go into 2 bundles"):
        places(3, 1, {0: "a", 1: "a"}, shared=True)
    with pytest.raises(ConfigError, match="tensor_parallel_size must be 1"):
        places(1, 2, {0: "a"}, shared=True)
