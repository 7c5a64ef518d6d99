"""The sandbox and the Python tool, with real programs that do what they should not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rollouts import Say, ScriptedClient, decode, harness, request, run, said, until
from sandbox_levels import at

from instep.errors import ConfigError
from instep.generation import ToolSet
from instep.generation.python_tool import PythonTool
from instep.generation.rollout import rollout
from instep.generation.sandbox import Level, Run, SandboxLimits, kept, run_python
from instep.generation.types import ToolCall, ToolRecord

LIMITS = SandboxLimits(seconds=10.0, memory=200 << 20, output=2000, file=1 << 20)
SHORT = SandboxLimits(seconds=0.3)
LEAST = SandboxLimits(seconds=100.0, sandbox="none")


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


def test_a_program_has_the_packages_of_this_interpreter() -> None:
    assert program("import numpy\nprint(numpy.ones((100, 100)).sum())", SandboxLimits()).output == "10000.0\n"


def test_a_signal_is_reported() -> None:
    ran = program("import os; os.abort()")
    assert (ran.end, ran.code) == ("signal", 6)


def test_text_that_is_no_utf8_does_not_matter() -> None:
    assert program("import os; os.write(1, b'\\xff'); print('\\udc80' == '\\udc80')").output == "�True\n"
    assert program("print('\udc80')").ok


def wardens(keeper: int) -> list[int]:
    """Processes that a process, a keeper say, has started."""
    try:
        return [int(pid) for pid in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()]
    except FileNotFoundError:
        return []


@pytest.mark.parametrize("level", ["full", "partial", "none"])
def test_cancelling_ends_the_program_and_all_that_kept_it(level: Level) -> None:
    async def main(keeper: int) -> None:
        task = asyncio.ensure_future(run_python("import time; time.sleep(100)", LEAST))
        await until(lambda: programs(keeper))
        ran = programs(keeper)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not wardens(keeper) and not any(map(alive, ran)))

    with at(level) as keeper:
        run(main(keeper.process.pid))


def programs(keeper: int) -> list[int]:
    """Processes that run a program: below a keeper, they alone have another command line."""
    found = [one for warden in wardens(keeper) for child in wardens(warden) for one in (child, *wardens(child))]
    return [pid for pid in found if alive(pid) and b"main.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


ASKER = """
import asyncio
from instep.generation.sandbox import *
from instep.generation.sandbox import kept
kept._kept = kept.Keeper("{level}")
print(kept._kept.process.pid, flush=True)
asyncio.run(run_python("import time; time.sleep(100)", SandboxLimits(sandbox="none", seconds=100.0)))
"""


@pytest.mark.parametrize("level", ["full", "partial"])
def test_a_program_ends_when_whoever_asked_for_it_is_killed(level: Level) -> None:
    with at(level), subprocess.Popen([sys.executable, "-c", ASKER.format(level=level)], stdout=subprocess.PIPE) as asker:
        assert asker.stdout
        keeper = int(asker.stdout.readline())
        run(until(lambda: programs(keeper)))
        ran = [keeper, *wardens(keeper), *programs(keeper)]
        asker.kill()
        asker.wait(10)
        run(until(lambda: not any(map(alive, ran))))


@pytest.mark.parametrize("level", ["full", "partial", "none"])
def test_a_program_whose_warden_is_killed_ends_and_is_lost(level: Level) -> None:
    async def main(keeper: int) -> Run:
        task = asyncio.ensure_future(run_python("import time; time.sleep(100)", LEAST))
        await until(lambda: programs(keeper))
        ran = programs(keeper)
        os.kill(wardens(keeper)[0], signal.SIGKILL)
        lost = await task
        await until(lambda: not any(map(alive, ran)))
        return lost

    with at(level) as keeper:
        assert run(main(keeper.process.pid)).end == "lost"


def test_a_keeper_that_dies_is_started_again() -> None:
    with at("full"):
        keeper = kept.Keeper("full")
        kept._kept = keeper
        keeper.process.kill()
        keeper.process.wait()
        assert program("print(1)").output == "1\n"
        assert kept._kept is not keeper
        kept._kept.close()


def test_a_process_that_was_forked_has_a_keeper_of_its_own() -> None:
    assert program("print(1)").ok
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if asyncio.new_event_loop().run_until_complete(run_python("print(1)", LIMITS)).ok else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert program("print(1)").ok


def test_a_keeper_that_does_not_come_up_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kept, "KEEPER", tmp_path / "absent.py")
    monkeypatch.setattr(kept, "_kept", None)
    with pytest.raises(ConfigError, match="no program can be run here: full: its keeper did not come up"):
        program("print(1)")


@pytest.mark.parametrize("settings", [{"seconds": 0}, {"memory": -1}, {"output": 0}, {"file": 0}, {"disk": 0}, {"sandbox": "wall"}])
def test_limits_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SandboxLimits(**settings)


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept.platform, "machine", lambda: "riscv64")
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
