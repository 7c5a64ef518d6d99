"""Pushes over a private Gloo group to a real vLLM with two workers: what an engine on another host gets."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import greedy
from models import PROMPTS, tiny

from instep import WeightSync
from instep.errors import TransportError


@pytest.fixture(scope="module")
def llm(engine: Callable[..., Any], checkpoints: Callable[[str, int], Path]) -> Any:
    """Loaded from disk, with the weights of seed 2."""
    return engine(checkpoints("qwen3", 2), load_format="auto", tensor_parallel_size=2)


def test_away_and_back_are_the_same_tokens_and_log_probabilities(llm: Any) -> None:
    from_disk = greedy(llm, PROMPTS)
    model = tiny("qwen3", 3)
    with WeightSync(source=model, engines=[llm], transport="gloo") as sync:
        sync.push("away")
        assert greedy(llm, PROMPTS) != from_disk
        model.load_state_dict(tiny("qwen3", 2).state_dict())
        sync.push("back")
        assert greedy(llm, PROMPTS) == from_disk


DIES = textwrap.dedent("""
    import os, sys, torch
    from instep.transport.group import Group, find
    key, host, port = sys.argv[1].split("@")
    group = Group("gloo", find(host, int(port), 20), key, 3, 4, torch.device("cpu"), 20)
    os._exit(0)
""")


def test_a_peer_that_dies_on_the_way_leaves_the_engine_with_what_it_served(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fourth rank, which stands for another engine's worker, joins the group and is gone before the first bucket."""
    before = greedy(llm, PROMPTS)
    with WeightSync(source=tiny("qwen3", 4), engines=[llm], transport="gloo", timeout=20) as sync:
        transport = sync._session.transport.candidates["gloo"]
        publish = transport.publish

        def with_a_peer(tensors: Any, values: Any) -> Any:
            transport.wanted = {**transport.wanted, "another": 3}  # type: ignore[attr-defined]
            published = publish(tensors, values)
            processes.append(subprocess.Popen([sys.executable, "-c", DIES, published.location.address]))
            return published

        processes: list[subprocess.Popen[bytes]] = []
        monkeypatch.setattr(transport, "publish", with_a_peer)
        started = time.monotonic()
        with pytest.raises(TransportError):
            sync.push("never")
        assert time.monotonic() - started < 20
        assert processes[0].wait(timeout=20) == 0
        assert greedy(llm, PROMPTS) == before
        assert [state.serving for state in sync.status()] == ["old"]
        monkeypatch.undo()
        sync.push("now")
        assert greedy(llm, PROMPTS) != before
