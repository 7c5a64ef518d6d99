"""What every test shares."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.call_by_call import Model, Trainer, fill
from helpers.hanging import shorten_deadlines
from helpers.toys import ToyHost
from hypothesis import HealthCheck, settings

from instep.receiver.state import Receiver
from instep.transport.shm import read as shm_read
from instep.transport.shm import segment as shm
from instep.transport.shm.publish import ShmTransport

# Ray ends actors where other processes of the machine fill its memory, as two test processes may.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

# A busy machine makes single examples slow; that is no finding.
settings.register_profile("instep", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("instep")

LONG_FIRST = ("integration", "originals", "doors", "sharded", "contract", "demo", "gpu", "unit")
"""Folders as two processes of pytest take them (`-n 2`): short files last, so that both end together."""
TOGETHER = ("tests/sharded/", "tests/integration/test_http_")
"""Files that share the ranks of their trainers; those that share a server."""
STRICT = ("unit", "sharded")
"""Folders in which a warning of anybody is an error. Others run more of other projects' code: there a warning of instep is one."""
WARNINGS = (
    "error",
    # What a cycle of references keeps open is told when its garbage is collected, which may be in any later test.
    "default::ResourceWarning",
    "default::pytest.PytestUnraisableExceptionWarning",
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",  # an import of PEFT's
)
LEFT_OUT = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def folder(item: pytest.Item) -> str:
        return item.path.relative_to(Path(__file__).parent).parts[0]

    for item in items:
        if folder(item) in STRICT:
            item.add_marker(pytest.mark.filterwarnings(*WARNINGS), append=False)  # a test's own come after
    if hasattr(config, "workerinput"):  # one of several processes
        items.sort(key=lambda item: LONG_FIRST.index(folder(item)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file runs in one process, as its tests share what its fixtures start, and so do files that
    share more."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((prefix for prefix in TOGETHER if file.startswith(prefix)), file)

    config.option.loadscopereorder = False  # the order is that of LONG_FIRST
    return ByFile(config, log)


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("exhaustive") or item.get_closest_marker("program"):
            item.config.stash[LEFT_OUT] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All processes have collected the same."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash[LEFT_OUT]:
        terminalreporter.write_line(f"whole programs and exhaustive cases left out: {count} (`make test-all` runs them too)")


@pytest.fixture(autouse=True, scope="module")
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny tensors gain nothing from threads, which wait for each other on a busy machine. Real engines choose for themselves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if "integration" in request.path.parts else 1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def own_log_level() -> Iterator[None]:
    """Libraries that other tests use set the root logger's level, and what instep logs would not be seen."""
    logger = logging.getLogger("instep")
    level = logger.level
    logger.setLevel(logging.INFO)
    yield
    logger.setLevel(level)


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of this test alone where shared segments live: what is in it can be counted."""
    monkeypatch.setattr(shm, "directory", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline passes as soon as an engine hangs (see `hanging.py`)."""
    shorten_deadlines(monkeypatch)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers look at what arrives in a thread, as they do with large versions, and are asked whether they are ready."""
    monkeypatch.setattr(shm_read, "AT_ONCE", -1)


@pytest.fixture
def host() -> ToyHost:
    return ToyHost(Model(), fill)


@pytest.fixture
def transport(segments: Path) -> Iterator[ShmTransport]:
    transport = ShmTransport()
    yield transport
    transport.close()


@pytest.fixture
def trainer(host: ToyHost, transport: ShmTransport) -> Trainer:
    return Trainer(Receiver(host), transport)
