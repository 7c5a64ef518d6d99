"""What verl, OpenRLHF and SkyRL send to a vLLM's workers is committed as a whole. Their own code, with a real vLLM, is in `tests/doors`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.rlhf_workers import Bare, Engine
from helpers.toys import attention

from instep.dropin.staged import StagedModel
from instep.errors import ConfigError, TransportError
from instep.integrations import EXTENSIONS, openrlhf, skyrl, verl

Pairs = list[tuple[str, torch.Tensor]]
Send = Callable[[Pairs], None]
SIZES = pytest.mark.parametrize("size", [1, 2], ids=["one worker", "two workers"])
NORM = "model.norm.weight"


class VerlWorker(Bare, verl.Updates): ...


class OpenRlhfWorker(Bare, openrlhf.WorkerWrap): ...


class SkyRlWorker(Bare, skyrl.Updates):
    model_runner = SimpleNamespace(drafter=None)


class Buckets:
    """verl's receiver of buckets: each lies in one buffer, which is written to again."""

    def __init__(self) -> None:
        self.pairs: Pairs = []
        self.served = 0

    def __call__(self, worker: Any, bucket: Callable[[Pairs, bool], None], use_shm: bool) -> None:
        for name, tensor in self.pairs:
            buffer = tensor.clone()
            bucket([(name, buffer)], name == self.pairs[-1][0])
            buffer.fill_(float("nan"))
            self.served += 1


class Stock:
    """SkyRL's receiver. It loads into the model that it finds."""

    weights: Pairs = []  # noqa: RUF012
    broken = False

    def update_weights_nccl(self, update_info: dict[str, Any]) -> None:
        model: StagedModel = self.model_runner.model  # type: ignore[attr-defined]
        assert self.rank in (0, 1)  # type: ignore[attr-defined]
        model.load_weights(weights=[pair for pair in Stock.weights if pair[0] in update_info["names"]])
        if Stock.broken:
            raise OSError("the group has ended")


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> Buckets:
    made = Buckets()
    monkeypatch.setattr(verl, "_receive", made)
    monkeypatch.setattr(verl, "_unfit", lambda worker: None)
    return made


def by_verl(engine: Engine, buckets: Buckets) -> Send:
    def send(pairs: Pairs) -> None:
        buckets.pairs = pairs
        engine.call("update_weights_from_ipc")

    return send


def by_openrlhf(engine: Engine) -> Send:
    """Each call of a broadcast, with the group in which the tensor comes."""

    def send(pairs: Pairs) -> None:
        for number, (name, tensor) in enumerate(pairs, 1):
            group = SimpleNamespace(broadcast=lambda room, src, stream, sent=tensor: room.copy_(sent))
            for worker in engine.workers:
                vars(worker)["_model_update_group"] = group
            engine.call("update_weight", name, tensor.dtype, tuple(tensor.shape), number == len(pairs))

    return send


