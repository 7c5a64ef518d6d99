"""The sandbox and the Python tool, with real programs that do what they should not."""

from __future__ import annotations

import asyncio
import platform
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from helpers.rollouts import Say, ScriptedClient, decode, harness, request, run, said
from helpers.sandbox_levels import at

from instep.errors import ConfigError
from instep.generation import ToolSet
from instep.generation.rollout.turns import rollout
from instep.generation.sandbox import Level, Run, SandboxLimits, kept, run_python
from instep.generation.tools.python import PythonTool
from instep.generation.types import ToolCall, ToolRecord

LIMITS = SandboxLimits(seconds=10.0, memory=200 << 20, output=2000, file=1 << 20)
SHORT = SandboxLimits(seconds=0.3)


def program(text: str, limits: SandboxLimits = LIMITS, stdin: str = "") -> Run:
    return run(run_python(text, limits, stdin))


def test_a_program_prints_reads_and_ends() -> None:
    ran = program("import sys\nprint(sys.stdin.read()[::-1])\nprint('err', file=sys.stderr)\nraise SystemExit(3)", stdin="abc")
    assert (ran.output, ran.end, ran.code, ran.ok) == ("cba\nerr\n", "exit", 3, False)


def test_an_exception_is_shown_with_its_line() -> None:
    ran = program("x = 1\nprint(x / 0)")
    assert "line 2" in ran.output
    assert "ZeroDivisionError: division by zero" in ran.output


def test_an_endless_loop_is_stopped() -> None:
    ran = program("print('on my way')\nwhile True: pass", SandboxLimits(seconds=5.0))  # which a loaded machine takes to start it
    assert (ran.end, ran.output) == ("timeout", "on my way\n")


def test_a_program_that_ignores_signals_and_closes_its_output_is_stopped_too() -> None:
    text = "import os, signal\nfor number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\nos.close(1); os.close(2)\nwhile True: pass"
    assert program(text, SHORT).end == "timeout"


def test_memory_beyond_the_limit_is_an_error_that_the_program_sees() -> None:
    ran = program("try:\n    bytearray(10**9)\nexcept MemoryError:\n    print('too much')\nbytearray(10**9)")
    assert ran.output.startswith("too much\n")
    assert (ran.output.splitlines()[-1], ran.code) == ("MemoryError", 1)


def test_endless_output_is_cut_and_ends_the_program() -> None:
    ran = program("while True: print('y' * 100)")
    assert (ran.end, len(ran.output)) == ("output", 2000)


def test_output_up_to_the_limit_is_no_offence() -> None:
    ran = program("print('y' * 1999)")
    assert (ran.ok, len(ran.output)) == (True, 2000)


def test_a_file_beyond_the_limit_is_an_error_that_the_program_sees() -> None:
    assert "File too large" in program("open('f', 'wb').write(bytes(2 << 20))").output


def test_a_program_can_use_threads_and_an_event_loop() -> None:
    text = "import asyncio, threading\nthread = threading.Thread(target=print, args=['thread'])\nthread.start(); thread.join()\n"
    ran = program(text + "async def main(): await asyncio.to_thread(print, 'loop')\nasyncio.run(main())")
    assert ran.output == "thread\nloop\n"


@pytest.mark.parametrize(("network", "printed"), [(False, "refused"), (True, "open")])
def test_a_program_has_the_network_only_where_it_is_allowed(network: bool, printed: str) -> None:
    text = "import socket\ntry: socket.socket(); print('open')\nexcept OSError: print('refused')"
    assert program(text, SandboxLimits(network=network)).output == f"{printed}\n"


def test_a_program_sees_no_environment_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    ran = program("import os\nprint('HF_TOKEN' in os.environ, os.getcwd() == os.environ['HOME'])")
    assert ran.output == "False True\n"


