"""The command itself: help, exit codes, where output goes. No engine is started."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import instep
from instep import cli
from instep.errors import ConfigError, DigestMismatch, EngineLost, EngineState, InstepError, PlanError

RUN = "from instep.cli import main; main()"


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", f"import sys; {before}{RUN}", *arguments], capture_output=True, text=True)


def test_help_names_the_commands_and_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "vllm", "numpy")
    report = f"import atexit; atexit.register(lambda: print('LOADED', *[name for name in {heavy} if name in sys.modules])); "
    result = run("--help", before=report)
    assert result.returncode == 0
    assert "demo" in result.stdout
    assert "doctor" in result.stdout
    assert result.stdout.splitlines()[-1] == "LOADED"


def test_without_cyclopts_the_command_says_what_to_install() -> None:
    result = run("--help", before="sys.modules['cyclopts'] = None; ")
    assert result.returncode == 1
    assert result.stderr.strip() == 'the instep command needs cyclopts: pip install "instep[cli]"'


def test_the_package_runs_as_the_command() -> None:
    lacking = "import sys, runpy; sys.modules['cyclopts'] = None; runpy.run_module('instep', run_name='__main__')"
    for arguments, code, text in ((["-m", "instep", "--help"], 0, "Usage: instep COMMAND"), (["-c", lacking], 1, 'install "instep[cli]"')):
        result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
        assert (result.returncode, text in result.stdout + result.stderr) == (code, True), result.stderr


def test_a_command_says_which_extra_it_lacks() -> None:
    for command, package in (("status", "rich"), ("demo", "transformers")):
        result = run(command, *["http://127.0.0.1:9"] * (command == "status"), before=f"sys.modules['{package}'] = None; ")
        assert result.returncode == 1
        told = rf'MissingExtra: .* needs the package {package}\n  next: pip install "instep\['
        assert re.search(told, result.stderr)
        assert "Traceback" not in result.stderr


def test_the_version_is_the_packages() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, instep.__version__ + "\n")


def test_completion_is_installed_where_no_extra_but_the_command_lines_is(tmp_path: Path) -> None:
    lacking = ("transformers", "vllm", "gguf", "matplotlib", "ray", "prometheus_client", "jsonschema")
    hidden = f"import os; os.environ |= {{'HOME': {str(tmp_path)!r}, 'SHELL': '/bin/bash'}}; sys.modules |= dict.fromkeys({lacking}); "
    result = run("--install-completion", before=hidden)
    assert result.returncode == 0, result.stderr
    script = (tmp_path / ".local/share/bash-completion/completions/instep").read_text()
    assert [word for word in (*COMMANDS, "--engine", "--shapes", "--self-test") if word not in script] == []


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["--help"]])
def test_a_reader_that_leaves_ends_a_command_as_it_ends_any_unix_tool(arguments: list[str]) -> None:
    """As in `instep doctor | head -1`: without a word, by SIGPIPE."""
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run([sys.executable, "-c", RUN, *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (result.returncode, result.stderr) == (-signal.SIGPIPE, "")


def test_an_exit_code_that_only_looks_like_a_reader_that_left_is_kept() -> None:
    """rich ends a process with 1 when the reader has left; so do others, for other reasons."""
    result = run("doctor", before="import instep.cli.checks as checks; checks.CHECKS = [lambda: sys.exit(1)]; ")
    assert result.returncode == 1


def test_wrong_usage_ends_with_2_and_nothing_on_stdout() -> None:
    result = run("doctor", "--no-such-flag")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "--no-such-flag" in result.stderr


COMMANDS = ("demo", "doctor", "plan", "serve", "push", "status", "watch", "verify", "bench")


def flags(command: str) -> dict[str, str | None]:
    """Of one command, with their help. cyclopts lists negations that the root's default takes away."""
    arguments = cli.app()[command].assemble_argument_collection(parse_docstring=True)
    shown = [argument for argument in arguments if argument.parameter.show is not False]
    return {argument.names[0]: argument.parameter.help for argument in shown if not argument.names[0].startswith("--no-")}


def test_the_command_line_has_few_flags() -> None:
    every = {name for command in COMMANDS for name in flags(command) if name.startswith("--")}
    assert {"--json", "--self-test", "--model", "--steps", "--shapes", "--engine", "--version", "--canary"} <= every
    assert len(every) <= 20


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_every_argument_is(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert [name for name, text in flags(command).items() if not text] == []
    cli.app()([command, "--help"])
    output = capsys.readouterr().out
    assert "Exit codes: 0 done" in output
    assert all(name in output for name in flags(command) if name.startswith("--"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_the_docstring(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it, in `instep COMMAND --help`; its first paragraph in `instep --help`."""
    text = inspect.getdoc(getattr(import_module(f"instep.cli.{command}"), command))
    assert text is not None
    first, *others = (words(paragraph) for paragraph in text.partition("\n\nParameters\n")[0].split("\n\n"))
    cli.app()(["--help"])
    assert first in words(capsys.readouterr().out)
    cli.app()([command, "--help"])
    output = words(capsys.readouterr().out)
    assert [paragraph for paragraph in (first, *others) if paragraph not in output] == []


def words(text: str) -> str:
    """Without markup, frames and line breaks."""
    return " ".join(text.replace("`", "").replace("│", " ").split())


NEW, OLD = EngineState("a", "new", "v2"), EngineState("b", "old", "v1")


def code_of_a_doctor_that_raises(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> object:
    """How `instep doctor` ends."""

    def doctor() -> int:
        raise error

    monkeypatch.setattr("instep.cli.doctor.doctor", doctor)
    monkeypatch.setattr(sys, "argv", ["instep", "doctor"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no"), 1),
        (PlanError("no"), 1),
        (EngineLost("b died", engines=(OLD,)), 1),
        (EngineLost("b died", engines=(NEW, OLD)), 3),
        (DigestMismatch("b differs", engines=(NEW, OLD)), 4),
    ],
)
def test_an_error_is_told_in_words_and_in_the_exit_code(
    error: InstepError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of_a_doctor_that_raises(error, monkeypatch) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"{type(error).__name__}: {error}\n"


def test_ctrl_c_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of_a_doctor_that_raises(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr() == ("", "")


def test_demo_hands_its_flags_on_and_returns_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def fake(*arguments: object) -> int:
        seen.extend(arguments)
        return 3

    monkeypatch.setattr("instep.cli.demo.run", fake)
    monkeypatch.setattr(
        sys, "argv", ["instep", "demo", "--model", "tiny", "--steps", "2", "--seed", "7", "--out", "results", "--json", "--http"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 3
    assert seen == ["tiny", 2, 7, Path("results"), True, False, True]
