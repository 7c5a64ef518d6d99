"""vLLM's own server, started by its own program: the routes come with the endpoint plug-in, replicas are one engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from http_server import TOKEN, Server
from models import save, tiny
from test_http_serve import become, serves

import instep
from instep import WeightSync
from instep.engine.http import HttpEngine

DISTRIBUTION = {
    "METADATA": "Metadata-Version: 2.1\nName: instep\nVersion: 0.1.0\n",
    "entry_points.txt": "[vllm.general_plugins]\ninstep = instep.engine.vllm_plugin:register\n"
    "[vllm.endpoint_plugins]\ninstep = instep.engine.vllm_routes:EndpointPlugin\n",
}
"""What an installed instep has of `pyproject.toml`; the one under test may not be installed."""


class PluginServer(Server):
    def program(self, model: str) -> list[str]:
        return [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", model]

    def settings(self) -> dict[str, str]:
        folder = self.log.parent / "site" / "instep-0.1.0.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in DISTRIBUTION.items():
            (folder / name).write_text(text)
        paths = [str(folder.parent), str(Path(instep.__file__).parents[1]), str(Path(__file__).parent)]
        return {"PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": "instep"}


@pytest.mark.parametrize(("kind", "replicas"), [(PluginServer, 1), (Server, 2)], ids=["plug-in", "replicas"])
def test_a_trainer_pushes(kind: type[Server], replicas: int, tmp_path: Path) -> None:
    more = {"data_parallel_size": replicas} if replicas > 1 else {}
    server = kind(save(tiny("qwen3", 1), tmp_path / "model"), tmp_path / "log", **more)
    model = tiny("qwen3", 2)
    try:
        server.wait()
        assert server.get("/instep/v1/status")[0] == 401
        with WeightSync(model, [HttpEngine(server.url, TOKEN)], timeout=60) as sync:
            for seed in (2, 3):
                become(model, seed)
                sync.push(f"seed-{seed}")
                for _ in range(replicas + 1):  # each of them answers some
                    serves(server, model, f"seed-{seed}")
        assert [worker["rank"] for worker in server.status()["workers"]] == list(range(replicas))
        assert len({worker["pid"] for worker in server.status()["workers"]}) == replicas
    finally:
        server.stop()
