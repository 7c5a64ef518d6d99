"""A worker in another process that a test tells to fail: by a file that `INSTEP_TEST_FAULT` names."""

from __future__ import annotations

import json
import os
from pathlib import Path

from faulty import FaultyExtension


class ToldByFile(FaultyExtension):
    """The file holds a list, the arguments of `inject`. It is gone when they were taken."""

    def instep_call(self, method: str, payload: bytes) -> bytes:
        told = Path(os.environ["INSTEP_TEST_FAULT"])
        if told.exists():
            self.inject(*json.loads(told.read_text()))
            told.unlink()
        return super().instep_call(method, payload)
