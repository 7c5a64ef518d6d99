"""Saves with `save_pretrained` to a RAM disk, from which the engine reloads in its own way."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from instep.bench.measure import Push
from instep.bench.subjects import Subject
from instep.bench.trainer import Trainer
from instep.transport.shm.segment import directory


@contextmanager
def save_and_reload(trainer: Trainer, subject: Subject) -> Iterator[Push]:
    with tempfile.TemporaryDirectory(dir=directory()) as ram:
        checkpoint = Path(ram) / "checkpoint"

        def push() -> dict[str, float]:
            trainer.save(checkpoint)
            saved = time.perf_counter()
            subject.reload(checkpoint)
            pause = time.perf_counter() - saved
            shutil.rmtree(checkpoint)
            return {"pause": pause}

        yield push
