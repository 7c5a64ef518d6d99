"""Keeps a server's log short: one line for each version that is served (see `observed.py`), and
none for the eight requests that brought it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger("instep")
ACCESS, SERVER = "uvicorn.access", "uvicorn"


def begin(prefix: str) -> None:
    """Shows instep's log through uvicorn's handlers if it has none, and hides the requests to
    `prefix`.

    May be repeated.
    """
    access = logging.getLogger(ACCESS)
    if not any(isinstance(known, Quiet) for known in access.filters):
        access.addFilter(Quiet(prefix))
    if not logger.hasHandlers():
        for handler in logging.getLogger(SERVER).handlers:
            logger.addHandler(handler)
        logger.setLevel(logger.level or logging.getLogger(SERVER).level)


class Quiet(logging.Filter):
    """Drops successful requests to control routes from uvicorn's access log."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def filter(self, record: logging.LogRecord) -> bool:
        if not isinstance(record.args, Sequence) or len(record.args) != 5:
            return True
        _, _, path, _, status = record.args  # client, method, path, HTTP version, status
        return not (isinstance(status, int) and status < 400 and f"{self.prefix}/" in str(path))
