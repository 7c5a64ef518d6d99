"""Models of very many small tensors: what a push does of each of them."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from helpers.toys import checkpoint

from instep import MemoryEngine, WeightSync
from instep.digest import digest, seed_of
from instep.engine import memory_host
from instep.errors import SourceError
from instep.plan.packed import packed
from instep.protocol import CommitRequest, ParamMeta, Place, Region, Request, Route, TensorMeta, decode, encode
from instep.transport import Placed
from instep.transport.copying import Copier

COUNT = 70_000
REGION = Region(0, (2, 4), (4, 1))


def experts(count: int) -> dict[str, torch.Tensor]:
    shapes = {"gate": (2, 4), "up": (2, 4), "down": (4, 2)}
    return {
        f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight": torch.randn(shape)
        for expert in range(count)
        for part, shape in shapes.items()
    }


@pytest.mark.parametrize(
    "message",
    [
        TensorMeta("w", "bfloat16", (2, 4)),
        REGION,
        Route("w", REGION, "p", REGION),
        ParamMeta("p", "", "bfloat16", (2, 4)),
        Place(REGION, 0, 0, 4),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_that_come_by_the_thousand_are_left_alone_by_the_garbage_collector(message: Any) -> None:
    assert not gc.is_tracked(decode(encode(message), type(message)))


def test_the_seeds_of_a_large_model_are_made_once() -> None:
    metas = [TensorMeta(f"large.{index}", "bfloat16", (1,)) for index in range(COUNT)]
    for meta in metas:
        seed_of(meta)
    before = seed_of.cache_info()
    for meta in metas:
        seed_of(meta)
    assert seed_of.cache_info().hits - before.hits == COUNT


def test_an_engine_in_memory_looks_at_each_expert_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    param = memory_host._param
    monkeypatch.setattr(memory_host, "_param", lambda name: asked.append(name) or param(name))
    calls = []
    for count in (4, 40):
        asked.clear()
        memory_host.MemoryHost(experts(count), 0, 1)
        calls.append(len(asked) / count)
    assert calls[0] == calls[1]


def test_a_commit_carries_no_digests_where_workers_have_compared_the_bytes(monkeypatch: pytest.MonkeyPatch, segments: Any) -> None:
    weights, engine = checkpoint(1), MemoryEngine(checkpoint(0))
    commits: list[CommitRequest] = []
    call = engine.call

    async def seen(method: Any, payload: bytes) -> list[bytes]:
        if method == "commit":
            commits.append(decode(decode(payload, Request).body, CommitRequest))
        return await call(method, payload)

    monkeypatch.setattr(engine, "call", seen)
    with WeightSync(weights, [engine], transport="shm") as sync:
        sync.push("a")
    assert [commit.digests for commit in commits] == [{}]
    assert engine.fingerprint() == MemoryEngine(weights).fingerprint()


@pytest.mark.parametrize("stays", [True, False])
def test_small_tensors_take_no_job_and_each_is_digested(stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {f"t{index}": torch.randn(1 + index % 5, dtype=torch.float32 if index % 50 else torch.float64) for index in range(300)}
    metas = [TensorMeta(name, str(value.dtype).removeprefix("torch."), tuple(value.shape)) for name, value in values.items()]
    view = np.full(packed(metas).size, 7, np.uint8)
    with ThreadPoolExecutor(max_workers=2) as pool:
        jobs, submit = [], pool.submit
        monkeypatch.setattr(pool, "submit", lambda *given: jobs.append(given) or submit(*given))
        digests, flagged = Copier(pool).copied(view, metas, Placed(values.items().__iter__, values.items().__iter__, stays=stays))
    assert digests == {meta.name: digest(values[meta.name], meta) for meta in metas}
    assert not flagged
    expected = np.zeros(view.size, np.uint8)
    for meta in metas:
        expected[packed(metas).offsets[meta.name] :][: meta.nbytes] = values[meta.name].view(torch.uint8).numpy()
    assert np.array_equal(view, expected)
    assert not jobs


def test_a_small_tensor_among_many_that_has_changed_is_named() -> None:
    first = {f"t{index}": torch.randn(3) for index in range(300)}
    again = first | {"t123": first["t123"] + 1}
    metas = [TensorMeta(name, "float32", (3,)) for name in first]
    view = np.empty(packed(metas).size, np.uint8)
    values = Placed(first.items().__iter__, again.items().__iter__, stays=True)
    with ThreadPoolExecutor(max_workers=2) as pool, pytest.raises(SourceError, match="changed") as caught:
        Copier(pool).copied(view, metas, values)
    assert caught.value.tensor == "t123"
