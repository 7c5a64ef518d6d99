"""Keepers and wardens of the sandbox: what becomes of programs when one of them, or whoever asked, ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.rollouts import run, until
from helpers.sandbox_levels import at

from instep.errors import ConfigError
from instep.generation.sandbox import Level, Run, SandboxLimits, kept, run_python

LEAST = SandboxLimits(seconds=100.0, sandbox="none")


def program(text: str) -> Run:
    return run(run_python(text, SandboxLimits()))


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
            os._exit(0 if asyncio.new_event_loop().run_until_complete(run_python("print(1)", LEAST)).ok else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert program("print(1)").ok


def test_a_keeper_that_does_not_come_up_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kept, "KEEPER", tmp_path / "absent.py")
    monkeypatch.setattr(kept, "_kept", None)
    with pytest.raises(ConfigError, match="no program can be run here: full: its keeper did not come up"):
        program("print(1)")


def test_a_keeper_ends_with_its_process_though_a_forked_child_lives_on() -> None:
    keeper = kept.Keeper("full")
    child = os.fork()
    if child == 0:
        signal.pause()
    keeper.close()
    assert keeper.process.returncode == 0
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
