"""A LoRA adapter that was pushed, against the same adapter loaded by vLLM from the folder that peft saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import retrain, with_adapter
from engines import greedy, start, versions
from models import PROMPTS, tiny

from instep import Adapter, MemoryEngine, WeightSync
from instep.bench.subjects import stop_vllm
from instep.errors import ApplyError, EngineDirty, InstepError, PlanError, SyncError

RANK = 8


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def llm(request: pytest.FixtureRequest, checkpoints: Callable[[str, int], Path]) -> Iterator[Any]:
    arguments = {"enable_lora": True, "max_lora_rank": RANK, "tensor_parallel_size": request.param}
    llm = start(checkpoints("llama", 2), load_format="auto", worker_extension_cls="faulty.FaultyExtension", **arguments)
    yield llm
    stop_vllm(llm)


@pytest.fixture(scope="module")
def base(llm: Any) -> Any:
    return greedy(llm, PROMPTS)


@pytest.fixture(scope="module")
def saved(llm: Any, base: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What the adapter of a seed makes of the prompts, loaded from disk."""
    answers = {}
    for seed in (5, 6):
        model = with_adapter()
        retrain(model, seed)
        folder = tmp_path_factory.mktemp(f"adapter-{seed}")
        model.save_pretrained(folder)
        answers[seed] = greedy(llm, PROMPTS, lora=lora(100 + seed, folder))
    assert answers[5] != answers[6]
    assert base not in answers.values()
    return answers


def lora(number: int = 1, folder: object = "pushed") -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{number}", number, str(folder))


@pytest.fixture
def trained(llm: Any, base: Any, saved: dict[int, Any]) -> Iterator[tuple[Any, WeightSync]]:
    """A trainer whose first version the engine serves."""
    model = with_adapter()
    retrain(model, 5)
    with WeightSync(source=Adapter(model), engines=[llm], timeout=60) as sync:
        sync.push(f"first-{time.time_ns()}")
        assert greedy(llm, PROMPTS, lora=lora()) == saved[5]
        yield model, sync


def test_versions_there_and_back_are_those_loaded_from_disk(
    llm: Any, base: Any, saved: dict[int, Any], trained: tuple[Any, WeightSync]
) -> None:
    """Bit for bit, also for prompts that an older version has answered; requests for the base model see nothing of it."""
    model, sync = trained
    for version, seed in (("second", 6), ("first-again", 5)):
        retrain(model, seed)
        receipt = sync.push(version)
        assert receipt.nbytes == sum(param.nbytes for name, param in model.named_parameters() if "lora_" in name)
        assert greedy(llm, PROMPTS, lora=lora()) == saved[seed]
        assert versions(llm, PROMPTS[0]) == [(version, 0, 3)]
        assert greedy(llm, PROMPTS) == base


def test_an_adapter_that_vllm_forgot_is_the_pushed_one_when_it_is_asked_for_again(
    llm: Any, base: Any, saved: dict[int, Any], trained: tuple[Any, WeightSync], tmp_path: Path
) -> None:
    """There is room for one adapter: another one's request drives it out. A push of base weights, with its reload, drops all of them."""
    other = with_adapter()
    retrain(other, 9)
    other.save_pretrained(tmp_path)
    assert greedy(llm, PROMPTS, lora=lora(50, tmp_path)) != saved[5]
    assert greedy(llm, PROMPTS, lora=lora()) == saved[5]
    with WeightSync(source=tiny("llama", 3), engines=[llm]) as sync:
        sync.push("other-base")
    with WeightSync(source=tiny("llama", 2), engines=[llm]) as sync:
        sync.push("same-base")
    assert greedy(llm, PROMPTS) == base
    assert greedy(llm, PROMPTS, lora=lora()) == saved[5]


