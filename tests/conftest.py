"""What every test shares."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from instep.transport import shm

# A busy machine makes single examples slow; that is no finding.
settings.register_profile("instep", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("instep")


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of this test alone where shared segments live: what is in it can be counted."""
    monkeypatch.setattr(shm, "directory", lambda: tmp_path)
    return tmp_path
