"""The drop-in schemes in the hands of the real TorchRL: its base class, and its collectors, which call a scheme by themselves."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.dropin_pairs import LATER, NEW, OLD, holds
from helpers.source_models import qwen3

from instep import MemoryEngine, TransformersEngine
from instep.dropin import torchrl as ours
from instep.errors import ConfigError, PlanError

if importlib.util.find_spec("torchrl") is None:
    pytest.skip("TorchRL is not installed: pip install 'instep[torchrl]'", allow_module_level=True)

from helpers.torchrl_policy import Policy
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import PendulumEnv
from torchrl.weight_update import WeightSyncScheme
from torchrl.weight_update import llm as theirs

pytestmark = [pytest.mark.usefixtures("segments"), pytest.mark.filterwarnings("ignore:state_dict strategy is experimental")]


Collect = Callable[[Any, WeightSyncScheme], Collector]


@pytest.fixture
def collect() -> Iterator[Collect]:
    started: list[Collector] = []

    def begin(engine: Any, scheme: WeightSyncScheme) -> Collector:
        schemes = {"policy": scheme}
        found = Collector(
            PendulumEnv(), Policy(engine), frames_per_batch=2, total_frames=100, weight_sync_schemes=schemes, track_policy_version=True
        )
        started.append(found)
        return found

    yield begin
    for each in started:
        each.shutdown()


def test_the_schemes_are_torchrls_own_kind(tmp_path: Path) -> None:
    assert isinstance(ours.VLLMWeightSyncScheme(), WeightSyncScheme)
    assert isinstance(ours.VLLMDoubleBufferSyncScheme(str(tmp_path)), WeightSyncScheme)
    assert ours.VLLMWeightSyncScheme(strategy="state_dict").strategy.extract_as == "state_dict"


@pytest.mark.parametrize("name", [name for name in ours.__all__ if name != "get_model_metadata"])
def test_whatever_the_original_has_can_be_called_the_same_way(name: str) -> None:
    """Every public method, and every argument of it by its name and in its place."""
    for method, original in vars(getattr(theirs, name)).items():
        if (method.startswith("_") and method != "__init__") or not callable(original):
            continue
        expected = inspect.signature(original).parameters
        found = inspect.signature(getattr(getattr(ours, name), method)).parameters
        positional = [each for each in expected if expected[each].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        assert list(found)[: len(positional)] == positional, method
        open_end = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in found.values())
        assert open_end or expected.keys() <= found.keys(), method
        for each in positional:
            default = expected[each].default  # None: left out, it is as the original does without looking at its own
            assert found[each].default in (default, None) or default is inspect.Parameter.empty, (method, each)


def test_a_collector_updates_the_engine_of_its_policy_and_counts(collect: Collect) -> None:
    """The original raises `NotImplementedError` when the collector is made."""
    engine = MemoryEngine(OLD)
    scheme = ours.VLLMWeightSyncScheme()
    collector = collect(engine, scheme)
    assert (holds(engine), engine.calls) == ("old", [])  # an engine starts with weights of its own
    batches = iter(collector)
    assert next(batches)["policy_version"].tolist() == [0, 0]
    collector.update_policy_weights_(NEW)
    assert (holds(engine), collector.policy_version) == ("new", 1)
    assert next(batches)["policy_version"].tolist()[-1] == 1  # the first of them was begun before
    collector.update_policy_weights_(TensorDict(LATER).unflatten_keys("."))
    assert (holds(engine), collector.policy_version) == ("later", 2)
    scheme.sender.register_model(NEW)
    collector.update_policy_weights_()
    assert (holds(engine), collector.policy_version) == ("new", 3)


def test_a_collectors_update_that_fails_is_not_counted(collect: Collect) -> None:
    engine = MemoryEngine(OLD)
    collector = collect(engine, ours.VLLMWeightSyncScheme())
    with pytest.raises(ConfigError, match="no weights to send"):
        collector.update_policy_weights_()
    with pytest.raises(ConfigError, match="worker_ids"):
        collector.update_policy_weights_(NEW, worker_ids=[0])
    collector.update_policy_weights_(NEW)
    with pytest.raises(PlanError, match="were not announced"):
        collector.update_policy_weights_({"model.norm.weight": torch.ones(8)})
    assert (holds(engine), collector.policy_version) == ("new", 1)


def test_a_collector_that_writes_into_a_directory(collect: Collect, tmp_path: Path) -> None:
    engine = MemoryEngine(OLD)
    scheme = ours.VLLMDoubleBufferSyncScheme(str(tmp_path))
    collector = collect(engine, scheme)
    collector.update_policy_weights_(NEW)
    assert (holds(engine), collector.policy_version) == ("old", 1)
    assert scheme.create_receiver(engine).poll_and_apply()
    assert holds(engine) == "new"


def test_weights_given_when_the_scheme_connects_are_sent(collect: Collect) -> None:
    engine = MemoryEngine(OLD)
    scheme = ours.VLLMWeightSyncScheme()
    collector = collect(engine, scheme)
    scheme.connect(weights=NEW)
    assert holds(engine) == "new"
    assert collector.policy_version == 0


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.parametrize("form", ["module", "tensordict", "state_dict"])
def test_a_module_in_each_of_torchrls_forms(strategy: Any, form: str) -> None:
    """With the metadata that TorchRL takes of it. `TensorDict.from_module` has buffers that no checkpoint has."""
    engine, model = TransformersEngine(model_of(1)), model_of(2)
    announced = theirs.get_model_metadata(model)
    assert set(TensorDict.from_module(model).flatten_keys(".").keys()) > announced.keys()
    sender = ours.VLLMWeightSyncScheme(strategy=strategy).create_sender()
    sender.init_all_workers_group(announced, engine)
    sender.update_weights(
        {"module": lambda: model, "tensordict": lambda: TensorDict.from_module(model), "state_dict": model.state_dict}[form]()
    )
    assert [name for name, param in model.named_parameters() if not torch.equal(param, engine.model.get_parameter(name))] == []


def test_torchrls_policy_wrapper_is_looked_through() -> None:
    from torchrl.modules.llm import TransformersWrapper

    model = model_of(1)
    wrapper = TransformersWrapper(model, pad_output=False, input_mode="tokens", generate=False)
    assert ours.get_model_metadata(wrapper) == ours.get_model_metadata(model)


def model_of(seed: int) -> Any:
    torch.manual_seed(seed)
    return qwen3()


@pytest.mark.parametrize("announce", ["ours", "torchrl's"])
def test_a_recipe_s_adapters_are_merged_beside_its_model(announce: str) -> None:
    """GRPO's recipes register what `TransformersWrapper` holds, which is PEFT's by default."""
    from peft import LoraConfig, get_peft_model
    from torchrl.modules.llm import TransformersWrapper

    torch.manual_seed(3)
    adapted = get_peft_model(model_of(1), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"))
    training = TransformersWrapper(adapted, pad_output=False, input_mode="tokens", generate=False)
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    engine = TransformersEngine(model_of(1))
    sender = ours.VLLMWeightSyncScheme(strategy="state_dict").create_sender()
    sender.register_model(training.model)
    metadata = (ours if announce == "ours" else theirs).get_model_metadata(training.model)
    sender.init_all_workers_group(metadata, vllm_engine=engine)
    sender.update_weights()
    assert all(torch.equal(before[name], tensor) for name, tensor in training.model.state_dict().items())
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert torch.allclose(engine.model(tokens).logits, adapted(tokens).logits, atol=1e-4)
    assert not torch.allclose(engine.model(tokens).logits, model_of(1)(tokens).logits, atol=1e-2)