def test_a_push_that_fails_before_the_commit_leaves_the_old_adapter(
    llm: Any, saved: dict[int, Any], trained: tuple[Any, WeightSync]
) -> None:
    model, sync = trained
    retrain(model, 6)
    llm.collective_rpc("inject", args=("refuse:prepare", 0))
    with pytest.raises(InstepError, match="told to refuse"):
        sync.push("refused")
    assert [state.serving for state in sync.status()] == ["old"]
    assert greedy(llm, PROMPTS, lora=lora()) == saved[5]
    sync.push("taken")
    assert greedy(llm, PROMPTS, lora=lora()) == saved[6]


def test_a_commit_that_fails_leaves_the_engine_refusing_until_the_next_push(
    llm: Any, saved: dict[int, Any], trained: tuple[Any, WeightSync]
) -> None:
    model, sync = trained
    retrain(model, 6)
    llm.collective_rpc("inject", args=("adapter", 1))
    with pytest.raises(ApplyError, match="told to fail") as failure:
        sync.push("broken")
    assert [state.serving for state in failure.value.engines] == ["dirty"]
    with pytest.raises(EngineDirty):
        greedy(llm, PROMPTS)
    sync.push("healed")
    assert greedy(llm, PROMPTS, lora=lora()) == saved[6]


def test_requests_in_flight_go_on_with_the_new_adapter(llm: Any, saved: dict[int, Any], trained: tuple[Any, WeightSync]) -> None:
    from vllm import SamplingParams

    model, sync = trained
    retrain(model, 6)
    sampling = SamplingParams(max_tokens=80, temperature=0.0, detokenize=False, ignore_eos=True)
    for index in range(4):
        llm.llm_engine.add_request(f"flight-{index}", {"prompt_token_ids": [index + 1, 2, 3]}, sampling, lora_request=lora())
    finished, longest = [], 0
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
        finished += [output for output in outputs if output.finished]
        if longest < 5 <= (longest := max(longest, *(len(output.outputs[0].token_ids) for output in outputs))):
            sync.push("in-flight")
    assert len(finished) == 4
    for output in finished:
        assert len(output.outputs[0].token_ids) == 80
        assert [span.version.endswith("in-flight") for span in output.outputs[0].weight_versions] == [False, True]
    assert greedy(llm, PROMPTS, lora=lora()) == saved[6]


def test_two_engines_take_an_adapter_or_neither(llm: Any, saved: dict[int, Any], trained: tuple[Any, WeightSync]) -> None:
    model, _ = trained
    retrain(model, 6)
    other = MemoryEngine(tiny("llama", 2).state_dict(), name="other")
    with WeightSync(source=Adapter(model), engines=[llm, other]) as sync:
        other.inject("prepare")
        with pytest.raises(SyncError):
            sync.push("neither")
        assert greedy(llm, PROMPTS, lora=lora()) == saved[5]
        sync.push("both")
    assert greedy(llm, PROMPTS, lora=lora()) == saved[6]
    assert other.fingerprint(1) != other.fingerprint()


REFUSED = {
    "dora": ({"use_dora": True}, "DoRA"),
    "modules to save": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "a rank too large": ({"r": RANK + 1}, "max_lora_rank 8"),
    "a bias": ({"bias": "all"}, "bias"),
    "an initialisation that changes the base": ({"init_lora_weights": "pissa"}, "pissa"),
    "a layer too many": ({"base": {"num_hidden_layers": 3}}, "model.layers.2"),
    "layers that take less": ({"base": {"hidden_size": 48}}, "takes 48 features"),
    "layers that give less": ({"base": {"intermediate_size": 48}}, "gives 48, the engine's layer 64 and 96"),
}


@pytest.mark.parametrize(("config", "named"), REFUSED.values(), ids=REFUSED)
def test_what_vllm_cannot_serve_is_refused_before_anything_moves(
    llm: Any, saved: dict[int, Any], trained: tuple[Any, WeightSync], config: dict[str, Any], named: str
) -> None:
    model = with_adapter(**{**config, "base": tiny("llama", 2, **config.get("base", {}))})
    with WeightSync(source=Adapter(model), engines=[llm]) as sync:
        with pytest.raises(PlanError, match=named) as failure:
            sync.push("never")
        assert "next: push" in str(failure.value)
    assert greedy(llm, PROMPTS, lora=lora()) == saved[5]
