"""The sandbox and the Python tool, with real programs that do what they should not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollouts import Say, ScriptedClient, decode, harness, request, run, said, until

from instep.errors import ConfigError
from instep.generation import ToolSet, sandbox
from instep.generation.python_tool import PythonTool
from instep.generation.rollout import rollout
from instep.generation.sandbox import Run, SandboxLimits, run_python
from instep.generation.types import ToolCall, ToolRecord

LIMITS = SandboxLimits(seconds=10.0, memory=200 << 20, output=2000, file=1 << 20)
SHORT = SandboxLimits(seconds=0.3)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The working directories of this test's programs lie in its own, and each is gone when its program has ended."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    run(until(lambda: not list(tmp_path.glob("instep-sandbox-*"))))


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


FORKS = """
import os, subprocess
spawn = lambda: os.posix_spawn("/bin/true", ["true"], {})
for start in (os.fork, spawn, lambda: subprocess.run(["true"]), lambda: 1 / (os.system("true") == 0)):
    try:
        start()
        print("started")
    except (OSError, ZeroDivisionError):
        print("refused")
"""


def test_a_program_cannot_start_another_process() -> None:
    assert program(FORKS).output == "refused\n" * 4  # each with room for a fork bomb, which nobody could catch up with


def test_a_program_can_use_threads_and_an_event_loop() -> None:
    text = "import asyncio, threading\nthread = threading.Thread(target=print, args=['thread'])\nthread.start(); thread.join()\n"
    ran = program(text + "async def main(): await asyncio.to_thread(print, 'loop')\nasyncio.run(main())")
    assert ran.output == "thread\nloop\n"


def test_a_program_cannot_signal_other_processes() -> None:
    ran = program(
        f"import os\nfor pid in (os.getppid(), {os.getpid()}, -1):\n  try: os.kill(pid, 0)\n  except OSError as e: print(e.errno)"
    )
    assert ran.output == "1\n1\n1\n"


@pytest.mark.parametrize(("network", "printed"), [(False, "refused"), (True, "open")])
def test_a_program_has_the_network_only_where_it_is_allowed(network: bool, printed: str) -> None:
    text = "import socket\ntry: socket.socket(); print('open')\nexcept OSError: print('refused')"
    assert program(text, SandboxLimits(network=network)).output == f"{printed}\n"


def test_a_program_sees_no_environment_but_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    ran = program("import os\nprint('HF_TOKEN' in os.environ, os.getcwd() == os.environ['HOME'], os.getcwd())")
    assert ran.output.startswith("False True ")
    assert str(tmp_path) in ran.output


def test_a_program_has_the_packages_of_this_interpreter() -> None:
    assert program("import numpy\nprint(numpy.ones((100, 100)).sum())", SandboxLimits()).output == "10000.0\n"


def test_a_signal_is_reported() -> None:
    ran = program("import os; os.abort()")
    assert (ran.end, ran.code) == ("signal", 6)


def test_text_that_is_no_utf8_does_not_matter() -> None:
    assert program("import os; os.write(1, b'\\xff'); print('\\udc80' == '\\udc80')").output == "�True\n"
    assert program("print('\udc80')").ok


def keepers() -> list[int]:
    """Processes of this test's sandboxes."""
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "sandbox_keeper"], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def test_cancelling_ends_the_program_and_its_keeper() -> None:
    async def main() -> None:
        task = asyncio.ensure_future(run_python("import time; time.sleep(100)", LIMITS))
        await until(keepers)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not keepers())

    run(main())


def test_a_program_ends_when_whoever_asked_for_it_is_killed(tmp_path: Path) -> None:
    text = (
        "import asyncio\nfrom instep.generation.sandbox import *\n"
        'asyncio.run(run_python(\'import os, time; open("../pid", "w").write(str(os.getpid())); time.sleep(100)\', SandboxLimits()))'
    )
    asker = subprocess.Popen([sys.executable, "-c", text])
    pid = tmp_path / "pid"
    run(until(lambda: pid.exists() and pid.read_text()))
    asker.kill()
    asker.wait(10)
    run(until(lambda: not Path("/proc", pid.read_text()).exists()))


def test_a_keeper_that_does_not_come_up_is_a_lost_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "KEEPER", tmp_path / "absent.py")
    ran = program("print(1)")
    assert (ran.end, ran.ok) == ("lost", False)


@pytest.mark.parametrize("settings", [{"seconds": 0}, {"memory": -1}, {"output": 0}, {"file": 0}])
def test_limits_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SandboxLimits(**settings)


def test_a_machine_without_the_filter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="x86_64 or aarch64, not Linux on riscv64"):
        SandboxLimits()


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


def test_no_more_programs_run_at_once_than_are_allowed(tmp_path: Path) -> None:
    text = f"import os, time\nopen(f'{tmp_path}/{{os.getpid()}}', 'w')\ntime.sleep(0.2)\nprint(len(os.listdir('{tmp_path}')))"

    async def main() -> list[ToolRecord]:
        tools = await ToolSet.connect([PythonTool(at_once=1)])
        return await asyncio.gather(*(tools.call(ToolCall("python", {"code": text}), within=10.0) for _ in range(2)))

    assert sorted(int(record.output) for record in run(main())) == [2, 3]  # its own working directory, and a file for each that started


def test_a_rollout_with_the_python_tool_computes() -> None:
    client = ScriptedClient(said("<python>print(2 ** 10)</python>"), said("1024"))
    sample = run(rollout(request(), 0, client, harness(PythonTool(), Say())))
    assert "<output>\n1024\n\n</output>" in decode(sample.token_ids)
    assert [record.outcome for record in sample.tools] == ["ok"]
