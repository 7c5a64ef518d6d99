"""The parts of the benchmark that need no engine: shapes, waits, peaks, and the methods to copy one plan."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import threading
from typing import Any, get_args

import pytest
import torch
from helpers.toys import checkpoint

from instep.bench import copies, memory, waits
from instep.bench.__main__ import main
from instep.bench.limits import MESSAGES, messages
from instep.bench.shapes import SHAPES, ShapesName, check, config
from instep.bench.trainer import largest
from instep.errors import ConfigError
from instep.transport.group import environment


def test_every_name_has_shapes() -> None:
    assert set(get_args(ShapesName)) == set(SHAPES)
    with pytest.raises(ConfigError, match="no shapes named 'gpt'"):
        check("gpt")


@pytest.mark.parametrize(
    ("name", "nbytes", "tensors"),
    [("qwen3-8b", 16_381_470_720, 399), ("llama-70b/tp8", 17_640_734_720, 723), ("smollm2-135m", 269_030_016, 272)],
)
def test_shapes_are_those_of_the_models(name: str, nbytes: int, tensors: int) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        parameters = list(AutoModelForCausalLM.from_config(config(name), dtype=torch.bfloat16).parameters())
    assert (sum(param.nbytes for param in parameters), len(parameters)) == (nbytes, tensors)


def test_messages_are_no_larger_than_what_is_pushed() -> None:
    assert messages(17 << 30) == list(MESSAGES)
    assert messages(300 << 20) == [1 << 20, 1 << 24, 1 << 28]
    assert messages(1) == [1 << 20, 1 << 24]


def test_a_bounded_call_gives_what_it_returns_or_raises() -> None:
    assert waits.bounded("it", lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        waits.bounded("it", lambda: 1 / 0)
    with pytest.raises(TimeoutError, match="its own"):
        waits.bounded("it", lambda: _raise(TimeoutError("its own")))
    assert waits.beside(lambda: 4).result(5) == 4


def _raise(error: Exception) -> None:
    raise error


def test_steps_share_a_thread_until_one_hangs() -> None:
    released = threading.Event()
    first, again = (waits.bounded("it", threading.get_ident) for _ in range(2))
    with pytest.raises(waits.Late, match=r"it did not end within 0\.05 s"):
        waits.bounded("it", released.wait, 0.05)
    assert first == again != waits.bounded("it", threading.get_ident)
    released.set()


def test_a_peak_is_what_was_held_beyond_the_base() -> None:
    pids = [os.getpid()]
    base = memory.held(pids)
    with memory.peak(pids, base) as peak:
        held = torch.ones(64 << 20, dtype=torch.uint8)
        del held
    assert set(peak) == set(base)
    if not torch.cuda.is_available():
        assert 0 <= peak["host"] < 1 << 30


STAYS = textwrap.dedent("""
    import os, torch
    from instep.bench import memory
    pids = [os.getpid()]
    with memory.peak(pids, memory.held(pids)) as peak:
        held = torch.ones(64 << 20, dtype=torch.uint8)
    print(peak["host"] >> 20)
""")


def test_memory_that_stays_is_seen() -> None:
    """In a process of its own: what others have left in this one may be freed meanwhile."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU, memory of the GPU is looked at")
    done = subprocess.run([sys.executable, "-c", STAYS], capture_output=True, text=True, timeout=120, check=True)
    assert 60 <= int(done.stdout) < 1000


def test_the_environment_is_as_before() -> None:
    before = dict(os.environ)
    with environment({"INSTEP_BENCH_NEW": "1", "PATH": "elsewhere"}):
        assert (os.environ["INSTEP_BENCH_NEW"], os.environ["PATH"]) == ("1", "elsewhere")
    assert dict(os.environ) == before


def test_the_largest_difference_is_infinite_where_one_is_not_a_number() -> None:
    assert largest([0.25, 0.5]) == 0.5
    assert largest([0.5, math.nan]) == largest([]) == math.inf


def test_methods_copy_every_region_of_a_plan() -> None:
    found = copies.copies(checkpoint(1), torch.device("cpu"), repeats=2)
    assert [copy.method for copy in found] == ["loop of copy_", "torch._foreach_copy_"]
    for copy in found:
        assert copy.error is None
        assert len(copy.seconds) == 2
        assert copy.nbytes == sum(tensor.nbytes for tensor in checkpoint(1).values())


def test_a_method_that_leaves_a_region_is_no_number() -> None:
    def all_but_one(plan: copies.Plan) -> Any:
        targets, sources = plan.pairs()
        return lambda: torch._foreach_copy_(targets[1:], sources[1:])

    plan = copies.make_plan(checkpoint(1), torch.device("cpu"))
    found = copies.measure("forgetful", all_but_one, plan, 2)
    assert "NotCopied" in str(found.error)
    assert found.seconds == []


def test_the_module_tells_how_it_is_called() -> None:
    for arguments in (["--help"], ["--shape", "tiny"], ["--shapes"], ["--repeats", "many"]):
        with pytest.raises(SystemExit, match="python -m instep"):
            main(arguments)
    with pytest.raises(SystemExit, match="no shapes named 'gpt'"):
        main(["--shapes", "gpt"])
    with pytest.raises(SystemExit, match="repeats must be 1 or more"):
        main(["--repeats", "0"])
