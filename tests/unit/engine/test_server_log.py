"""The server's log: one line for each version that it serves, and no line for the requests that brought it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from helpers.asgi import asgi_engine, served
from helpers.toys import attention

from instep import WeightSync
from instep.engine.remote import server_log
from instep.engine.remote.http_control import PREFIX
from instep.engine.remote.server_log import Quiet
from instep.errors import SyncError

pytestmark = pytest.mark.usefixtures("segments")


@contextmanager
def new_loggers() -> Iterator[tuple[logging.Logger, ...]]:
    """instep's, uvicorn's and that of its access log, as they are in a new server. Afterwards as they were."""
    names = ("instep", server_log.SERVER, server_log.ACCESS)
    found = tuple(map(logging.getLogger, names))
    before = [(logger, logger.handlers, logger.filters, logger.level, logger.propagate) for logger in found]
    for logger in found:
        logger.handlers, logger.filters, logger.propagate = [], [], False
        logger.setLevel(logging.NOTSET)
    try:
        yield found
    finally:
        restore(before)


def restore(before: list[Any]) -> None:
    for logger, logger.handlers, logger.filters, level, logger.propagate in before:
        logger.setLevel(level)


def access_record(path: str, status: int) -> logging.LogRecord:
    """As uvicorn makes them."""
    args = ("127.0.0.1:1", "POST", path, "1.1", status)
    return logging.LogRecord(server_log.ACCESS, logging.INFO, __file__, 1, '%s - "%s %s HTTP/%s" %d', args, None)


@pytest.mark.parametrize(
    ("path", "status", "shown"),
    [
        ("/instep/v1/commit", 200, False),
        ("/instep/v1/status?x=1", 200, False),
        ("/model-a/instep/v1/label", 200, False),  # behind a proxy's prefix
        ("/instep/v1/commit", 500, True),
        ("/instep/v1/hello", 401, True),
        ("/instep/v1/prepare", 409, True),
        ("/v1/chat/completions", 200, True),
        ("/instep/v10", 200, True),
    ],
)
def test_the_access_log_leaves_out_control_requests_that_went_well(path: str, status: int, shown: bool) -> None:
    assert Quiet(PREFIX).filter(access_record(path, status)) is shown


def test_records_of_another_form_are_left_alone() -> None:
    assert Quiet(PREFIX).filter(logging.LogRecord("uvicorn.access", logging.INFO, __file__, 1, "started", (), None))
    assert Quiet(PREFIX).filter(logging.LogRecord("uvicorn.access", logging.INFO, __file__, 1, "%(a)s", ({"a": 1},), None))


def test_uvicorn_shows_what_instep_logs_at_its_own_level() -> None:
    with new_loggers() as (instep, uvicorn, access):
        shown = logging.NullHandler()
        uvicorn.addHandler(shown)
        uvicorn.setLevel(logging.WARNING)
        for _ in range(2):
            server_log.begin(PREFIX)
        assert (instep.handlers, instep.level, len(access.filters)) == ([shown], logging.WARNING, 1)


def test_a_logger_that_somebody_has_configured_is_left_alone() -> None:
    with new_loggers() as (instep, uvicorn, _):
        instep.addHandler(own := logging.NullHandler())
        uvicorn.addHandler(logging.NullHandler())
        server_log.begin(PREFIX)
        assert instep.handlers == [own]


def test_each_push_is_one_line_that_says_what_is_served_the_pause_and_who_pushed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "instep")
    at, weights = served(), attention(1)

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.module == "observed"]

    with WeightSync(weights, [asgi_engine(at)]) as sync:
        for step in (1, 2):
            weights.update(attention(step))
            sync.push(f"step-{step}")
        assert len(lines()) == 2
        assert re.fullmatch(r"memory serves step-2 \(after \d\.\d\d s\), pushed by trainer [0-9a-f]{8} at 127\.0\.0\.1", lines()[1])
        at.engine.inject("commit")  # type: ignore[attr-defined]
        with pytest.raises(SyncError):
            sync.push("step-3")
    assert len(lines()) == 2