@pytest.mark.parametrize("level", ["full", "partial"])
def test_a_program_has_no_open_file_but_its_own(level: Level) -> None:
    text = """
import os
for n in range(2000):
    try: kind = os.fstat(n)
    except OSError: continue
    print(n)"""
    with at(level):
        assert program(text).output.split() == ["0", "1", "2"]


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user can read, as an interpreter's is where programs become another user. That of `tmp_path` is closed."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("level", ["full", "partial"])
def test_a_program_sees_of_its_interpreters_folder_what_python_needs(level: Level, monkeypatch: pytest.MonkeyPatch, public: Path) -> None:
    prefix = public / "environment"
    (prefix / "lib").mkdir(parents=True)
    for name in ("pip.conf", ".env", "lib/module.py", "pyvenv.cfg"):
        (prefix / name).write_text("content")
    monkeypatch.setattr(sys, "exec_prefix", str(prefix))
    names = [str(prefix / name) for name in ("pip.conf", ".env", "lib/module.py", "pyvenv.cfg")]
    text = f"for name in {names}:\n    try: print(open(name).read())\n    except OSError: print('closed')"
    keeper = kept.Keeper(level)
    monkeypatch.setattr(kept, "_kept", keeper)
    assert program(text, SandboxLimits()).output.split() == ["closed", "closed", "content", "content"]
    keeper.close()


def test_a_program_has_the_packages_of_this_interpreter() -> None:
    assert program("import numpy\nprint(numpy.ones((100, 100)).sum())", SandboxLimits()).output == "10000.0\n"


def test_a_signal_is_reported() -> None:
    ran = program("import os; os.abort()")
    assert (ran.end, ran.code) == ("signal", 6)


def test_text_that_is_no_utf8_does_not_matter() -> None:
    assert program("import os; os.write(1, b'\\xff'); print('\\udc80' == '\\udc80')").output == "�True\n"
    assert program("print('\udc80')").ok


@pytest.mark.parametrize("settings", [{"seconds": 0}, {"memory": -1}, {"output": 0}, {"file": 0}, {"disk": 0}, {"sandbox": "wall"}])
def test_limits_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SandboxLimits(**settings)


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(kept, "_kept", None)
    with pytest.raises(ConfigError, match="x86_64 or aarch64, not Linux on riscv64"):
        program("print(1)")


def test_programs_insist_on_a_level_and_are_told_why_they_do_not_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_reasons", {"full": "unshare: Operation not permitted"})
    with at("partial"):
        assert program("print(1)", SandboxLimits(sandbox="partial")).ok
        for use in (partial(program, "print(1)", SandboxLimits(sandbox="full")), PythonTool(limits=SandboxLimits(sandbox="full")).describe):
            with pytest.raises(ConfigError, match=r"gives the sandbox 'partial'.*'full' is the least.*unshare: Operation") as refused:
                use()
            assert 'SandboxLimits(sandbox="partial")' in str(refused.value)
    with at("none"):
        assert program("print(1)", SandboxLimits(sandbox="none")).ok
        with pytest.raises(ConfigError, match="gives the sandbox 'none'"):
            program("print(1)")


def tool_call(code: str, tool: PythonTool, within: float = 10.0) -> ToolRecord:
    async def main() -> ToolRecord:
        return await (await ToolSet.connect([tool])).call(ToolCall("python", {"code": code}), within=within)

    return run(main())


def test_the_python_tool_shows_what_was_printed_and_why_it_ended() -> None:
    fine = tool_call("print(6 * 7)", PythonTool())
    assert (fine.output, fine.error, fine.outcome) == ("42\n", None, "ok")
    failed = tool_call("print('before')\n1 / 0", PythonTool())
    assert failed.output.startswith("before\n")
    assert (failed.error, failed.outcome) == ("the program ended with exit code 1", "error")
    stopped = tool_call("while True: pass", PythonTool(limits=SHORT))
    assert stopped.error == "the program was stopped after 0.3 seconds"


def test_no_more_programs_run_at_once_than_are_allowed() -> None:
    text = "import time\nprint(time.monotonic()); time.sleep(0.1); print(time.monotonic())"

    async def main() -> list[ToolRecord]:
        tools = await ToolSet.connect([PythonTool(at_once=1)])
        return await asyncio.gather(*(tools.call(ToolCall("python", {"code": text}), within=10.0) for _ in range(3)))

    spans = sorted([float(word) for word in record.output.split()] for record in run(main()))
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_a_rollout_with_the_python_tool_computes() -> None:
    client = ScriptedClient(said("<python>print(2 ** 10)</python>"), said("1024"))
    sample = run(rollout(request(), 0, client, harness(PythonTool(), Say())))
    assert "<output>\n1024\n\n</output>" in decode(sample.token_ids)
    assert [record.outcome for record in sample.tools] == ["ok"]
