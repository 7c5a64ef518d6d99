"""Pushes over CUDA IPC, with memory of this process in the place of a card's (see `pretend_cuda.py`): what is read, written and told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.pretend_cuda import Table, pretend
from helpers.toys import Checkpoint, ToyHost, bits, checkpoint
from torch import nn

from instep import MemoryEngine, WeightSync
from instep.errors import ApplyError, DigestMismatch, SourceError
from instep.receipt import Receipt
from instep.receiver.pull import Puller
from instep.receiver.state import Receiver
from instep.source.module import MappingSource
from instep.transport.ipc import driver
from instep.transport.ipc import read as ipc_reader


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, segments: Any) -> None:
    pretend(monkeypatch)


class ToyEngine:
    """One worker whose loader is one function."""

    name = "toy"

    def __init__(self, host: ToyHost) -> None:
        self.host, self.receiver = host, Receiver(host)
        self.refused: str | None = None

    async def call(self, method: Any, payload: bytes) -> list[bytes]:
        return [self.receiver.handle(method, payload)]

    async def pause(self, caches: Any) -> None: ...

    async def resume(self) -> None: ...

    async def label(self, version: str) -> None: ...

    async def score(self, token_ids: list[int]) -> list[float]:
        return [0.0 for _ in token_ids[1:]]

    async def refuse(self, reason: str | None) -> None:
        self.refused = reason


def step(weights: Checkpoint) -> None:
    for tensor in weights.values():
        tensor.neg_().sub_(1)


def push(sync: WeightSync, weights: Checkpoint, version: str) -> Receipt:
    step(weights)
    receipt = sync.push(version)
    assert sync._session.current is not None
    assert sync._session.current.manifest.location.transport == "ipc"
    return receipt


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_follows_through_layers_pulled_directly_and_reloaded_ones(tp: int, tied: bool) -> None:
    weights = checkpoint(1, tied=tied)
    engine = MemoryEngine(checkpoint(0, tied=tied), tp=tp)
    with WeightSync(weights, [engine]) as sync:
        for version in "abcd":
            receipt = push(sync, weights, version)
            assert engine.fingerprint() == MemoryEngine(weights, tp=tp).fingerprint()
        assert receipt.engines[0].direct
        assert receipt.engines[0].read_back == receipt.tensors


class Layers(nn.Module):
    """Rows 0 to 1 of the checkpoint's `w` in `a`, the others in `b`."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.a, self.b = nn.Module(), nn.Module()
        for layer, rows in ((self.a, 2), (self.b, 3)):
            layer.weight = nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16))


def fill(model: Any, _: str, tensor: torch.Tensor) -> None:
    model.a.weight.copy_(tensor[:2])
    model.b.weight.copy_(tensor[2:])


def holds(model: Any, weights: Checkpoint) -> bool:
    return torch.equal(bits(torch.cat([model.a.weight, model.b.weight])), bits(weights["w"]))


def derive(model: Any) -> None:
    """Something that follows from the weights of `b`: it stays on the reload session."""
    model.b.largest = model.b.weight.max()


COLUMNS = {"whole words": 4, "one route is odd": 2, "both are": 3}


@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_routes_that_are_no_whole_words_bring_no_false_alarm(columns: int) -> None:
    """Of two columns, rows 0 to 1 are one word, and rows 2 to 4 are one and a half."""
    weights = {"w": torch.randn(5, columns).to(torch.bfloat16)}
    engine = ToyEngine(ToyHost(Layers(columns), fill))
    with WeightSync(weights, [engine]) as sync:
        for version in "abc":
            receipt = push(sync, weights, version)
            assert holds(engine.host.model, weights)
        assert receipt.engines[0].direct == ("a", "b")


def test_a_tensor_that_is_pulled_directly_and_reloaded_brings_no_false_alarm() -> None:
    weights = {"w": torch.randn(5, 4).to(torch.bfloat16)}
    engine = ToyEngine(ToyHost(Layers(4), fill, derive))
    with WeightSync(weights, [engine]) as sync:
        for version in "abc":
            receipt = push(sync, weights, version)
            assert holds(engine.host.model, weights)
        assert receipt.engines[0].direct == ("a",)
        assert "b" in receipt.engines[0].reload


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[int, int]]:
    """How many tables were made and how many addresses looked up since it was last asked."""
    look_up, looked_up = driver.allocation, []
    monkeypatch.setattr(driver, "allocation", lambda address: looked_up.append(address) or look_up(address))
    monkeypatch.setattr(Table, "made", 0)

    def since() -> tuple[int, int]:
        made, Table.made = Table.made, 0
        found = len(looked_up)
        looked_up.clear()
        return made, found

    return since


def test_a_push_of_tensors_that_stay_lays_nothing_out_anew(counted: Callable[[], tuple[int, int]]) -> None:
    weights = {"w": torch.randn(5, 4).to(torch.bfloat16)}
    engine = ToyEngine(ToyHost(Layers(4), fill))
    with WeightSync(weights, [engine]) as sync:
        push(sync, weights, "a")
        assert counted()[1] == 2  # of the tensor and of the board
        push(sync, weights, "b")
        assert counted() == (1, 0)  # to pull into the layers that are direct from now on
        for version in "cd":
            push(sync, weights, version)
            assert counted() == (0, 0)
            assert holds(engine.host.model, weights)


