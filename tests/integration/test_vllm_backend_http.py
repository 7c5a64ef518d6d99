"""vLLM's four phases with the backend `instep`, through `AsyncLLM` and through vLLM's own HTTP routes, with requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import ARGUMENTS, completion, settings
from models import PROMPTS, tiny
from test_vllm_async import LENGTH, generate, started

from instep import WeightSync
from instep.engine.vllm.publisher import WeightPublisher
from instep.errors import ApplyError


@asynccontextmanager
async def routes(llm: Any) -> AsyncIterator[httpx.AsyncClient]:
    """vLLM's routes for weight updates, on this event loop instead of a socket."""
    from fastapi import FastAPI
    from vllm.entrypoints.rl.online.api_router import router
    from vllm.entrypoints.serve.dev.rpc.api_router import router as rpc

    app = FastAPI()
    app.include_router(router)
    app.include_router(rpc)
    app.state.engine_client = llm
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=60) as client:
        yield client


async def by_http(llm: Any, reference: Callable[..., Any]) -> None:
    model = tiny("qwen3", 2)
    publisher = WeightPublisher(model, timeout=30)
    async with routes(llm) as client:

        async def post(path: str, **body: Any) -> Any:
            response = await client.post(f"/{path}", json=body)
            assert response.status_code == 200, response.text
            return response.json()

        await post("init_weight_transfer_engine", init_info=publisher.init_info())
        await update(post, publisher, "v1")
        assert await tokens(llm, "v1") == reference("qwen3", 2)

        running = [asyncio.create_task(generate(llm, [i + 1, 2, 3], f"flight-{i}")) for i in range(4)]
        await started(llm, tokens=5)
        model.load_state_dict(tiny("qwen3", 3).state_dict())
        response = await client.post("/pause?mode=keep")
        assert response.status_code == 200
        await update(post, publisher, "v2")
        await post("resume")
        for [output] in await asyncio.wait_for(asyncio.gather(*running), 120):
            spans = [(span.version, span.start) for span in output.outputs[0].weight_versions]
            assert [version for version, _ in spans] == ["v1", "v2"]
            assert len(output.outputs[0].token_ids) == LENGTH
        assert await tokens(llm, "v2") == reference("qwen3", 3)

        await post("start_weight_update")
        failed = await client.post("/update_weights", json={"update_info": {"manifest": "AAAA"}})
        assert failed.status_code == 500
        assert (await client.get("/weight_info")).json() == {"weight_version": "v2"}
        told = await post("collective_rpc", method="instep_status")
        assert [(status["state"], status["version"]) for status in told["results"]] == [("serving", "v2")]
        assert await tokens(llm, "after") == reference("qwen3", 3)
    publisher.close()


async def update(post: Callable[..., Any], publisher: WeightPublisher, version: str) -> None:
    await post("start_weight_update")
    await post("update_weights", update_info=publisher.update_info(version))
    await post("finish_weight_update", weight_version=version)


async def tokens(llm: Any, name: str) -> list[Any]:
    await llm.reset_prefix_cache()
    return [completion((await generate(llm, prompt, f"{name}-{i}", 12))[0]) for i, prompt in enumerate(PROMPTS)]


async def by_async_llm(llm: Any, reference: Callable[..., Any]) -> None:
    """And a push that leaves the engine dirty while requests are in flight: the guard in the worker does not end what a push can heal."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

    model = tiny("qwen3", 2)
    publisher = WeightPublisher(model)
    await llm.init_weight_transfer_engine(WeightTransferInitRequest(publisher.init_info()))
    await llm.start_weight_update()
    await llm.update_weights(WeightTransferUpdateRequest(publisher.update_info("v3")))
    await llm.finish_weight_update("v3")
    assert await tokens(llm, "v3") == reference("qwen3", 2)
    publisher.close()

    with WeightSync(source=model, engines=[llm]) as sync:
        await llm.collective_rpc("inject", args=("step", 5))
        running = [asyncio.create_task(generate(llm, [i + 1, 2, 3], f"dirty-{i}")) for i in range(3)]
        await started(llm, tokens=1)
        model.load_state_dict(tiny("qwen3", 3).state_dict())
        with pytest.raises(ApplyError, match="told to fail"):
            await sync.apush("v4")
        await asyncio.wait_for(asyncio.gather(*running), 60)
        await sync.apush("v5")
        assert await tokens(llm, "v5") == reference("qwen3", 3)


def test_phases_by_http_and_by_async_llm(checkpoints: Callable[[str, int], Path], reference: Callable[..., Any]) -> None:
    async def main() -> None:
        with settings():
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            backend = {"weight_transfer_config": {"backend": "instep"}, "worker_extension_cls": "faulty.FaultyExtension"}
            arguments = AsyncEngineArgs(str(checkpoints("qwen3", 1)), **ARGUMENTS, **backend, load_format="dummy")
            llm = AsyncLLM.from_engine_args(arguments)
        try:
            await by_http(llm, reference)
            await by_async_llm(llm, reference)
        finally:
            llm.shutdown()

    asyncio.run(main())
