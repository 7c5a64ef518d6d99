"""What `instep serve` refuses at once: before vLLM is imported, which is not there in these tests."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.asgi import TOKEN

from instep.engine.remote import http_token

Run = Callable[..., tuple[int, str, str]]
IMPORTED = "this command needs the package vllm"
"""What is said where nothing else was wrong."""


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(http_token, "_taken", None)
    monkeypatch.delenv("INSTEP_TOKEN", raising=False)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


@pytest.fixture
def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gpu1"])
@pytest.mark.parametrize("flags", [["--host", "{}"], ["--host={}"], ["--max-model-len", "64", "--host", "{}", "--port=1"]])
def test_a_host_that_is_not_the_loopback_needs_a_token(host: str, flags: list[str], tmp_path: Path, run: Run) -> None:
    code, out, err = run("serve", tmp_path, *(flag.format(host) for flag in flags))
    assert (code, out) == (1, "")
    assert f"ConfigError: --host {host} without a token" in err
    assert "next: set INSTEP_TOKEN" in err


@pytest.mark.parametrize(
    "flags", [["--port", "{}"], ["--port={}"], ["--host", "127.0.0.1", "--port", "{}"], ["--config", "c", "--host=::1", "--port={}"]]
)
@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_port_in_use(flags: list[str], token: str | None, taken: int, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if token:
        monkeypatch.setenv("INSTEP_TOKEN", token)
    with socket.create_server(("::1", taken), family=socket.AF_INET6):
        code, out, err = run("serve", tmp_path, *(flag.format(taken) for flag in flags))
    assert (code, out) == (1, "")
    assert f"port {taken}: [Errno 98] Address already in use\n  next: choose another --port" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-server-count", "2"], "has one API server"),
        (["--api_server_count=3"], "has one API server"),
        (["--grpc"], "cannot push to a server with --grpc"),
        (["--data-parallel-multi-port-external-lb"], "--data-parallel-multi-port-external-lb"),
        (["--instep-catch-up", "{}"], "takes a directory of safetensors files"),
    ],
)
def test_servers_that_could_not_be_pushed_to(flags: list[str], message: str, tmp_path: Path, run: Run) -> None:
    code, out, err = run("serve", tmp_path, *(flag.format(tmp_path) for flag in flags))
    assert (code, out) == (1, "")
    assert message in err


@pytest.mark.parametrize("model", ["/no/such/directory", "./missing", "a/missing/directory", "missing.gguf/", "~/missing"])
def test_a_directory_that_is_not_there(model: str, free: int, run: Run) -> None:
    code, out, err = run("serve", model, "--port", free)
    assert (code, out) == (1, "")
    assert f"ConfigError: there is no directory {model}" in err


@pytest.mark.parametrize("model", ["someone/missing", "someone/missing:Q4_K_M"])
def test_a_hub_id_while_offline(model: str, free: int, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, out, err = run("serve", model, "--port", free)
    assert (code, out) == (1, "")
    assert "someone/missing is no directory, and no model of that name can be had from the Hub" in err


def test_a_hub_id_that_is_in_the_cache_needs_nobody(free: int, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = "a" * 40
    repository = tmp_path / "models--someone--something"
    (repository / "snapshots" / revision).mkdir(parents=True)
    (repository / "snapshots" / revision / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("instep.cli.hub.found", lambda *_: pytest.fail("the Hub was asked"))
    code, _, err = run("serve", "someone/something", "--port", free)
    assert (code, IMPORTED in err) == (1, True)


@pytest.mark.parametrize(
    "flags",
    [
        ["--uds", "/tmp/a.sock", "--port", "{}"],
        ["--headless", "--port", "{}"],
        ["--config", "settings.yaml"],
        ["--config", "settings.yaml", "--port", "{}"],
        ["--port", "not-a-number"],
    ],
)
def test_what_is_not_known_yet_is_left_to_vllm(flags: list[str], taken: int, tmp_path: Path, run: Run) -> None:
    """Such as what stands in a file of settings."""
    code, _, err = run("serve", tmp_path, *(flag.format(taken) for flag in flags))
    assert (code, IMPORTED in err) == (1, True), err


@pytest.mark.parametrize("model", ["s3://bucket/model", "gs://bucket/model"])
def test_models_in_object_stores_are_left_to_vllm(model: str, free: int, run: Run) -> None:
    code, _, err = run("serve", model, "--port", free)
    assert (code, IMPORTED in err) == (1, True), err
