"""Rounds: tensors come one by one and are committed as a whole, by all workers of an engine or by none."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.call_by_call import fill, serves, weights
from helpers.toys import Checkpoint, ToyHost, attention
from torch.distributed import HashStore  # type: ignore[attr-defined]

from instep.dropin.rounds import Rounds
from instep.engine.memory import MemoryEngine
from instep.engine.vllm.peers import Peers
from instep.errors import ApplyError, DigestMismatch, InstepError, PlanError, TransportError
from instep.receiver.state import Receiver


@pytest.fixture
def rounds(host: ToyHost) -> Rounds:
    return alone(host)


def alone(host: ToyHost, **how: bool) -> Rounds:
    return Rounds(Receiver(host), Peers(0, 1, None, 5), **{"cast": False, **how})


def send(rounds: Rounds, tensors: Checkpoint, last: bool | None = False) -> list[Any]:
    return [rounds.add(name, tensor.clone, last=last) for name, tensor in tensors.items()]


def test_nothing_changes_before_the_end(rounds: Rounds, host: ToyHost) -> None:
    send(rounds, weights(1.0))
    assert serves(host, 0.0)
    rounds.finish("one")
    assert serves(host, 1.0)
    assert rounds.receiver.version == "one"
    send(rounds, weights(2.0))
    rounds.finish()
    assert serves(host, 2.0)


def test_an_incomplete_round_is_refused_with_what_it_lacks_and_the_next_one_works(rounds: Rounds, host: ToyHost) -> None:
    rounds.add("a.weight", weights(1.0)["a.weight"].clone)
    with pytest.raises(PlanError, match=r"incomplete, b\.weight did not come"):
        rounds.finish()
    assert serves(host, 0.0)
    send(rounds, weights(2.0))
    rounds.finish()
    assert serves(host, 2.0)
    rounds.add("b.weight", weights(3.0)["b.weight"].clone)
    with pytest.raises(PlanError, match=r"incomplete, a\.weight did not come"):
        rounds.finish()
    assert serves(host, 2.0)


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("c.weight", torch.ones(3), "refuses c.weight"),
        ("b.weight", torch.ones(4), "refuses b.weight"),
        ("b.weight", torch.ones(3, dtype=torch.float64), "would be rounded"),
    ],
)
def test_what_does_not_fit_is_refused(rounds: Rounds, host: ToyHost, name: str, tensor: torch.Tensor, text: str) -> None:
    send(rounds, {**weights(1.0), name: tensor})
    with pytest.raises(PlanError, match=text):
        rounds.finish()
    assert serves(host, 0.0)


def test_tensors_are_rounded_where_that_is_asked_for(host: ToyHost) -> None:
    rounds = alone(host, cast=True)
    for _ in range(2):
        send(rounds, {name: tensor.double() for name, tensor in weights(1.5).items()})
        rounds.finish()
    assert serves(host, 1.5)


def test_other_bytes_than_were_sent_are_refused(rounds: Rounds, host: ToyHost) -> None:
    with pytest.raises(DigestMismatch, match=r"a\.weight"):
        rounds.add("a.weight", weights(1.0)["a.weight"].clone, digest=7)
    with pytest.raises(DigestMismatch):
        rounds.add("b.weight", weights(1.0)["b.weight"].clone)
    with pytest.raises(DigestMismatch):
        rounds.finish()
    send(rounds, weights(2.0))
    rounds.finish()
    assert serves(host, 2.0)


def test_a_tensor_that_cannot_be_received_ends_the_round(rounds: Rounds, host: ToyHost) -> None:
    def lost() -> torch.Tensor:
        raise TransportError("the trainer is gone")

    rounds.add("a.weight", weights(1.0)["a.weight"].clone)
    with pytest.raises(TransportError, match="gone"):
        rounds.add("b.weight", lost)
    with pytest.raises(TransportError, match="gone"):
        rounds.finish()
    assert serves(host, 0.0)


def test_a_commit_that_fails_half_way_is_dirty_until_a_round_succeeds(rounds: Rounds, host: ToyHost) -> None:
    def broken(model: Any, name: str, tensor: torch.Tensor) -> None:
        if name == "b.weight" and not tensor.is_meta:
            raise RuntimeError("told to fail")
        fill(model, name, tensor)

    host.fill = broken
    send(rounds, weights(1.0))
    with pytest.raises(ApplyError, match="told to fail"):
        rounds.finish()
    assert "told to fail" in (rounds.together.dirty() or "")
    host.fill = fill
    send(rounds, weights(2.0))
    rounds.finish()
    assert rounds.together.dirty() is None
    assert serves(host, 2.0)


class TestRoundsThatEndByThemselves:
    def test_they_end_with_the_last_tensor(self, rounds: Rounds, host: ToyHost) -> None:
        for value in (1.0, 2.0):
            receipts = [rounds.add(name, tensor.clone, last=None) for name, tensor in weights(value).items()]
            assert receipts[0] is None
            assert receipts[1] is not None
            assert serves(host, value)

    def test_in_another_order_they_end_with_the_next_name_or_request(self, rounds: Rounds, host: ToyHost) -> None:
        """`b` could have come alone, before an update of all that has only begun."""
        send(rounds, weights(1.0), last=None)
        send(rounds, dict(reversed(weights(2.0).items())), last=None)
        assert serves(host, 1.0)
        rounds.settle()
        assert serves(host, 2.0)
        for value in (3.0, 4.0):
            send(rounds, dict(reversed(weights(value).items())), last=None)
            assert serves(host, value)

    def test_a_name_that_comes_again_begins_the_next_round_and_says_so_once(self, rounds: Rounds, host: ToyHost) -> None:
        rounds.add("a.weight", weights(1.0)["a.weight"].clone, last=None)
        with pytest.raises(PlanError, match=r"a second time .* b.weight did not come"):
            rounds.add("a.weight", weights(2.0)["a.weight"].clone, last=None)
        send(rounds, weights(3.0), last=None)  # by a trainer that begins once more from the first
        assert serves(host, 3.0)
        rounds.add("a.weight", weights(4.0)["a.weight"].clone, last=None)
        rounds.settle()  # more is to come
        with pytest.raises(PlanError, match=r"b\.weight did not come"):
            rounds.add("a.weight", weights(5.0)["a.weight"].clone, last=None)
        rounds.add("b.weight", weights(5.0)["b.weight"].clone, last=None)  # by one that goes on
        assert serves(host, 5.0)

    def test_a_tied_head_that_comes_after_the_end_belongs_to_the_round(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tensors = attention(1)
        engine = MemoryEngine(tensors)
        rounds = Rounds(Receiver(engine.hosts[0]), Peers(0, 1, None, 5), cast=False)
        monkeypatch.setattr(engine.hosts[0], "load", skipping(engine.hosts[0].load))
        new = attention(2)
        for version in (new, attention(3)):
            send(rounds, {**version, "lm_head.weight": version["model.embed_tokens.weight"]}, last=None)
            assert engine.fingerprint() == MemoryEngine(version).fingerprint()
        assert rounds.receiver.version == "round-3"  # a number went to the tensor that came late

    def test_a_tensor_without_a_place_is_named(self, rounds: Rounds, host: ToyHost) -> None:
        with pytest.raises(PlanError, match=r"c\.weight"):
            send(rounds, {"c.weight": torch.ones(3), **weights(1.0)}, last=None)
        assert serves(host, 0.0)


def skipping(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """A loader that drops the head of a tied model, as vLLM's do."""
    return lambda tensors: load((name, tensor) for name, tensor in tensors if not name.startswith("lm_head"))


