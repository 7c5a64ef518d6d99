"""A LoRA adapter as what is pushed: the bytes that peft saves, all or nothing, with versions of its own beside the model's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.source_models import WRAPPERS, assert_source_equals, checkpoint_layers, llama, lora, lora_with_second_adapter
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file

from instep import Adapter, MemoryEngine, TransformersEngine, WeightSync
from instep.engine.vllm.adapter import VllmAdapter
from instep.errors import ApplyError, ConfigError, DigestMismatch, EngineDirty, PlanError, SourceError, VersionConflict
from instep.receiver import MERGED

pytestmark = pytest.mark.usefixtures("segments")
PROMPT = [1, 2, 3]


def policy() -> Any:
    torch.manual_seed(0)
    return lora(llama(), lora_alpha=7, use_rslora=True)


def train(model: Any) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.add_(1)


def base() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(llama().state_dict())


@pytest.mark.parametrize("wrapper", [None, "compile", "compiled-layers"])
def test_names_and_bytes_are_those_that_peft_saves(wrapper: str | None, tmp_path: Path) -> None:
    model = policy()
    model.save_pretrained(tmp_path)
    source = Adapter(WRAPPERS[wrapper](model) if wrapper else model)
    assert_source_equals(source, load_file(tmp_path / "adapter_model.safetensors"))
    config, saved = json.loads(source.config.config), json.loads((tmp_path / "adapter_config.json").read_text())
    assert sorted(config.pop("target_modules")) == sorted(saved.pop("target_modules"))
    assert {key for key in config.keys() | saved.keys() if config[key] != saved[key]} == {"auto_mapping", "inference_mode"}


def test_layers_that_peft_does_not_save_are_not_left_out_in_silence() -> None:
    source = Adapter(checkpoint_layers(policy()))
    with pytest.raises(SourceError, match="0 of the adapter's 8 tensors"):
        source.metadata()


def test_the_active_adapter_alone_is_pushed() -> None:
    source = Adapter(lora_with_second_adapter())
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in (meta.name for meta in source.metadata())} == {"q_proj", "v_proj"}


def several_active() -> Any:
    model = lora_with_second_adapter()
    model.base_model.set_adapter(["default", "other"])
    return model


NOT_ONE_ADAPTER = {
    "no adapter": (llama, "LlamaForCausalLM is no peft.PeftModel"),
    "no module": (dict, "dict is no peft.PeftModel"),
    "two adapters": (several_active, "2 adapters are active"),
    "another kind": (lambda: get_peft_model(llama(), IA3Config(target_modules=["k_proj"], feedforward_modules=[])), "IA3"),
}


@pytest.mark.parametrize(("make", "message"), NOT_ONE_ADAPTER.values(), ids=NOT_ONE_ADAPTER)
def test_what_is_no_lora_adapter_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Adapter(make())


def test_numbers_begin_at_one() -> None:
    with pytest.raises(ConfigError, match="from 1"):
        Adapter(policy(), number=0)


def test_a_canary_is_refused() -> None:
    with pytest.raises(ConfigError, match="canary"):
        WeightSync(Adapter(policy()), [MemoryEngine(base())], canary=PROMPT)


def test_an_adapter_that_was_changed_under_the_push_is_refused() -> None:
    """Its configuration went to the engines with the first push."""
    model, engine = policy(), MemoryEngine(base())
    with WeightSync(Adapter(model), [engine]) as sync:
        sync.push("one")
        model.peft_config["default"].lora_alpha = 8
        with pytest.raises(SourceError, match="not the one that it was"):
            sync.push("two")
        assert engine.version == "one"


@pytest.mark.parametrize("tp", [1, 2])
def test_each_push_replaces_the_adapter_and_nothing_else(tp: int) -> None:
    model, engine = policy(), MemoryEngine(base(), tp=tp)
    plain, weights = engine.generate(PROMPT, 8), engine.fingerprint()
    answers = [plain]
    with WeightSync(Adapter(model), [engine]) as sync:
        for version in ("one", "two"):
            receipt = sync.push(version)
            assert receipt.nbytes == sum(param.nbytes for name, param in model.named_parameters() if "lora_" in name)
            pushed = {name: tensor.clone() for name, tensor in Adapter(model).tensors()}
            for host in engine.hosts:
                assert host.adapters[1].keys() == pushed.keys()
                assert all(torch.equal(host.adapters[1][name], pushed[name]) for name in pushed)
            answers.append(engine.generate(PROMPT, 8, adapter=1))
            train(model)
        assert engine.version == "two"
    assert len({tuple(tokens) for tokens in answers}) == 3
    assert engine.generate(PROMPT, 8) == plain
    assert engine.fingerprint() == weights


def test_a_push_that_fails_before_the_commit_leaves_the_old_adapter_in_all_engines() -> None:
    model, bad, good = policy(), MemoryEngine(base(), name="bad"), MemoryEngine(base(), name="good")
    with WeightSync(Adapter(model), [bad, good]) as sync:
        sync.push("one")
        before = [engine.generate(PROMPT, 8, adapter=1) for engine in (bad, good)]
        train(model)
        bad.inject("digest")
        with pytest.raises(DigestMismatch, match="lora_") as failure:
            sync.push("two")
        assert [(state.serving, state.version) for state in failure.value.engines] == [("old", "one")] * 2
        assert [engine.generate(PROMPT, 8, adapter=1) for engine in (bad, good)] == before
        sync.push("two")
        assert [engine.generate(PROMPT, 8, adapter=1) for engine in (bad, good)] != before


def test_a_commit_that_fails_makes_the_engine_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = policy(), MemoryEngine(base())

    def fail(*_: object) -> None:
        raise RuntimeError("told to fail")

    with WeightSync(Adapter(model), [engine]) as sync:
        sync.push("one")
        with monkeypatch.context() as patch:
            patch.setattr(engine.receivers[0].adapters[1].host, "install", fail)
            with pytest.raises(ApplyError, match="told to fail"):
                sync.push("two")
        assert "told to fail" in (engine.receivers[0].dirty() or "")
        with pytest.raises(EngineDirty):
            engine.generate(PROMPT, 1)
        sync.push("three")
        assert engine.receivers[0].dirty() is None
        assert engine.generate(PROMPT, 1)


def test_a_restarted_engine_has_no_adapter_until_it_catches_up() -> None:
    model, engine = policy(), MemoryEngine(base())
    with WeightSync(Adapter(model), [engine]) as sync:
        sync.push("one")
        before = engine.generate(PROMPT, 8, adapter=1)
        engine.dead = True
        sync.status()
        restarted = engine.restart(base())
        with pytest.raises(KeyError):
            restarted.generate(PROMPT, 8, adapter=1)
        sync.catch_up(restarted)
        assert restarted.generate(PROMPT, 8, adapter=1) == before


def test_model_and_adapters_have_versions_of_their_own() -> None:
    """A trainer of one does not take a push of the other for one of a rival."""
    engine, model = MemoryEngine(base()), policy()
    with (
        WeightSync(base(), [engine]) as weights,
        WeightSync(Adapter(model), [engine]) as first,
        WeightSync(Adapter(model, number=2), [engine]) as second,
    ):
        for round_ in ("a", "b"):
            for sync, name in ((weights, "weights"), (first, "first"), (second, "second")):
                sync.push(f"{name}-{round_}")
        states = [sync.status()[0].version for sync in (weights, first, second)]
    assert states == ["weights-b", "first-b", "second-b"]
    assert engine.generate(PROMPT, 8, adapter=2) != engine.generate(PROMPT, 8)


def test_two_trainers_of_one_adapter_are_told_apart() -> None:
    engine = MemoryEngine(base())
    with WeightSync(Adapter(policy()), [engine]) as one, WeightSync(Adapter(policy()), [engine]) as other:
        one.push("one")
        other.push("other")
        with pytest.raises(VersionConflict, match="another trainer"):
            one.push("two")


def test_an_engine_refuses_layers_that_it_does_not_have() -> None:
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    engine = MemoryEngine({name: tensor for name, tensor in base().items() if ".layers.1." not in name})
    with WeightSync(Adapter(model), [engine]) as sync, pytest.raises(PlanError, match=r"layers\.1\.self_attn\.q_proj"):
        sync.push("never")
    assert engine.version is None


def test_engines_without_adapters_say_what_to_do() -> None:
    model = policy()
    with WeightSync(Adapter(model), [TransformersEngine(llama())]) as sync, pytest.raises(PlanError) as failure:
        sync.push("never")
    assert failure.value.next_step == MERGED
    parallel = SimpleNamespace(world_size=2, pipeline_parallel_size=2)
    worker = SimpleNamespace(rank=0, device="cpu", vllm_config=SimpleNamespace(parallel_config=parallel), model_runner=SimpleNamespace())
    with pytest.raises(PlanError, match="serves no LoRA") as failure:
        VllmAdapter(worker, 1)
    assert "enable_lora=True" in str(failure.value)
    worker.model_runner.lora_manager = object()
    with pytest.raises(PlanError, match="pipeline"):
        VllmAdapter(worker, 1)
