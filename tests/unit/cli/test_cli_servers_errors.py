"""What `push`, `verify` and `status` say of what cannot work: in words, in the exit code, within a deadline."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers.loopback_server import MemoryServer

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such-model", "--engine", "http://127.0.0.1:9"], "no model of that name can be had from the Hub"),
        (["{empty}", "--engine", "http://127.0.0.1:9"], "no .safetensors file in"),
        (["{folder}", "--engine", "gpu1"], "an engine's URL is like http://host:8000"),
        (["no/such-model", "--engine", "gpu1"], "an engine's URL is like http://host:8000"),
        (["{folder}", "--engine", "http://user:secret@127.0.0.1:9"], "must not hold a password"),
        (["{folder}", "--engine", "me:secret@127.0.0.1:9"], "an engine's URL is like http://host:8000"),
        (["{folder}", "--engine", "http://127.0.0.1:9"], "cannot be reached"),
        (["{folder}", "--engine", "127.0.0.1:9"], "cannot be reached"),
        (["{folder}", "--engine", "http://127.0.0.1:9", "--canary"], "--canary needs the model in transformers"),
    ],
)
@pytest.mark.parametrize("command", ["push", "verify"])
def test_what_cannot_work_is_an_error_in_words(
    command: str, arguments: list[str], message: str, folder: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    given = [argument.format(folder=folder, empty=tmp_path / "empty") for argument in arguments]
    code, out, err = run(command, *given)
    assert code == 1
    assert message in out + err
    assert "Traceback" not in err
    assert "secret" not in out + err


@pytest.mark.parametrize("command", ["push", "verify"])
def test_a_server_that_is_listed_twice_is_a_mistake(command: str, server: MemoryServer, folder: Path, run: Run) -> None:
    code, out, err = run(command, folder, "--engine", server.url, server.name)
    assert (code, out) == (1, "")
    assert "ConfigError: an engine is listed twice" in err
    assert server.engine.calls == []


def test_a_push_that_is_interrupted_before_it_begins_says_what_engines_serve(
    server: MemoryServer, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def downloading(_: str) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("instep.cli.push.found", downloading)
    code, out, err = run("push", folder, "--engine", server.url)
    assert (code, out) == (130, "")
    assert err == f"interrupted; what each engine serves now:\n  {server.name}: serves its own first weights\n"


@pytest.mark.parametrize("command", ["push", "verify"])
def test_a_server_that_is_gone_is_told_with_what_a_command_line_can_do(command: str, server: MemoryServer, folder: Path, run: Run) -> None:
    server.engine.dead = True
    code, out, err = run(command, folder, "--engine", server.url)
    assert code == 1
    assert "memory is dead\n" in out + err
    assert (out + err).count("\n  next: `instep status URL` says what each server serves") == 1
    assert "sync." not in out + err


def test_verify_tells_programs_the_next_step_too(server: MemoryServer, folder: Path, run: Run) -> None:
    server.engine.dead = True
    code, out, _ = run("verify", folder, "--engine", server.url, "--json")
    (told,) = json.loads(out)["engines"]
    assert (code, told["result"], told["error"]) == (1, "failed", f"EngineLost: {told['engine']}: memory is dead")
    assert told["next_step"].startswith("`instep status URL`")


def test_status_tells_a_dirty_engine_a_wrong_token_and_nobody_apart(start: Callable[..., MemoryServer], folder: Path, run: Run) -> None:
    dirty, closed = start(), start(token="x" * 20)
    dirty.engine.inject("tensor", tensor=3)
    assert run("push", folder, "--engine", dirty.url)[0] == 1
    code, out, err = run("status", dirty.url, closed.url, "http://127.0.0.1:9", "--json")
    assert (code, err) == (1, "")
    first, second, third = json.loads(out)["engines"]
    assert (first["state"], first["version"], first["lag"]) == ("dirty", None, 1)
    assert "told to fail at tensor 3" in first["last_error"]
    assert (second["state"], third["state"]) == ("refused", "unreachable")
    assert "needs a token, and none is set here" in second["last_error"]
    assert "Connect" in third["last_error"]


@pytest.mark.parametrize(("given", "said"), [(None, "needs a token, and none is set here"), ("y" * 20, "refused the token")])
def test_a_wrong_token_is_not_a_missing_one(
    given: str | None, said: str, start: Callable[..., MemoryServer], folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = start(token="x" * 20)
    if given:
        monkeypatch.setenv("INSTEP_TOKEN", given)
    for command in (["push", folder, "--engine", closed.url], ["verify", folder, "--engine", closed.url], ["status", closed.url]):
        code, out, err = run(*command)
        assert code == 1
        assert said in out + err
        assert "set INSTEP_TOKEN, or INSTEP_TOKEN_FILE, to the token that the server was started with" in out + err
        assert "unreachable" not in out + err


def test_status_waits_for_nobody_longer_than_its_deadline(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.cli.server_status.DEADLINE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code, out, _ = run("status", f"http://127.0.0.1:{silent.getsockname()[1]}", "--json")
    (row,) = json.loads(out)["engines"]
    assert (code, row["state"], row["last_error"]) == (1, "unreachable", "no answer within 0.3 s")


def test_status_of_an_engine_that_died_behind_its_server(server: MemoryServer, run: Run) -> None:
    server.engine.dead = True
    code, out, _ = run("status", server.url, "--json")
    (row,) = json.loads(out)["engines"]
    assert (code, row["state"], row["last_error"]) == (1, "unreachable", "memory is dead")


def test_status_of_a_server_without_instep(run: Run) -> None:
    class Ordinary(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Ordinary) as ordinary:
        threading.Thread(target=ordinary.serve_forever, daemon=True).start()
        code, out, _ = run("status", f"http://127.0.0.1:{ordinary.server_port}")
        ordinary.shutdown()
    assert code == 1
    assert "it has no instep routes, start it with `instep serve`" in out


def test_status_of_some_ends_with_3(server: MemoryServer, run: Run) -> None:
    code, out, _ = run("status", server.url, "http://127.0.0.1:9")
    assert code == 3
    assert "its own first weights" in out
