"""Replicas of a vLLM with data parallelism, as `AsyncLLM` shows them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from helpers.toys import attention

from instep import MemoryEngine, WeightSync
from instep.engine.vllm.replicas import call_workers
from instep.errors import PlanError, SyncError

pytestmark = pytest.mark.usefixtures("segments")


class Core:
    def __init__(self, replicas: list[MemoryEngine]) -> None:
        self.core_engines = replicas

    async def _call_utility_async(self, utility: str, method: str, within: None, args: Any, kwargs: None, *, engine: MemoryEngine) -> Any:
        assert (utility, method, within, kwargs) == ("collective_rpc", "instep_call", None, None)
        return await engine.call(*args)


class Llm:
    """What an engine needs of an `AsyncLLM`."""

    def __init__(self, replicas: list[MemoryEngine]) -> None:
        self.engine_core = Core(replicas)

    async def collective_rpc(self, method: str, args: Any) -> Any:
        assert method == "instep_call"
        return await self.engine_core.core_engines[0].call(*args)


class Replicated:
    name = "replicated"

    def __init__(self, replicas: list[MemoryEngine]) -> None:
        self.replicas, self.llm = replicas, Llm(replicas)

    async def call(self, method: Any, payload: bytes) -> list[bytes]:
        return await call_workers(self.llm, method, payload)

    async def pause(self, caches: Any) -> None:
        await asyncio.gather(*(replica.pause(caches) for replica in self.replicas))

    async def resume(self) -> None:
        await asyncio.gather(*(replica.resume() for replica in self.replicas))

    async def label(self, version: str) -> None:
        await asyncio.gather(*(replica.label(version) for replica in self.replicas))

    async def score(self, token_ids: list[int]) -> list[float]:
        return await self.replicas[0].score(token_ids)

    async def refuse(self, reason: str | None) -> None:
        await asyncio.gather(*(replica.refuse(reason) for replica in self.replicas))


def replicas(count: int, tp: int) -> list[MemoryEngine]:
    return [MemoryEngine(attention(0), tp=tp) for _ in range(count)]


@pytest.mark.parametrize("transport", ["shm", "gloo", "http"])
@pytest.mark.parametrize(("count", "tp"), [(1, 2), (2, 1), (3, 2)])
def test_every_replica_follows(count: int, tp: int, transport: Any) -> None:
    engine, weights = Replicated(replicas(count, tp)), attention(1)
    with WeightSync(weights, [engine], transport=transport) as sync:
        for seed in (1, 2):
            weights.update(attention(seed))
            sync.push(f"v{seed}")
            wanted = MemoryEngine(attention(seed), tp=tp).fingerprint()
            assert [replica.fingerprint() for replica in engine.replicas] == [wanted] * count
        assert [worker.rank for worker in sync._session.fleet.members[0].workers] == list(range(count * tp))


def test_one_replica_that_fails_makes_the_engine_dirty_until_the_next_push() -> None:
    engine = Replicated(replicas(2, 1))
    with WeightSync(attention(1), [engine]) as sync:
        engine.replicas[1].inject("tensor", tensor=2)
        with pytest.raises(SyncError, match="rank 1") as caught:
            sync.push("v1")
        assert [state.serving for state in caught.value.engines] == ["dirty"]
        assert all(replica.refusal for replica in engine.replicas)
        sync.push("v2")
        assert {replica.fingerprint() for replica in engine.replicas} == {MemoryEngine(attention(1)).fingerprint()}


def test_a_replica_of_another_shape_is_named() -> None:
    other = attention(0)
    other["model.norm.weight"] = other["model.norm.weight"].repeat(2)
    engine = Replicated([MemoryEngine(attention(0)), MemoryEngine(other)])
    with WeightSync(attention(1), [engine]) as sync, pytest.raises(PlanError, match=r"rank 1.*model\.norm\.weight"):
        sync.push("v1")
