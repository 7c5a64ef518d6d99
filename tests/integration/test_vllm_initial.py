"""The first push compares what it brings with what vLLM's initial load makes. A wrong reload is found, or not needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import greedy
from models import PROMPTS, tiny

from instep import WeightSync
from instep.errors import ApplyError, EngineDirty

EXTENSION = "wrong_reload.WrongReloadExtension"
FAMILIES = ("qwen3", "qwen3_moe")
WRONG = [
    ("qwen3", "tied-head", "lm_head: what it computes"),
    ("qwen3", "packed", r"model\.layers\.1\.self_attn\.o_proj: what it computes"),
    ("qwen3_moe", "experts", r"model\.layers\.0\.mlp\.experts"),
    ("qwen3_moe", "packed", r"model\.layers\.1\.self_attn\.o_proj: what it computes"),
]


@pytest.fixture(scope="module")
def served(engine: Callable[..., Any], checkpoints: Callable[[str, int], Path]) -> Callable[[str], Any]:
    started: dict[str, Any] = {}

    def serves(family: str) -> Any:
        if family not in started:
            started[family] = engine(checkpoints(family, 1), worker_extension_cls=EXTENSION)
        return started[family]

    return serves


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_compared_in_the_first_push_alone(family: str, served: Callable[[str], Any], reference: Callable[..., Any]) -> None:
    llm = served(family)
    with WeightSync(source=tiny(family, 2), engines=[llm]) as sync:
        (first,), (second,) = sync.push(f"{family}-right").engines, sync.push(f"{family}-again").engines
    assert (first.unproved, second.unproved) == ({}, {})
    assert first.compared == second.compared >= len({*first.direct, *first.rebuilt}) > 10
    assert first.initial > 0 == second.initial
    assert greedy(llm, PROMPTS) == reference(family, 2)


@pytest.mark.parametrize(("family", "how", "what"), WRONG)
def test_a_wrong_reload_is_named_and_its_engine_refuses_until_it_is_mended(
    family: str, how: str, what: str, served: Callable[[str], Any], reference: Callable[..., Any]
) -> None:
    from vllm import __version__

    llm = served(family)
    llm.collective_rpc("go_wrong", args=(how, False))
    with WeightSync(source=tiny(family, 1), engines=[llm]) as sync:
        for attempt in range(2):
            with pytest.raises(ApplyError, match=what) as caught:
                sync.push(f"{how}-{attempt}")
            assert f"is not what the initial load of vLLM {__version__} makes of the same weights" in str(caught.value)
            assert "pushing again does not help" in str(caught.value)
            assert "DIRTY" in str(caught.value)
        with pytest.raises(EngineDirty):
            greedy(llm, PROMPTS)
    llm.collective_rpc("go_wrong", args=("", False))
    with WeightSync(source=tiny(family, 3), engines=[llm]) as sync:
        sync.push(f"{how}-mended")
        assert greedy(llm, PROMPTS) == reference(family, 3)


def test_a_layer_that_is_decided_before_the_pause_does_not_need_a_right_reload(
    served: Callable[[str], Any], reference: Callable[..., Any]
) -> None:
    llm = served("qwen3")
    llm.collective_rpc("go_wrong", args=("packed", True))
    with WeightSync(source=tiny("qwen3", 2), engines=[llm]) as sync:
        (engine,) = sync.push("without").engines
    assert "model.layers.1.self_attn.o_proj" in engine.rebuilt
    assert greedy(llm, PROMPTS) == reference("qwen3", 2)
    llm.collective_rpc("go_wrong", args=("", True))