def test_kernels_are_ready_before_an_engine_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compile them takes most of a second."""
    events: list[str] = []
    monkeypatch.setattr(ipc_reader, "warm_up", lambda device: events.append("ready"))

    class Engine(ToyEngine):
        async def pause(self, caches: Any) -> None:
            events.append("paused")

    weights = {"w": torch.randn(5, 4).to(torch.bfloat16)}
    with WeightSync(weights, [Engine(ToyHost(Layers(4), fill))]) as sync:
        push(sync, weights, "a")
        push(sync, weights, "b")
    assert events == ["ready", "paused", "paused"]


def test_tensors_that_have_moved_within_their_allocation_are_found_there() -> None:
    both = torch.zeros(2, 5, 4, dtype=torch.bfloat16)
    weights = {"w": both[0]}
    engine = ToyEngine(ToyHost(Layers(4), fill))
    with WeightSync(weights, [engine]) as sync:
        for index, version in enumerate("abcdef"):
            weights["w"] = both[index // 2 % 2]
            push(sync, weights, version)
            assert holds(engine.host.model, weights)


@pytest.mark.parametrize("kind", ["strided", "cast", "no whole words"])
def test_tensors_that_cannot_be_shared_as_they_are_are_copied_in_every_push(kind: str) -> None:
    columns, rows = (3, 5) if kind == "no whole words" else (4, 5)
    tensor = torch.randn(rows, columns)
    tensor = tensor if kind == "cast" else tensor.to(torch.bfloat16)
    weights = {"w": tensor.t().contiguous().t() if kind == "strided" else tensor}
    engine = ToyEngine(ToyHost(Layers(columns), fill))
    with WeightSync(weights, [engine], cast=kind == "cast") as sync:
        for version in "abcd":
            push(sync, weights, version)
            assert holds(engine.host.model, {"w": weights["w"].to(torch.bfloat16)})


def test_engine_parameters_that_have_moved_are_written_where_they_are() -> None:
    weights = {"w": torch.randn(5, 4).to(torch.bfloat16)}
    engine = ToyEngine(ToyHost(Layers(4), fill))
    model: Any = engine.host.model
    with WeightSync(weights, [engine]) as sync:
        for version, move in (("a", None), ("b", None), ("c", "data"), ("d", "parameter"), ("e", "module")):
            if move == "data":
                model.a.weight.data = model.a.weight.data.clone()
            elif move == "parameter":
                model.a.weight = nn.Parameter(model.a.weight.clone())
            elif move == "module":
                model.a = Layers(4).a
            push(sync, weights, version)
            assert holds(model, weights)


def test_a_reload_that_moves_what_was_pulled_already_is_found_out() -> None:
    weights = {"w": torch.randn(5, 4).to(torch.bfloat16)}

    def finish(model: Any) -> None:
        derive(model)
        if moving:
            model.a.weight = nn.Parameter(torch.zeros(2, 4, dtype=torch.bfloat16))

    moving = False
    engine = ToyEngine(ToyHost(Layers(4), fill, finish))
    with WeightSync(weights, [engine]) as sync:
        push(sync, weights, "a")
        moving = True
        with pytest.raises(ApplyError, match="moved weights that had been pulled"):
            push(sync, weights, "b")
        assert engine.refused is not None
        moving = False
        push(sync, weights, "c")
        assert holds(engine.host.model, weights)
        assert engine.refused is None


@pytest.mark.parametrize("reload", [False, True], ids=["direct", "reload"])
def test_bytes_that_change_on_the_way_are_found_out(monkeypatch: pytest.MonkeyPatch, reload: bool) -> None:
    weights = {"w": torch.randn(5, 4).to(torch.bfloat16)}
    engine = ToyEngine(ToyHost(Layers(4), fill, derive if reload else lambda _: None))
    with WeightSync(weights, [engine]) as sync:
        push(sync, weights, "a")
        sound = Table.launch

        def launch(self: Table, *, clear: bool = True) -> None:
            sound(self, clear=clear)
            self.sums[0] += self.copy

        monkeypatch.setattr(Table, "launch", launch)
        with pytest.raises(DigestMismatch, match="w"):
            push(sync, weights, "b")
        assert engine.refused is not None


def test_a_worker_alone_compares_the_sums_of_all_tensors_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names none of them, unless they differ."""
    weights = {f"layers.{layer}.{part}_proj.weight": torch.randn(4, 8) for layer in range(2) for part in ("gate", "up", "down")}
    engine = MemoryEngine({name: torch.zeros_like(weight) for name, weight in weights.items()})
    with WeightSync(weights, [engine]) as sync:
        for version in "ab":
            push(sync, weights, version)
        sums = Puller.sums
        monkeypatch.setattr(Puller, "sums", lambda self: pytest.fail("each tensor was looked at"))
        receipt = push(sync, weights, "c")
        assert receipt.engines[0].read_back == receipt.tensors
        assert engine.fingerprint() == MemoryEngine(weights).fingerprint()
        asked: list[int] = []
        monkeypatch.setattr(Puller, "sums", lambda self: asked.append(1) or sums(self))
        monkeypatch.setattr(Puller, "proves", lambda *_: False)
        push(sync, weights, "d")
        assert asked
        assert engine.fingerprint() == MemoryEngine(weights).fingerprint()


def test_numbers_that_are_not_finite_are_named() -> None:
    weights = {"w": torch.randn(5, 4).to(torch.bfloat16)}
    weights["w"][3, 2] = float("nan")
    with WeightSync(weights, [ToyEngine(ToyHost(Layers(4), fill))]) as sync:
        assert sync.push("a").non_finite == ("w",)


def test_a_source_that_gives_a_tensor_twice_is_refused() -> None:
    class Twice(MappingSource):
        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from super().tensors()
            yield from super().tensors()

    engine = ToyEngine(ToyHost(Layers(4), fill))
    with WeightSync(Twice({"w": torch.randn(5, 4).to(torch.bfloat16)}), [engine]) as sync, pytest.raises(SourceError, match="w twice"):
        sync.push("a")
