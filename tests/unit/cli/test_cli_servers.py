"""`push`, `verify`, `status` and `watch` against servers on the loopback, as a stranger would run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.loopback_server import NEXT, MemoryServer, saved
from helpers.toys import checkpoint

Run = Callable[..., tuple[int, str, str]]


def stranger(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from instep.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "NO_COLOR": "1"})


def test_a_stranger_pushes_a_directory_and_asks_what_came_of_it(server: MemoryServer, folder: Path) -> None:
    pushed = stranger("push", folder, "--engine", server.url, "--json")
    assert pushed.returncode == 0, pushed.stderr
    receipt = json.loads(pushed.stdout)
    assert (receipt["version"], receipt["tensors"], receipt["transport"]) == ("step-1", len(NEXT), "shm")
    assert server.engine.version == "step-1"
    status = stranger("status", server.url, "--json")
    (row,) = json.loads(status.stdout)["engines"]
    assert (status.returncode, row["engine"], row["version"], row["state"], row["lag"]) == (0, server.name, "step-1", "serving", 0)
    assert row["last_pause"] > 0


def test_a_push_makes_of_an_engine_that_differs_one_that_is_equal(server: MemoryServer, folder: Path, run: Run) -> None:
    found = []
    for command in ("verify", "push", "verify"):
        code, out, err = run(command, folder, "--engine", server.url, "--json")
        assert (command == "push") == bool(err)
        found.append((code, json.loads(out)))
    assert [code for code, _ in found] == [4, 0, 0]
    before, _, after = (result for _, result in found)
    assert (before["engines"][0]["result"], len(before["engines"][0]["differing"])) == ("differs", len(NEXT))
    assert (after["engines"][0]["result"], after["engines"][0]["equal"]) == ("equal", len(NEXT))


def test_every_choice_of_a_push_is_one_line_with_its_reason(server: MemoryServer, tmp_path: Path, run: Run) -> None:
    wide = saved({name: tensor.float() for name, tensor in NEXT.items()}, tmp_path / "wide")
    code, out, err = run("push", wide, "--engine", server.url)
    assert code == 0
    assert out.startswith("wide: 0 MB in")
    lines = err.splitlines()
    assert "version wide: the name of the directory, as --version does not say another" in lines
    assert "timeout 60 s for each phase: 60, and one for every 100 MB" in lines
    assert f"cast: {len(NEXT)} tensors rounded from float32 to bfloat16, which the engine stores" in lines
    assert any(line.startswith("transport shm: not ipc, because ") for line in lines)
    assert len(lines) == 4


def test_what_was_asked_for_is_taken(server: MemoryServer, folder: Path, run: Run) -> None:
    code, out, err = run("push", folder, "--engine", server.url, "--version", "mine", "--transport", "shm", "--json")
    assert (code, json.loads(out)["version"]) == (0, "mine")
    assert "transport shm: it was asked for" in err
    assert "--version" not in err


def test_two_servers_take_a_version_together(start: Callable[..., MemoryServer], folder: Path, run: Run) -> None:
    one, two = start(), start(tp=2)
    code, out, _ = run("push", folder, "--engine", one.url, two.url, "--json")
    assert code == 0
    assert [engine["engine"] for engine in json.loads(out)["engines"]] == [one.name, two.name]
    assert (one.engine.version, two.engine.version) == ("step-1", "step-1")
    code, out, _ = run("status", one.url, two.url)
    assert code == 0
    assert [line.split()[:4] for line in out.splitlines()[1:]] == [
        [one.name, "step-1", "0", "serving"],
        [two.name, "step-1", "0", "serving"],
    ]


def test_a_push_that_reaches_some_ends_with_3(start: Callable[..., MemoryServer], folder: Path, run: Run) -> None:
    good, bad = start(), start()
    bad.engine.inject("prepare")
    code, out, _ = run("push", folder, "--engine", good.url, "--engine", bad.url, "--require", "any", "--json")
    receipt = json.loads(out)
    assert code == 3
    assert [engine["engine"] for engine in receipt["engines"]] == [good.name]
    assert [(state["engine"], state["phase"]) for state in receipt["failed"]] == [(bad.name, "prepare")]


def test_a_push_that_one_fails_reaches_none_and_ends_with_1(start: Callable[..., MemoryServer], folder: Path, run: Run) -> None:
    good, bad = start(), start()
    bad.engine.inject("prepare")
    code, out, err = run("push", folder, "--engine", good.url, bad.url)
    assert (code, out) == (1, "")
    for name in (good.name, bad.name):
        assert f"{name}: " in err
    assert "next: " in err
    assert "Traceback" not in err
    assert good.engine.version is None


def test_a_failure_is_told_once_with_what_a_command_line_can_do(server: MemoryServer, folder: Path) -> None:
    server.engine.inject("commit", "die")
    done = stranger("push", folder, "--engine", server.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert len([line for line in done.stderr.splitlines() if "died in commit" in line and not line.startswith("  ")]) == 1
    assert (
        done.stderr.splitlines()[-1]
        == "  next: `instep status URL` says what each server serves: restart those that are gone, then run this again"
    )


def test_bytes_that_differ_on_the_way_end_with_4(server: MemoryServer, folder: Path, run: Run) -> None:
    server.engine.inject("digest")
    code, out, err = run("push", folder, "--engine", server.url)
    assert (code, out) == (4, "")
    assert "DigestMismatch" in err
    assert "still serves its own first weights" in err


def test_a_version_of_other_bytes_is_refused(server: MemoryServer, folder: Path, tmp_path: Path, run: Run) -> None:
    assert run("push", folder, "--engine", server.url, "--version", "v1")[0] == 0
    other = saved(checkpoint(2, layers=1), tmp_path / "other")
    code, out, err = run("push", other, "--engine", server.url, "--version", "v1")
    assert (code, out) == (1, "")
    assert "VersionConflict" in err
    assert run("push", folder, "--engine", server.url, "--version", "v1")[0] == 0  # the same bytes may come again


def test_a_label_that_is_none_is_refused(server: MemoryServer, folder: Path, run: Run) -> None:
    code, out, err = run("push", folder, "--engine", server.url, "--version", "a b")
    assert (code, out) == (1, "")
    assert "a version is a string" in err


def test_a_hub_id_is_taken_from_the_cache(
    server: MemoryServer, folder: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    revision = "a" * 40
    repository = tmp_path / "hub" / "models--someone--something"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots").mkdir()
    folder.rename(repository / "snapshots" / revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    code, out, err = run("push", "someone/something", "--engine", server.url, "--json")
    assert (code, json.loads(out or "{}").get("version")) == (0, revision), err


def test_verify_names_what_differs(server: MemoryServer, folder: Path, run: Run) -> None:
    assert run("push", folder, "--engine", server.url)[0] == 0
    server.engine.hosts[0].model.get_parameter("model.norm.weight")[0] += 1
    code, out, err = run("verify", folder, "--engine", server.url)
    assert (code, err) == (4, "")
    assert f"(step-1): differs: {len(NEXT) - 1} of {len(NEXT)} tensors equal, 1 differ, 0 cannot be read back; 100 % of the bytes" in out
    assert "  differs: model.norm.weight: digest " in out


def packed(server: MemoryServer, name: str) -> None:
    """The engine keeps a parameter in a layout of its own, as vLLM does on CPUs."""
    parameter = server.engine.hosts[0].model.get_parameter(name)
    parameter.data = parameter.data.flatten()


def test_what_cannot_be_read_back_is_not_called_equal(server: MemoryServer, folder: Path, run: Run) -> None:
    assert run("push", folder, "--engine", server.url)[0] == 0
    code, out, _ = run("verify", folder, "--engine", server.url, "--json")
    (whole,) = json.loads(out)["engines"]
    assert (code, whole["result"], whole["share"], whole["compared"]) == (0, "equal", 1.0, whole["total"])
    packed(server, "model.layers.0.self_attn.o_proj.weight")
    code, out, _ = run("verify", folder, "--engine", server.url, "--json")
    (part,) = json.loads(out)["engines"]
    assert (code, part["result"], list(part["unread"])) == (5, "not all compared", ["model.layers.0.self_attn.o_proj.weight"])
    lost = NEXT["model.layers.0.self_attn.o_proj.weight"].nbytes
    assert part["compared"] == whole["total"] - lost
    assert part["share"] == part["compared"] / whole["total"]
    code, out, _ = run("verify", folder, "--engine", server.url)
    first, *others = out.splitlines()
    share = int(100 * part["share"])
    assert f"(step-1): not all compared: {len(NEXT) - 1} of {len(NEXT)} tensors equal" in first
    assert f"1 cannot be read back; {share} % of the bytes were" in first
    assert others[-1] == "  next: --canary compares what the engine computes"


def test_a_difference_says_more_than_what_cannot_be_read_back(server: MemoryServer, folder: Path, run: Run) -> None:
    assert run("push", folder, "--engine", server.url)[0] == 0
    packed(server, "model.layers.0.self_attn.o_proj.weight")
    server.engine.hosts[0].model.get_parameter("model.norm.weight")[0] += 1
    assert run("verify", folder, "--engine", server.url)[0] == 4


def test_of_several_servers_the_worst_decides(start: Callable[..., MemoryServer], folder: Path, run: Run) -> None:
    whole, part = start(), start()
    assert run("push", folder, "--engine", whole.url, part.url)[0] == 0
    packed(part, "model.layers.0.self_attn.o_proj.weight")
    assert run("verify", folder, "--engine", whole.url, part.url)[0] == 5
    assert run("verify", folder, "--engine", "127.0.0.1:9", part.url)[0] == 3


def test_verify_goes_on_past_a_server_that_does_not_answer(server: MemoryServer, folder: Path, run: Run) -> None:
    assert run("push", folder, "--engine", server.url)[0] == 0
    code, out, _ = run("verify", folder, "--engine", "http://127.0.0.1:9", server.url, "--json")
    assert code == 3
    assert [engine["result"] for engine in json.loads(out)["engines"]] == ["failed", "equal"]


def test_a_server_may_be_called_as_errors_and_status_call_it(server: MemoryServer, folder: Path, run: Run) -> None:
    for command in (["push", folder, "--engine", server.name], ["verify", folder, "--engine", server.name], ["status", server.name]):
        code, _, err = run(*command)
        assert code == 0, err
    assert server.engine.version == "step-1"


def test_the_token_reaches_the_server_and_no_output(
    start: Callable[..., MemoryServer], folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "never-shown-" + "3" * 10
    server = start(token=token)
    code, out, err = run("push", folder, "--engine", server.url)
    assert (code, out) == (1, "")
    assert "INSTEP_TOKEN" in err
    monkeypatch.setenv("INSTEP_TOKEN", token)
    said = ""
    for command in (["push", folder, "--engine", server.url], ["verify", folder, "--engine", server.url], ["status", server.url]):
        code, out, err = run(*command)
        assert code == 0, err
        said += out + err
    assert token not in said
