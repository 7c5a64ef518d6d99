"""An update that comes in several calls of `update_weights`: all of it or nothing, and what is wrong with a part is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.toys import attention
from helpers.vllm_engine import Engine

from instep.engine.vllm.publisher import WeightPublisher
from instep.errors import ConfigError
from instep.protocol import Manifest

Infos = list[dict[str, Any]]


@pytest.fixture
def publisher(segments: Path) -> WeightPublisher:
    return WeightPublisher(attention(1), timeout=5)


def send(engine: Engine, infos: Infos) -> None:
    engine.call("start_weight_update")
    for info in infos:
        engine.call("update_weights", info)
    engine.call("finish_weight_update")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("parts", [2, 5])
def test_parts_are_committed_together(vllm: Any, tp: int, parts: int, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(vllm, tp, monkeypatch)
    engine.call("start_weight_update")
    for info in reversed(publisher.update_infos("v1", parts)):
        engine.call("update_weights", info)
        assert engine.serves(0)
    engine.call("finish_weight_update")
    assert engine.serves(1)
    assert {status["version"] for status in engine.call("instep_status")} == {"v1"}


WRONG: dict[str, tuple[Callable[[Infos, Infos], Infos], str]] = {
    "a part is missing": (lambda a, _: a[:1] + a[2:], "a has not come whole: part 2 of 3 did not come"),
    "two parts are missing": (lambda a, _: a[2:], "a has not come whole: parts 1, 2 of 3 did not come"),
    "a part comes twice": (lambda a, _: [a[0], a[0], *a[1:]], "part 1 of 3 of a came a second time"),
    "a part comes twice at the end": (lambda a, _: [*a, a[2]], "part 3 of 3 of a came a second time"),
    "a part of another update": (
        lambda a, b: [*a[:2], b[2]],
        "part 3 of 3 of b is of another update than what came before it: 2 of 3 of a",
    ),
    "a whole version in between": (lambda a, b: [a[0], {"manifest": b[0]["manifest"]}, *a[1:]], "part 1 of 1 of b is of another update"),
    "another count": (lambda a, _: [a[0], {**a[1], "parts": 2}], "part 2 of 2 of a is of another update under the same label"),
    "no number": (lambda a, _: [{**a[0], "part": 0}], "part 0 of 3 is no part of an update"),
    "text": (lambda a, _: [{**a[0], "part": "1"}], "part '1' of 3 is no part"),
    "beyond the last": (lambda a, _: [{**a[0], "part": 4}], "part 4 of 3 is no part"),
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("change", "text"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_with_a_part_is_said_and_the_next_update_works(
    newest: Any, publisher: WeightPublisher, change: Callable[[Infos, Infos], Infos], text: str, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(newest, tp, monkeypatch)
    infos = change(publisher.update_infos("a", 3), WeightPublisher(attention(2), timeout=5).update_infos("b", 3))
    with pytest.raises(RuntimeError, match=rf"{text}.*; vllm: still serves its own first weights(?s:.*)next: call start_weight_update"):
        send(engine, infos)
    assert engine.serves(0)
    assert engine.states() == ["serving"] * tp
    send(engine, publisher.update_infos("right", 3))
    assert engine.serves(1)


def test_parts_of_two_publications_under_one_label_are_not_put_together(
    newest: Any, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(newest, 1, monkeypatch)
    first, again = publisher.update_infos("a", 2), publisher.update_infos("a", 2)
    with pytest.raises(RuntimeError, match="part 2 of 2 of a is of another update under the same label"):
        send(engine, [first[0], again[1]])
    assert engine.serves(0)


def test_a_part_that_came_before_another_trainer_is_forgotten(
    newest: Any, publisher: WeightPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(newest, 1, monkeypatch)
    infos = publisher.update_infos("a", 2)
    engine.call("start_weight_update")
    engine.call("update_weights", infos[0])
    engine.call("init_weight_transfer_engine", publisher.init_info())
    engine.call("update_weights", infos[1])
    with pytest.raises(RuntimeError, match="part 1 of 2 did not come"):
        engine.call("finish_weight_update")
    assert engine.serves(0)


@pytest.mark.parametrize("sizes", [[1] * 5, [100, 1, 1, 1, 1], [1, 1, 1, 1, 100], [0, 0, 0, 0, 0], [3, 50, 2, 50, 1]], ids=str)
def test_every_tensor_is_in_one_part_and_none_is_empty(newest: Any, sizes: list[int]) -> None:
    from instep.engine.vllm.parts import split
    from instep.protocol import Location, TensorMeta

    metas = [TensorMeta(str(index), "uint8", (size,)) for index, size in enumerate(sizes)]
    whole = Manifest("v", None, metas, {meta.name: 7 for meta in metas}, Location("shm", "x", 9))
    for count in range(1, 6):
        parts = split(whole, count)
        assert [meta for part in parts for meta in part.tensors] == metas
        assert all(part.tensors and part.digests.keys() == {meta.name for meta in part.tensors} for part in parts)
        assert len(parts) == count
    for count in (0, 6):
        with pytest.raises(ConfigError, match="5 tensors cannot be sent in"):
            split(whole, count)
