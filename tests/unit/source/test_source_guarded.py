"""A source whose own code fails: the push says which call it was, and every engine goes on with what it served."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from typing import Any

import pytest
import torch
from helpers.named_weights import WEIGHTS, engine_named, serves

from instep import WeightSync
from instep.errors import InstepError, PlanError, SourceError
from instep.protocol import TensorMeta
from instep.source.module import MappingSource
from instep.telemetry import Event
from instep.verify import verify

pytestmark = pytest.mark.usefixtures("segments")

CALLS = ("metadata", "tensors", "stamp", "score")


class Failing(MappingSource):
    """Raises `error` in one of its methods; of the tensors it gives some first."""

    method, error = "", BaseException()

    def metadata(self) -> list[TensorMeta]:
        self._reach("metadata")
        return super().metadata()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(super().tensors()):
            if index == 3:
                self._reach("tensors")
            yield item

    def stamp(self) -> Hashable:
        self._reach("stamp")
        return super().stamp()

    def score(self, token_ids: list[int]) -> list[float] | None:
        self._reach("score")
        return [0.0] * (len(token_ids) - 1)

    def _reach(self, method: str) -> None:
        if self.method == method:
            raise self.error


def failing(method: str, error: BaseException) -> Failing:
    source = Failing(WEIGHTS["a"])
    source.method, source.error = method, error
    return source


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("method", CALLS)
def test_a_push_says_which_call_of_the_source_failed(method: str, transport: Any) -> None:
    engine, source, events = engine_named(), failing(method, ValueError("the optimizer has gone")), list[Event]()
    with WeightSync(source, [engine], canary=[1, 2], canary_bound=1e9, transport=transport, sinks=[events.append]) as sync:
        with pytest.raises(
            SourceError, match=rf"Failing\.{method} raised ValueError: the optimizer has gone\n.*no engine was touched"
        ) as caught:
            sync.push("a")
        assert caught.value.__cause__ is source.error
        assert (events[-1].kind, events[-1].error) == ("failed", caught.value)
        assert serves(engine) == ("start", None)
        source.method = ""
        sync.push("a")
    assert serves(engine) == ("a", "a")


@pytest.mark.parametrize("error", [PlanError("this source plans"), KeyboardInterrupt()], ids=["an error of instep's", "an interrupt"])
@pytest.mark.parametrize("method", CALLS)
def test_other_errors_pass_as_they_are(method: str, error: BaseException) -> None:
    engine = engine_named()
    with WeightSync(failing(method, error), [engine], canary=[1, 2]) as sync, pytest.raises(type(error)) as caught:
        sync.push("a")
    assert caught.value is error
    assert serves(engine) == ("start", None)


@pytest.mark.parametrize("method", CALLS)
def test_verify_says_which_call_of_the_source_failed(method: str) -> None:
    with pytest.raises(InstepError, match=rf"Failing\.{method} raised OSError: disk"):
        asyncio.run(verify(failing(method, OSError("disk")), engine_named(), canary=[1, 2]))
