"""A process that ends is noticed by those that watch it, and by nobody's deadline."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from msgspec import structs

from instep.ranks.liveness import Liveness, Watch, liveness


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    yield watch
    watch.close()


def of(process: subprocess.Popen[bytes]) -> Liveness:
    return structs.replace(liveness(), pid=process.pid)


def test_a_process_that_was_killed_is_gone_even_if_nobody_has_waited_for_it(watch: Watch, other: subprocess.Popen[bytes]) -> None:
    watch.see(2, of(other))
    watch.see(5, liveness())
    assert watch.gone() == set()
    other.kill()
    assert watch.gone(30.0) == {2}
    watch.see(2, liveness())  # whoever says now that it is this rank came too late
    assert watch.gone() == {2}


def test_numbers_of_another_host_or_container_are_not_looked_up(watch: Watch, other: subprocess.Popen[bytes]) -> None:
    watch.see(1, structs.replace(of(other), host="elsewhere"))
    watch.see(2, structs.replace(of(other), numbers="pid:[1]"))
    other.kill()
    other.wait()
    assert watch.gone() == set()


def test_a_process_that_ended_before_it_was_watched_is_gone(watch: Watch, other: subprocess.Popen[bytes]) -> None:
    said = of(other)
    other.kill()
    other.wait()
    watch.see(3, said)
    assert watch.gone(30.0) == {3}


def test_nobody_waits_where_no_process_can_be_seen(watch: Watch) -> None:
    watch.see(1, structs.replace(liveness(), host="elsewhere"))
    assert watch.gone(3600.0) == set()
