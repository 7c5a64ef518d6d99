"""instep's routes in vLLM's server, without vLLM: when they are open, and when the server says that it is ready."""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.asgi import TOKEN, generating
from helpers.toys import attention

from instep import MemoryEngine, WeightSync, cli
from instep.cli import serve
from instep.cli.serving import ServeControl
from instep.engine.remote import http_token
from instep.engine.remote.http_control import Served
from instep.engine.remote.rpc import LocalRpc, RemoteEngine
from instep.engine.vllm import routes as vllm_routes
from instep.engine.vllm.config import EXTENSION
from instep.engine.vllm.routes import EndpointPlugin, VllmControl, served_of
from instep.errors import ConfigError

pytestmark = pytest.mark.usefixtures("segments")


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_token, "_taken", None)
    monkeypatch.delenv("INSTEP_TOKEN", raising=False)
    monkeypatch.delenv("INSTEP_TOKEN_FILE", raising=False)


def scope(*, host: str | None = "127.0.0.1", extension: str = "x", servers: int | None = None, **args: Any) -> dict[str, Any]:
    parallel = SimpleNamespace(worker_extension_cls=extension, data_parallel_size=1)
    config = SimpleNamespace(parallel_config=parallel, weight_transfer_config=None)
    llm = SimpleNamespace(vllm_config=config, engine_core=SimpleNamespace())
    given = Namespace(host=host, uds=None, api_server_count=servers, **args)
    return {"type": "http", "app": SimpleNamespace(state=SimpleNamespace(engine_client=llm, args=given))}


def test_the_routes_are_open_with_a_token_or_on_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    at = served_of(scope())
    assert at is not None
    assert (at.token, at.closed) == (None, None)
    monkeypatch.setenv("INSTEP_TOKEN", TOKEN)
    at = served_of(scope(host=None))
    assert at is not None
    assert (at.token, at.closed) == (TOKEN, None)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"host": None}, "has no token"),
        ({"host": "0.0.0.0"}, "has no token"),
        ({"servers": 2}, "several API servers"),
        ({"extension": ""}, "worker extension"),
    ],
)
def test_else_they_are_closed_and_say_why(given: dict[str, Any], reason: str) -> None:
    at = served_of(scope(**given))
    assert at is not None
    assert reason in str(at.closed)


def test_a_bad_token_closes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_TOKEN", "bad token")
    at = served_of(scope())
    assert at is not None
    assert "printable ASCII" in str(at.closed)
    assert "bad token" not in str(at.closed)


def test_one_engine_has_one_state_however_often_the_routes_are_put_in() -> None:
    here = scope()
    assert served_of(here) is served_of(here)
    assert served_of({"app": SimpleNamespace(state=SimpleNamespace(engine_client=None))}) is None


def test_the_plugin_is_what_vllm_asks_for() -> None:
    plugin = EndpointPlugin()
    added: list[Any] = []
    plugin.attach_router(SimpleNamespace(add_middleware=added.append))
    asyncio.run(plugin.init_state(None, None, Namespace()))
    assert (plugin.name, plugin.required_tasks, added) == ("instep", ("generate",), [VllmControl])


# Ready, and not before.


