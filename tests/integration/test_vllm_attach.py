"""A vLLM that a framework starts, with an extension of its own: `INSTEP_ATTACH=1` gives its workers instep's calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import ARGUMENTS, SETTINGS, greedy, versions
from models import PROMPTS, tiny

from instep import WeightSync
from instep.bench.subjects import stop_vllm
from instep.engine.vllm.config import ATTACH
from instep.errors import ConfigError


@pytest.fixture(scope="module")
def theirs(checkpoints: Callable[[str, int], Path]) -> Iterator[Any]:
    from vllm import LLM

    with pytest.MonkeyPatch.context() as patch:  # its processes are not forked: those have the environment of the first engine
        for name, value in {**SETTINGS, ATTACH: "1"}.items():
            patch.setenv(name, value)
        llm = LLM(str(checkpoints("qwen3", 1)), worker_extension_cls="framework_worker.Framework", **ARGUMENTS)
        try:
            yield llm
        finally:
            stop_vllm(llm)


def test_a_push_reaches_workers_that_have_the_extension_of_another(theirs: Any, reference: Callable[..., Any]) -> None:
    with WeightSync(tiny("qwen3", 2), [theirs]) as sync:
        sync.push("attached")
        assert greedy(theirs, PROMPTS) == reference("qwen3", 2)
        assert sync.status()[0].version == "attached"
    assert versions(theirs, PROMPTS[0]) == [("attached", 0, 3)]
    assert [told["version"] for told in theirs.collective_rpc("instep_status")] == ["attached"]
    assert theirs.collective_rpc("framework_says") == ["mine"]


def test_without_the_variable_an_engine_without_an_extension_is_refused(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs.llm_engine.vllm_config.parallel_config, "worker_extension_cls", "")
    monkeypatch.delenv(ATTACH)
    with pytest.raises(ConfigError, match=f"{ATTACH}=1"):
        WeightSync(tiny("qwen3", 2), [theirs])
