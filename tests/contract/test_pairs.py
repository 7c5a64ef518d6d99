"""Pairs that a framework gives once for each push, over every transport that a machine without a GPU has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.toys import Checkpoint, checkpoint

from instep import MemoryEngine, PairSource, WeightSync
from instep.config import TransportName
from instep.errors import ConfigError, PlanError, SourceError, TransportError, VersionConflict
from instep.source.pairs import Pair
from instep.transport.shm.read import ShmReader

WAYS: list[TransportName] = ["shm", "gloo", "http"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, segments: Path) -> Iterator[TransportName]:
    yield request.param
    assert list(segments.iterdir()) == [], "nothing stays in shared memory"


class Gathered:
    """Gives each tensor in the same memory, as a framework that gathers one shard after the other.
    read: how many were asked for."""

    def __init__(self, weights: Checkpoint) -> None:
        self.weights, self.read = weights, 0

    def __iter__(self) -> Iterator[Pair]:
        room = torch.empty(max(value.numel() for value in self.weights.values()), dtype=torch.bfloat16)
        for name, value in self.weights.items():
            self.read += 1
            yield name, room[: value.numel()].view(value.shape).copy_(value)
        room.fill_(7)


def test_tensors_that_share_one_buffer_arrive_bit_for_bit(way: TransportName) -> None:
    engine = MemoryEngine(checkpoint(0))
    with WeightSync(PairSource(), [engine], transport=way) as sync:
        for step in range(1, 4):
            pairs = Gathered(checkpoint(step))
            assert sync.push(f"v{step}", pairs=pairs).transport == way
            assert pairs.read == len(pairs.weights), "each pair is asked for once"
            assert engine.fingerprint() == MemoryEngine(checkpoint(step)).fingerprint()


def test_tensors_that_stay_are_not_held(way: TransportName) -> None:
    engine, weights = MemoryEngine(checkpoint(0)), checkpoint(1)
    with WeightSync(PairSource(stable=True), [engine], transport=way) as sync:
        for step in range(3):
            weights["model.norm.weight"].fill_(step)
            sync.push(f"v{step}", pairs=iter(weights.items()))
            assert engine.fingerprint() == MemoryEngine(weights).fingerprint()


def test_an_engine_that_was_replaced_gets_a_streamed_round(way: TransportName) -> None:
    engine = MemoryEngine(checkpoint(0))
    with WeightSync(PairSource(), [engine], transport=way) as sync:
        sync.push("v1", pairs=Gathered(checkpoint(1)))
        new = MemoryEngine(checkpoint(0))
        engine.hosts, engine.receivers = new.hosts, new.receivers  # restarted: it serves what it was started with
        sync.push("v2", pairs=Gathered(checkpoint(2)))
    assert engine.fingerprint() == MemoryEngine(checkpoint(2)).fingerprint()


def another(weights: Checkpoint) -> dict[str, tuple[Checkpoint, str]]:
    """Rounds that differ from one of `weights`, and what an error says of each."""
    norm = "model.norm.weight"
    return {
        "order": (dict(reversed(weights.items())), r"lm_head\.weight came where model\.embed_tokens\.weight was"),
        "shape": ({**weights, norm: torch.ones(9)}, r"model\.norm\.weight is bfloat16 \[9\] now, and was bfloat16 \[8\]"),
        "fewer": ({name: value for name, value in weights.items() if name != norm}, r"came where model\.norm\.weight was"),
        "last": (dict(list(weights.items())[:-1]), r"nothing came where lm_head\.weight was"),
        "more": ({**weights, "more.weight": torch.ones(2)}, r"more\.weight came after the last one"),
    }


@pytest.mark.parametrize("kind", another(checkpoint()))
def test_a_streamed_round_that_differs_is_refused_and_the_next_one_held(way: TransportName, kind: str) -> None:
    engine, (weights, message) = MemoryEngine(checkpoint(0)), another(checkpoint(2))[kind]
    with WeightSync(PairSource(), [engine], transport=way) as sync:
        sync.push("v1", pairs=Gathered(checkpoint(1)))
        wrong = Gathered(weights)
        with pytest.raises(SourceError, match=message) as caught:
            sync.push("v2", pairs=wrong)
        assert wrong.read == len(weights), "other ranks gather to the end"
        assert "the next round is read whole" in str(caught.value)
        assert sync.status()[0].version == "v1"
        if kind == "order":  # another list, which the engine takes
            sync.push("v3", pairs=Gathered(weights))
            assert engine.fingerprint() == MemoryEngine(checkpoint(2)).fingerprint()
        sync.push("v4", pairs=Gathered(checkpoint(4)) if kind != "order" else Gathered(dict(reversed(checkpoint(4).items()))))
    assert engine.fingerprint() == MemoryEngine(checkpoint(4)).fingerprint()


def test_a_tied_head_that_comes_as_a_copy_is_tied(way: TransportName) -> None:
    """The engine ties its head; the pairs bring it twice and do not say so."""
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    engine = MemoryEngine(checkpoint(0, tied=True))

    def pairs(step: int) -> Checkpoint:
        weights = checkpoint(step, tied=True)
        return {**weights, head: weights[embed].clone()}

    def served(step: int) -> bool:
        return engine.fingerprint() == MemoryEngine(checkpoint(step, tied=True)).fingerprint()

    with WeightSync(PairSource(), [engine], transport=way) as sync:
        for step in (1, 2):
            sync.push(f"v{step}", pairs=Gathered(pairs(step)))
            assert served(step)
        apart = {**pairs(3), head: torch.ones(20, 8, dtype=torch.bfloat16)}
        with pytest.raises(SourceError, match=r"lm_head\.weight is not model\.embed_tokens\.weight any more"):
            sync.push("v3", pairs=Gathered(apart))
        assert served(2)
        with pytest.raises(PlanError):
            sync.push("v4", pairs=Gathered(apart))
        assert served(2)


def test_norms_that_begin_alike_may_part(way: TransportName) -> None:
    engine = MemoryEngine(checkpoint(0))
    alike = {name: torch.ones_like(value) if "norm" in name else value for name, value in checkpoint(1).items()}
    with WeightSync(PairSource(), [engine], transport=way) as sync:
        sync.push("v1", pairs=Gathered(alike))
        sync.push("v2", pairs=Gathered(checkpoint(2)))
    assert engine.fingerprint() == MemoryEngine(checkpoint(2)).fingerprint()


def test_zeros_of_either_sign_are_not_one_tensor(segments: Path) -> None:
    weights = {"one.weight": torch.zeros(2, 3), "other.weight": -torch.zeros(2, 3)}
    engine = MemoryEngine({name: torch.ones(2, 3) for name in weights})
    with WeightSync(PairSource(), [engine]) as sync:
        sync.push("v1", pairs=iter(weights.items()))
    assert engine.fingerprint() == MemoryEngine(weights).fingerprint()


def test_an_iterator_that_fails_half_way_leaves_the_old_version(way: TransportName) -> None:
    def broken() -> Iterator[Pair]:
        yield next(iter(checkpoint(2).items()))
        raise ConnectionError("a rank has died")

    engine = MemoryEngine(checkpoint(0))
    with WeightSync(PairSource(), [engine], transport=way) as sync:
        for step in range(2):  # held, then streamed
            with pytest.raises(SourceError, match="a rank has died"):
                sync.push("broken", pairs=broken())
            sync.push(f"v{step}", pairs=Gathered(checkpoint(step)))
            assert engine.fingerprint() == MemoryEngine(checkpoint(step)).fingerprint()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_refused_push_reads_the_pairs_to_the_end(segments: Path, asynchronous: bool) -> None:
    """Other ranks of the trainer gather each tensor with this one."""

    def push(sync: WeightSync, version: str, pairs: Gathered, base: str | None = None) -> None:
        if asynchronous:
            asyncio.run(_apush(sync, version, pairs, base))
        else:
            sync.push(version, base=base, pairs=pairs)

    with WeightSync(PairSource(), [MemoryEngine(checkpoint(0))]) as sync:
        push(sync, "v1", Gathered(checkpoint(1)))
        for version, base, weights, error in (
            ("", None, checkpoint(2), ConfigError),
            ("v1", None, checkpoint(2), VersionConflict),
            ("v2", "v0", checkpoint(2), VersionConflict),
        ):
            pairs = Gathered(weights)
            with pytest.raises(error):
                push(sync, version, pairs, base)
            assert pairs.read == len(weights)
    pairs = Gathered(checkpoint(1))
    with WeightSync(PairSource(), [MemoryEngine({"other.weight": torch.ones(2)})]) as sync, pytest.raises(PlanError):
        push(sync, "v1", pairs)
    assert pairs.read == len(pairs.weights)
    pairs = Gathered(checkpoint(1))
    with WeightSync(checkpoint(1), [MemoryEngine(checkpoint(0))]) as sync, pytest.raises(ConfigError, match="pairs are for a PairSource"):
        push(sync, "v1", pairs)
    assert pairs.read == len(pairs.weights)


async def _apush(sync: WeightSync, version: str, pairs: Gathered, base: str | None) -> None:
    await sync.apush(version, base=base, pairs=pairs)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "the pairs are empty"),
        (["model.norm.weight"], "gave str, not"),
        ([("model.norm.weight", [1.0])], "gave tuple, not"),
        ([("model.norm.weight", torch.ones(8))] * 2, "gave model.norm.weight twice"),
        ([("model.norm.weight", torch.ones(8, device="meta"))], "on the meta device"),
    ],
)
def test_what_is_no_pair_of_a_name_and_a_tensor_is_refused(segments: Path, pairs: list[Pair], message: str) -> None:
    with WeightSync(PairSource(), [MemoryEngine(checkpoint(0))]) as sync, pytest.raises(SourceError, match=message):
        sync.push("v1", pairs=pairs)


def test_a_pair_source_needs_pairs(segments: Path) -> None:
    with WeightSync(PairSource(), [MemoryEngine(checkpoint(0))]) as sync, pytest.raises(ConfigError, match="pairs=iterator"):
        sync.push("v1")


def test_a_version_that_was_streamed_reaches_a_late_engine(segments: Path) -> None:
    late = MemoryEngine(checkpoint(0))
    with WeightSync(PairSource(), [MemoryEngine(checkpoint(0))], transport="shm") as sync:
        for step in (1, 2):
            sync.push(f"v{step}", pairs=Gathered(checkpoint(step)))
        sync.catch_up(late)
    assert late.fingerprint() == MemoryEngine(checkpoint(2)).fingerprint()


def test_nothing_is_held_between_pushes(segments: Path) -> None:
    source = PairSource()
    with WeightSync(source, [MemoryEngine(checkpoint(0))], transport="shm") as sync:
        for step in (1, 2):
            with pytest.raises(SourceError, match="read already"):
                next(source.tensors())
            sync.push(f"v{step}", pairs=Gathered(checkpoint(step)))
            assert source.once


def test_the_first_round_goes_on_to_the_next_transport(segments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that cannot open shared memory gets the pairs another way, and they are not asked for twice."""

    def refuse(*_: object) -> None:
        raise TransportError("no shared memory here")

    monkeypatch.setattr(ShmReader, "__init__", refuse)
    engine, pairs = MemoryEngine(checkpoint(0)), Gathered(checkpoint(1))
    with WeightSync(PairSource(), [engine]) as sync:
        receipt = sync.push("v1", pairs=pairs)
    assert receipt.transport != "shm"
    assert pairs.read == len(pairs.weights)
    assert engine.fingerprint() == MemoryEngine(checkpoint(1)).fingerprint()


def test_a_streamed_round_that_needs_another_transport_says_so_and_the_next_one_succeeds(
    segments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise TransportError("no shared memory here")

    engine = MemoryEngine(checkpoint(0))
    with WeightSync(PairSource(), [engine]) as sync:
        sync.push("v1", pairs=Gathered(checkpoint(1)))
        monkeypatch.setattr(ShmReader, "__init__", refuse)
        with pytest.raises(SourceError, match="read already, and a second read is needed"):
            sync.push("v2", pairs=Gathered(checkpoint(2)))
        assert sync.status()[0].version == "v1"
        assert sync.push("v3", pairs=Gathered(checkpoint(3))).transport != "shm"
    assert engine.fingerprint() == MemoryEngine(checkpoint(3)).fingerprint()
