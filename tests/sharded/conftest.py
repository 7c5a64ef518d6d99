"""What the ranks of a trainer saw, for tests that are marked with the size of the group and the case that it plays."""

from __future__ import annotations

import pytest
from helpers.rank_groups import Ranks, Seen, possible

SECONDS = 1200.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (mark := item.get_closest_marker("ranks")) is not None:
            item.add_marker(pytest.mark.timeout(1300))
            if not possible(mark.args[1]):
                item.add_marker(pytest.mark.skip(reason="DeepSpeed is not installed: pip install 'instep[deepspeed]'"))


@pytest.fixture(scope="session")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    groups: dict[int, list[str]] = {}
    for item in request.session.items:
        if (mark := item.get_closest_marker("ranks")) is not None and possible(mark.args[1]):
            groups.setdefault(mark.args[0], []).append(mark.args[1])
    return Ranks(tmp_path_factory.mktemp("ranks"), groups, SECONDS)


@pytest.fixture
def found(request: pytest.FixtureRequest, played: Ranks) -> Seen:
    """What each rank reports of the case of this test."""
    return played.saw(*request.node.get_closest_marker("ranks").args)