def by_skyrl(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Send:
    monkeypatch.setattr(skyrl, "_stock", lambda: Stock)

    def send(pairs: Pairs) -> None:
        monkeypatch.setattr(Stock, "weights", pairs)
        engine.call("skyrl_start_weight_update")
        half = len(pairs) // 2
        for chunk in (pairs[:half], pairs[half:]):
            engine.call("update_weights_nccl", {"names": [name for name, _ in chunk]})
        engine.call("skyrl_finish_weight_update")

    return send


@pytest.fixture(params=["verl", "openrlhf", "skyrl"])
def made(request: pytest.FixtureRequest, buckets: Buckets, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[Engine, Send]]:
    def make(size: int) -> tuple[Engine, Send]:
        engine = Engine(size, {"verl": VerlWorker, "openrlhf": OpenRlhfWorker, "skyrl": SkyRlWorker}[request.param])
        ways = {"verl": lambda: by_verl(engine, buckets), "skyrl": lambda: by_skyrl(engine, monkeypatch)}
        return engine, ways.get(request.param, lambda: by_openrlhf(engine))()

    return make


@SIZES
def test_updates_are_committed_one_after_the_other(made: Callable[[int], tuple[Engine, Send]], size: int) -> None:
    engine, send = made(size)
    for seed in (2, 3, 4):
        send(list(attention(seed).items()))
        assert engine.serves(seed)


@SIZES
def test_an_incomplete_update_is_heard_of_and_changes_nothing(made: Callable[[int], tuple[Engine, Send]], size: int) -> None:
    engine, send = made(size)
    send(list(attention(2).items()))
    with pytest.raises(RuntimeError, match=rf"incomplete, {NORM} did not come"):
        send([pair for pair in attention(3).items() if pair[0] != NORM])
    assert engine.serves(2)
    send(list(attention(4).items()))
    assert engine.serves(4)


@SIZES
def test_weights_are_rounded_to_what_the_engine_stores(made: Callable[[int], tuple[Engine, Send]], size: int) -> None:
    engine, send = made(size)
    send([(name, tensor.double()) for name, tensor in attention(2).items()])
    assert engine.serves(2)


def update(engine: Engine, pairs: Iterable[Any], buckets: Buckets, match: str) -> None:
    buckets.pairs, buckets.served = list(pairs), 0
    with pytest.raises(RuntimeError, match=match):
        engine.call("update_weights_from_ipc")
    assert buckets.served == len(engine.workers) * len(buckets.pairs), "verl's sender would wait"
    assert engine.serves(1)


class TestVerl:
    @pytest.fixture
    def engine(self, buckets: Buckets) -> Engine:
        return Engine(2, VerlWorker)

    def test_what_does_not_fit_is_taken_to_its_end_and_refused(self, engine: Engine, buckets: Buckets) -> None:
        update(engine, {"surprise": torch.ones(3), **attention(2)}.items(), buckets, "surprise")
        update(engine, [*attention(2).items(), (NORM, torch.ones(16))], buckets, f"{NORM} came twice")
        update(engine, [], buckets, "without any tensor")

    def test_an_engine_that_cannot_be_staged_is_refused_by_name(
        self, engine: Engine, buckets: Buckets, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(verl, "_unfit", lambda worker: ConfigError("instep cannot update a quantised engine in verl"))
        update(engine, attention(2).items(), buckets, "quantised engine")

    def test_a_sender_that_is_gone_changes_nothing(self, engine: Engine, buckets: Buckets, monkeypatch: pytest.MonkeyPatch) -> None:
        def silent(worker: Any, bucket: Callable[[Pairs, bool], None], use_shm: bool) -> None:
            bucket(list(attention(2).items()), False)
            raise TransportError("verl's sender was silent")

        monkeypatch.setattr(verl, "_receive", silent)
        update(engine, [], buckets, "silent")

    def test_an_adapter_goes_verls_own_way(self, buckets: Buckets) -> None:
        taken: list[Any] = []

        class Theirs:
            def update_weights_from_ipc(self, *arguments: Any) -> None:
                taken.append(arguments)

        engine = Engine(2, type("Worker", (VerlWorker, Theirs), {}))
        engine.call("update_weights_from_ipc", {"r": 8}, True, False)
        assert taken == [({"r": 8}, True, False)] * 2
        assert engine.serves(1)


class TestSkyRl:
    @pytest.fixture
    def engine(self, monkeypatch: pytest.MonkeyPatch) -> Engine:
        monkeypatch.setattr(skyrl, "_stock", lambda: Stock)
        return Engine(2, SkyRlWorker)

    def test_a_chunk_that_fails_ends_its_update(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        send = by_skyrl(engine, monkeypatch)
        send(list(attention(2).items()))
        monkeypatch.setattr(Stock, "broken", True)
        with pytest.raises(RuntimeError, match="the group has ended"):
            send(list(attention(3).items()))
        with pytest.raises(RuntimeError, match="no tensor of an update has come"):
            engine.call("skyrl_finish_weight_update")
        assert engine.serves(2)

    def test_what_cannot_be_staged_is_refused_at_the_start(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(RuntimeError, match="kernel format"):
            engine.call("skyrl_start_weight_update", False)
        monkeypatch.setattr(SkyRlWorker, "model_runner", SimpleNamespace(drafter=object()))
        with pytest.raises(RuntimeError, match="draft model"):
            engine.call("skyrl_start_weight_update")


class TestOpenRlhf:
    def test_a_worker_that_is_in_no_group_says_so(self) -> None:
        with pytest.raises(RuntimeError, match="in no group"):
            Engine(2, OpenRlhfWorker).call("update_weight", NORM, torch.float32, (16,))

    def test_a_tensor_is_received_also_where_its_update_is_refused(self) -> None:
        engine, received = Engine(1, OpenRlhfWorker), list[int]()
        group = SimpleNamespace(broadcast=lambda room, src, stream: received.append(room.numel()))
        vars(engine.workers[0])["_model_update_group"] = group
        for _ in range(2):
            with pytest.raises(RuntimeError, match="surprise"):
                engine.call("update_weight", "surprise", torch.float32, (3,), True)
        assert received == [3, 3]


@pytest.mark.parametrize("extension", EXTENSIONS.values())
def test_what_takes_the_place_of_an_extension_is_there(extension: str) -> None:
    module, _, name = extension.rpartition(".")
    found = {one.__name__: one for one in (openrlhf, skyrl, verl)}[module]
    assert hasattr(found, "Updates") if name == "WorkerExtension" else hasattr(found, name)
