"""A reader of the double buffer beside a writer that never stops."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from helpers.two_buffers import filled, put, write_until

from instep import MemoryEngine
from instep.dropin.torchrl import VLLMDoubleBufferSyncScheme


@pytest.mark.usefixtures("segments")
def test_it_never_sees_a_mixture(tmp_path: Path) -> None:
    """A process writes as fast as it can while this one loads into an engine: each load is one version, the one that it says."""
    place = tmp_path / "weights"
    context = multiprocessing.get_context("spawn")
    put(place, filled(0), "v0")
    ended = context.Event()
    writer = context.Process(target=write_until, args=(place, ended))
    writer.start()
    engine = MemoryEngine(filled(-1))
    receiver = VLLMDoubleBufferSyncScheme(str(place)).create_receiver(engine)
    seen: list[int] = []
    try:
        while len(seen) < 20:
            assert receiver.poll_and_apply(120), f"nothing new in 120 s, the writer {'runs' if writer.is_alive() else 'has ended'}"
            (value,) = {float(value) for param in engine.hosts[0].model.parameters() for value in param.unique()}
            assert receiver.version == engine.version == f"v{value:.0f}"
            seen.append(int(value))
    finally:
        ended.set()
        writer.join(120)
    assert writer.exitcode == 0
    assert seen == sorted(set(seen))