def test_a_tied_head_is_known_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MemoryEngine(attention(1))
    monkeypatch.setattr(engine.hosts[0], "load", skipping(engine.hosts[0].load))
    rounds = Rounds(Receiver(engine.hosts[0]), Peers(0, 1, None, 5), cast=False)
    for seed in (2, 3):
        send(rounds, {"lm_head.weight": attention(seed)["model.embed_tokens.weight"], **attention(seed)})
        rounds.finish()
        assert engine.fingerprint() == MemoryEngine(attention(seed)).fingerprint()
    send(rounds, {"lm_head.weight": attention(5)["model.embed_tokens.weight"], **attention(4)})
    with pytest.raises(PlanError, match=r"no place for lm_head.weight"):
        rounds.finish()


class TestTwoWorkers:
    @pytest.fixture
    def engine(self) -> MemoryEngine:
        return MemoryEngine(attention(1), tp=2)

    @pytest.fixture
    def pair(self, engine: MemoryEngine) -> list[Rounds]:
        return workers(engine)

    def test_they_commit_together(self, engine: MemoryEngine, pair: list[Rounds]) -> None:
        for seed in (2, 3):
            both(pair, lambda rounds, seed=seed: send(rounds, attention(seed)))
            both(pair, Rounds.finish)
            assert engine.fingerprint() == MemoryEngine(attention(seed), tp=2).fingerprint()

    def test_they_see_the_end_together(self, engine: MemoryEngine) -> None:
        pair = workers(engine)
        for seed in (2, 3):
            both(pair, lambda rounds, seed=seed: send(rounds, attention(seed), last=None))
            assert engine.fingerprint() == MemoryEngine(attention(seed), tp=2).fingerprint()

    def test_a_tensor_that_only_one_can_tell_is_wrong_is_refused_by_both(self, engine: MemoryEngine, pair: list[Rounds]) -> None:
        """Twice the rows: the slices of both workers exist, and half of the tensor is read by nobody."""
        tensors = attention(2)
        tensors["model.norm.weight"] = torch.cat([tensors["model.norm.weight"]] * 2)
        both(pair, lambda rounds: send(rounds, tensors))
        assert all("model.norm.weight" in str(error) for error in both(pair, Rounds.finish, fails=PlanError))
        assert engine.fingerprint() == MemoryEngine(attention(1), tp=2).fingerprint()

    def test_what_one_did_not_receive_none_commits(self, engine: MemoryEngine, pair: list[Rounds]) -> None:
        send(pair[0], attention(2))
        other = attention(2)
        norm = other.pop("model.norm.weight")
        send(pair[1], other)
        with pytest.raises(DigestMismatch):
            pair[1].add("model.norm.weight", norm.clone, digest=1)
        errors = both(pair, Rounds.finish, fails=InstepError)
        assert "rank 1" in str(errors[0])
        assert engine.fingerprint() == MemoryEngine(attention(1), tp=2).fingerprint()
        both(pair, lambda rounds: send(rounds, attention(3)))
        both(pair, Rounds.finish)
        assert engine.fingerprint() == MemoryEngine(attention(3), tp=2).fingerprint()

    def test_a_commit_that_fails_in_one_makes_both_dirty(self, engine: MemoryEngine, pair: list[Rounds]) -> None:
        engine.hosts[1].fail_at = 2
        both(pair, lambda rounds: send(rounds, attention(2)))
        both(pair, Rounds.finish, fails=ApplyError)
        assert all(rounds.together.dirty() for rounds in pair)
        engine.hosts[1].fail_at = None
        both(pair, lambda rounds: send(rounds, attention(3)))
        both(pair, Rounds.finish)
        assert not any(rounds.together.dirty() for rounds in pair)
        assert engine.fingerprint() == MemoryEngine(attention(3), tp=2).fingerprint()

    def test_a_worker_that_does_not_come_ends_the_round_of_the_other(self, engine: MemoryEngine) -> None:
        pair = workers(engine, timeout=0.3)
        both(pair, lambda rounds: send(rounds, attention(2)))
        started = time.monotonic()
        with pytest.raises(TransportError, match="nothing came from rank 1"):
            pair[0].finish()
        assert time.monotonic() - started < 5
        with pytest.raises(InstepError, match="nothing came from rank 1"):  # who comes later does not commit alone
            pair[1].finish()
        assert engine.fingerprint() == MemoryEngine(attention(1), tp=2).fingerprint()
        both(pair, lambda rounds: send(rounds, attention(3)))
        both(pair, Rounds.finish)
        assert engine.fingerprint() == MemoryEngine(attention(3), tp=2).fingerprint()

    def test_what_was_said_does_not_pile_up(self, engine: MemoryEngine) -> None:
        store = HashStore()
        pair = workers(engine, store=store)
        counts = []
        for seed in range(2, 8):
            both(pair, lambda rounds, seed=seed: send(rounds, attention(seed)))
            both(pair, Rounds.finish)
            counts.append(store.num_keys())
        assert counts[-1] <= counts[2]


def workers(engine: MemoryEngine, *, timeout: float = 10, store: Any = None) -> list[Rounds]:
    store = store or HashStore()
    return [Rounds(Receiver(host), Peers(host.rank, 2, store, timeout), cast=False) for host in engine.hosts]


def both(pair: list[Rounds], action: Callable[..., Any], fails: type[Exception] | None = None) -> list[Any]:
    """At the same time, as an engine tells its workers."""

    def one(rounds: Rounds) -> Any:
        if fails is None:
            return action(rounds)
        with pytest.raises(fails) as failure:
            action(rounds)
        return failure.value

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, pair, timeout=60))
