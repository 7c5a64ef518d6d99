"""Names of models on the command line: a directory is one, a Hub id is looked up once, and neither makes anybody wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from instep.cli import hub as names
from instep.cli.plan import described

Run = Callable[..., tuple[int, str, str]]
COMMANDS = {"plan": [], "push": ["--engine", "http://127.0.0.1:9"], "verify": ["--engine", "http://127.0.0.1:9"]}


class Hub(ThreadingHTTPServer):
    """Has no model, and may be out of order. `asked` are the requests that it saw."""

    def __init__(self, *, silent: bool) -> None:
        self.asked: list[str] = []
        self.ended = threading.Event()
        self.silent = silent
        super().__init__(("127.0.0.1", 0), Answers)


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if "such-model" in self.path or "missing" in self.path:  # the client has questions of its own
            self.server.asked.append(f"{self.command} {self.path}")
        if self.server.silent:
            self.server.ended.wait(60)
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(params=[False, True], ids=["out of order", "silent"])
def hub(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(silent=request.param) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(names, "LOOKUP", 0.5)
        yield hub
        hub.ended.set()
        hub.shutdown()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_is_looked_up_once(command: str, hub: Hub, run: Run) -> None:
    code, out, err = run(command, "no/such-model", *COMMANDS[command])
    assert (code, out) == (1, "")
    assert "no/such-model is no directory, and no model of that name can be had from the Hub, asked once" in err
    assert len(hub.asked) == 1, hub.asked


@pytest.mark.parametrize("missing", ["./missing-dir", "/missing-dir", "a/missing/dir"])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("hub", [False], indirect=True)
def test_a_directory_that_is_missing_is_no_question_to_the_hub(command: str, missing: str, hub: Hub, run: Run) -> None:
    code, _, err = run(command, missing, *COMMANDS[command])
    assert code == 1
    assert f"ConfigError: there is no directory {missing}" in err
    assert hub.asked == []


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of `someone/something` in the cache."""
    revision = "a" * 40
    repository = tmp_path / "hub" / "models--someone--something"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots" / revision).mkdir(parents=True)
    return repository / "snapshots" / revision


@pytest.mark.parametrize("hub", [True], indirect=True)
def test_what_is_in_the_cache_is_found_without_the_hub(hub: Hub, cached: Path, tmp_path: Path, run: Run) -> None:
    """Of it `plan` takes the config alone: half a download of weights would be a model that lacks some."""
    code, _, err = run("plan", "someone/something")
    assert (code, "someone/something has no config.json" in err) == (1, True)
    (cached / "config.json").write_text('{"model_type": "llama"}')
    (cached / "model-00002-of-00003.safetensors").touch()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert described("someone/something", scratch) == scratch
    assert [file.name for file in scratch.iterdir()] == ["config.json"]
