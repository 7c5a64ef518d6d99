"""What every test shares."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from call_by_call import Model, Trainer, fill
from hanging import shorten_deadlines
from hypothesis import HealthCheck, settings
from toys import ToyHost

from instep.receiver.state import Receiver
from instep.transport import shm
from instep.transport.shm import ShmTransport

# A busy machine makes single examples slow; that is no finding.
settings.register_profile("instep", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("instep")


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
