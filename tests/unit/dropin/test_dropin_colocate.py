"""The sender of a trainer that shares its GPU with a worker: what it tells a worker to take is of one moment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.toys import attention

from instep.dropin.colocate_sender import ColocateSender
from instep.dropin.colocate_wire import Bucket, End
from instep.errors import SourceError

pytestmark = pytest.mark.usefixtures("segments")


@pytest.mark.parametrize("steps", [True, False])
def test_a_write_while_buckets_are_taken_ends_the_update(steps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, asked = attention(1), list[Any]()

    def ask(self: ColocateSender, message: Any) -> Any:
        asked.append(message)
        if steps and isinstance(message, Bucket):
            weights["model.norm.weight"].data[0] += 1
        return SimpleNamespace(version="one")

    monkeypatch.setattr(ColocateSender, "_ask", ask)
    sender = ColocateSender(weights, "CPU-0")
    sender._open = lambda: None
    if steps:
        with pytest.raises(SourceError, match=r"changed its weights .*\(model\.norm\.weight"):
            sender.update_weights("one")
    else:
        assert sender.update_weights("one") == "one"
    assert any(isinstance(message, End) for message in asked) is not steps
