"""What the ranks of a trainer saw, for tests that are marked with the size of the group and the case that it plays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rank_groups import Ranks, Seen, possible

SECONDS = 1200.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (mark := item.get_closest_marker("ranks")) is not None:
            item.add_marker(pytest.mark.timeout(1300))
            if not possible(mark.args[1]):
                item.add_marker(pytest.mark.skip(reason="DeepSpeed is not installed: pip install 'instep[deepspeed]'"))


@pytest.fixture(scope="session")
def groups(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Ranks]:
    marks = [mark.args for item in request.session.items if (mark := item.get_closest_marker("ranks")) is not None]
    started: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size not in started:
            cases = [case for ranks, case in marks if ranks == size and possible(case)]
            started[size] = Ranks(tmp_path_factory.mktemp("ranks"), size, cases, SECONDS)
        return started[size]

    return of


@pytest.fixture
def found(request: pytest.FixtureRequest, groups: Callable[[int], Ranks]) -> Seen:
    """What each rank reports of the case of this test."""
    size, case = request.node.get_closest_marker("ranks").args
    return groups(size).saw(case)