class Lifespan:
    """A server that starts, with an engine in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, catch_up: str | None) -> None:
        self.engine = MemoryEngine(attention(0))
        self.at = Served(self.engine, None)
        monkeypatch.setattr(vllm_routes, "served_of", lambda _: self.at)
        self.control = ServeControl(generating)
        self.control.served = lambda _: self.at
        self.args = Namespace(instep_catch_up=catch_up)

    async def start(self) -> None:
        async def nothing(*_: Any) -> Any: ...

        app = SimpleNamespace(state=SimpleNamespace(args=self.args))
        await self.control({"type": "lifespan", "app": app}, nothing, nothing)
        await asyncio.sleep(0)


def until(condition: Callable[[], bool]) -> Any:
    async def wait() -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    return wait()


def test_a_server_that_waits_for_a_trainer_is_ready_after_its_push(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Lifespan(monkeypatch, "trainer")

    async def main() -> None:
        await server.start()
        assert server.at.refusal == "no trainer has pushed since it started"
        with WeightSync(attention(1), [RemoteEngine(LocalRpc(server.at.endpoint.answer))]) as sync:
            await sync.apush("v1")
        await until(lambda: server.at.refusal is None)

    asyncio.run(main())


def test_a_server_that_catches_up_from_a_directory_serves_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = tmp_path / "step-7"
    folder.mkdir()
    save_file(attention(1), folder / "model.safetensors")
    server = Lifespan(monkeypatch, str(folder))

    async def main() -> None:
        await server.start()
        assert "catches up" in str(server.at.refusal)
        await until(lambda: server.at.refusal is None)

    asyncio.run(main())
    assert (server.engine.version, server.engine.fingerprint()) == ("step-7", MemoryEngine(attention(1)).fingerprint())


def test_a_server_that_cannot_catch_up_never_says_that_it_is_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = Lifespan(monkeypatch, str(tmp_path))

    async def main() -> None:
        await server.start()
        await until(lambda: "could not catch up" in str(server.at.refusal))

    asyncio.run(main())


# What `instep serve` makes of vLLM's arguments.


def test_vllms_flags_go_to_vllm_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [
        "-tp",
        "2",
        "--port=8001",
        "--enforce-eager",
        "--hf-overrides",
        '{"a": [-1, "b c"]}',
        "-O3",
        "--no-enable-prefix-caching",
        "--json",
    ]
    seen: list[Any] = []

    def parsed(given: list[str]) -> Namespace:
        seen.append(given)
        return arguments()

    def run(args: Namespace) -> None:
        seen.append(args.instep_catch_up)

    monkeypatch.setattr(serve, "check", lambda *_: None)
    monkeypatch.setattr(serve, "parsed", parsed)
    monkeypatch.setattr(serve, "_command", lambda: SimpleNamespace(cmd=run))
    for before, after in (([], ["--instep-catch-up", "trainer"]), (["--instep-catch-up=trainer"], []), ([], [])):
        monkeypatch.setattr(sys, "argv", ["instep", "serve", "some/model", *before, *flags, *after])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
    assert seen == [["some/model", *flags], "trainer", ["some/model", *flags], "trainer", ["some/model", *flags], None]


def arguments(**given: Any) -> Namespace:
    defaults: dict[str, Any] = {
        "host": None,
        "uds": None,
        "headless": False,
        "middleware": [],
        "api_server_count": None,
        "worker_extension_cls": "",
    }
    return Namespace(**{**defaults, **given})


def test_a_server_without_a_token_keeps_to_the_loopback_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments()
    serve.prepare(args, None)
    assert (args.host, args.api_server_count, args.worker_extension_cls) == ("127.0.0.1", 1, EXTENSION)
    assert args.middleware == [serve.CONTROL]
    assert "127.0.0.1 only" in capsys.readouterr().err
    serve.prepare(arguments(host="::1"), None)
    with pytest.raises(ConfigError, match="anybody who reaches it"):
        serve.prepare(arguments(host="0.0.0.0"), None)


def test_with_a_token_vllms_own_choice_of_interfaces_stays() -> None:
    args = arguments(middleware=["their.own"], worker_extension_cls="their.Extension")
    serve.prepare(args, TOKEN)
    assert (args.host, args.middleware, args.worker_extension_cls) == (None, ["their.own", serve.CONTROL], "their.Extension")


@pytest.mark.parametrize("given", [{"api_server_count": 2}, {"grpc": True}, {"data_parallel_multi_port_external_lb": True}])
def test_servers_that_could_not_be_pushed_to_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        serve.prepare(arguments(**given), TOKEN)


def test_a_directory_that_is_none_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="takes a directory"):
        serve.serve("model", instep_catch_up="nowhere/to/be/found")
