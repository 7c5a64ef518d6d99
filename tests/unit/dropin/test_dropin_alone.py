"""Weights that come alone, of a trainer that says of no update where it ends: put with those that the engine serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.toys import ToyHost, attention

from instep.dropin.complete import listed
from instep.dropin.rounds import Rounds
from instep.engine.memory import MemoryEngine
from instep.engine.vllm.peers import Peers
from instep.errors import PlanError
from instep.receiver.state import Receiver
from unit.dropin.test_dropin_rounds import both, send, skipping, workers

NAMES = tuple(attention(1))


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def engine(request: pytest.FixtureRequest) -> MemoryEngine:
    return MemoryEngine(attention(1), tp=request.param)


@pytest.fixture
def told(engine: MemoryEngine) -> Callable[[Callable[..., Any]], list[Any]]:
    """All workers at once."""
    pair = workers(engine) if len(engine.hosts) > 1 else [Rounds(Receiver(engine.hosts[0]), Peers(0, 1, None, 5), cast=False)]
    return lambda action: both(pair, action)


@pytest.mark.parametrize("names", [NAMES[1:2], NAMES[-1:], NAMES[2:5], NAMES[-1:] + NAMES[3:4]], ids=str)
@pytest.mark.parametrize("how", ["a request", "the next update", "finish_update"])
def test_they_are_put_with_the_others(engine: MemoryEngine, told: Any, names: tuple[str, ...], how: str) -> None:
    told(lambda rounds: send(rounds, attention(2), last=None))
    for seed in (3, 4):
        some = {name: attention(seed)[name] for name in names}
        told(lambda rounds, some=some: send(rounds, some, last=None))
        if how == "a request":
            told(Rounds.settle)
        elif how == "finish_update":
            told(Rounds.finish)
        else:
            told(lambda rounds, seed=seed: send(rounds, attention(seed + 3), last=None))
        rest = attention(2) if how != "the next update" else attention(seed + 3)
        fresh = MemoryEngine(rest | (some if how != "the next update" else {}), tp=len(engine.hosts))
        assert engine.fingerprint() == fresh.fingerprint()
        if how == "a request":
            label = f"round-{seed - 1} ({listed(names)} alone)"
            assert set(told(lambda rounds: rounds.receiver.version)) == {label}
    for seed in (8, 9):
        told(lambda rounds, seed=seed: send(rounds, attention(seed), last=None))
        assert engine.fingerprint() == MemoryEngine(attention(seed), tp=len(engine.hosts)).fingerprint()


def test_all_but_a_frozen_one_end_by_themselves_from_the_second_time_on(engine: MemoryEngine, told: Any) -> None:
    told(lambda rounds: send(rounds, attention(2), last=None))
    frozen = {NAMES[0]: attention(2)[NAMES[0]]}
    for seed in (3, 4, 5):
        some = {name: attention(seed)[name] for name in NAMES[1:]}
        told(lambda rounds, some=some: send(rounds, some, last=None))
        if seed == 3:
            told(Rounds.settle)
        assert engine.fingerprint() == MemoryEngine({**attention(seed), **frozen}, tp=len(engine.hosts)).fingerprint()


def test_an_update_of_all_with_a_gap_is_not_some_weights_alone(engine: MemoryEngine, told: Any) -> None:
    told(lambda rounds: send(rounds, attention(2), last=None))
    for gap in (NAMES[2], NAMES[-1]):
        told(lambda rounds, gap=gap: send(rounds, {name: tensor for name, tensor in attention(3).items() if name != gap}, last=None))
        told(Rounds.settle)
        assert engine.fingerprint() == MemoryEngine(attention(2), tp=len(engine.hosts)).fingerprint()
        told(lambda rounds: rounds.begin())


def test_nothing_is_put_with_what_came_another_way(engine: MemoryEngine, told: Any) -> None:
    told(lambda rounds: send(rounds, attention(2), last=None))
    told(lambda rounds: setattr(rounds.receiver, "version", "of another trainer"))
    told(lambda rounds: send(rounds, {NAMES[1]: attention(3)[NAMES[1]]}, last=None))
    told(Rounds.settle)
    assert engine.fingerprint() == MemoryEngine(attention(2), tp=len(engine.hosts)).fingerprint()


def test_what_no_worker_reads_is_left_out(engine: MemoryEngine, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in engine.hosts:
        monkeypatch.setattr(host, "load", skipping(host.load))
    for seed in (2, 3):
        told(lambda rounds, seed=seed: send(rounds, {**attention(seed), "lm_head.inv_freq": torch.rand(7)}, last=None))
        assert engine.fingerprint() == MemoryEngine(attention(seed), tp=len(engine.hosts)).fingerprint()


def heard(rounds: Rounds, tensors: dict[str, torch.Tensor]) -> list[str]:
    """What the trainer's calls raise."""
    found = []
    for name, tensor in tensors.items():
        try:
            rounds.add(name, tensor.clone, last=None)
        except PlanError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("names", [NAMES[:1], NAMES[1:2], NAMES[3:4], NAMES[-1:]], ids=str)
def test_what_comes_alone_before_any_update_of_all_is_never_mixed_with_one(engine: MemoryEngine, told: Any, names: tuple[str, ...]) -> None:
    """The trainer hears of it. Where it is the last of an update that follows, it could be the first of one that begins with it."""
    told(lambda rounds: send(rounds, {name: attention(2)[name] for name in names}, last=None))
    served = attention(1)
    for seed in (3, 4, 5):
        errors = told(lambda rounds, seed=seed: heard(rounds, attention(seed)))
        if names == NAMES[-1:]:
            assert all("call finish_update()" in found[0].lower() for found in errors)
        else:
            served = attention(seed)
            assert [len(found) for found in errors] == [1 if seed == 3 else 0] * len(engine.hosts)
        assert engine.fingerprint() == MemoryEngine(served, tp=len(engine.hosts)).fingerprint()


TURNED = NAMES[-1:] + NAMES[:-1]


def turned(seed: int) -> dict[str, torch.Tensor]:
    """An update that begins with what the engine holds last."""
    return {name: attention(seed)[name] for name in TURNED}


@pytest.mark.parametrize("end", [Rounds.finish, Rounds.settle_alone], ids=["finish_update", "check_weights_changed"])
def test_an_update_that_begins_with_the_last_weight_ends_when_the_trainer_says_so(engine: MemoryEngine, told: Any, end: Any) -> None:
    """Once: later ones end by themselves."""
    for seed in (2, 3, 4):
        assert told(lambda rounds, seed=seed: heard(rounds, turned(seed))) == [[]] * len(engine.hosts)
        if seed == 2:
            told(Rounds.settle)  # a request does not show it
            assert engine.fingerprint() == MemoryEngine(attention(1), tp=len(engine.hosts)).fingerprint()
            told(end)
        assert engine.fingerprint() == MemoryEngine(attention(seed), tp=len(engine.hosts)).fingerprint()


@pytest.mark.parametrize("update", [attention, turned], ids=["behind the last weight alone", "that begins with the last weight"])
@pytest.mark.parametrize("says", [True, False], ids=["the trainer does what the error says", "the trainer goes on"])
def test_the_error_about_an_update_in_doubt_says_what_heals_it(engine: MemoryEngine, told: Any, update: Any, says: bool) -> None:
    if update is attention:
        told(lambda rounds: send(rounds, {NAMES[-1]: attention(2)[NAMES[-1]]}, last=None))
    else:
        told(lambda rounds: send(rounds, update(2), last=None))

    def stops(rounds: Rounds) -> str:
        why = r"cannot be told whether .*v_proj.weight came alone or began the update that followed"
        with pytest.raises(PlanError, match=why) as found:
            send(rounds, update(3), last=None)
        assert "call finish_update()" in (found.value.next_step or "")
        return str(found.value)

    told(stops)
    assert engine.fingerprint() == MemoryEngine(attention(1), tp=len(engine.hosts)).fingerprint()

    def finish(rounds: Rounds, *, fails: bool) -> None:
        if not fails:
            rounds.finish()
            return
        with pytest.raises(PlanError, match="the round is incomplete"):
            rounds.finish()

    for seed in (4, 5, 6) if says else ():
        if seed == 4:
            told(lambda rounds: finish(rounds, fails=True))
        told(lambda rounds, seed=seed: send(rounds, update(seed), last=None))
        if seed == 4:
            told(lambda rounds: finish(rounds, fails=False))
        assert engine.fingerprint() == MemoryEngine(attention(seed), tp=len(engine.hosts)).fingerprint()
    for seed in () if says else (4, 5, 6):  # nothing of two updates is ever served together
        found = told(lambda rounds, seed=seed: heard(rounds, update(seed)))
        assert all(found) == (update is attention or seed > 4)  # an update of which nothing was sent on is begun anew
        assert engine.fingerprint() == MemoryEngine(attention(1), tp=len(engine.hosts)).fingerprint()


def test_an_order_that_was_said_once_is_known(engine: MemoryEngine, told: Any) -> None:
    """An update that begins with what the engine holds last, told by finish_update(): the next ones end by themselves."""
    turned = NAMES[-1:] + NAMES[:-1]
    for seed in (3, 4, 5):
        weights = {name: attention(seed)[name] for name in turned}
        if seed == 3:
            told(lambda rounds, weights=weights: send(rounds, weights, last=False))
            told(Rounds.finish)
        else:
            told(lambda rounds, weights=weights: send(rounds, weights, last=None))
        assert engine.fingerprint() == MemoryEngine(attention(seed), tp=len(engine.hosts)).fingerprint()


@pytest.mark.parametrize("count", [1, 2])
def test_first_weights_are_put_with_some_alone_when_the_caller_knows_that_no_more_comes(
    engine: MemoryEngine, told: Any, count: int
) -> None:
    told(lambda rounds: setattr(rounds, "first", lambda: attention(1).items()))
    weights = attention(1)
    for seed in (3, 4):
        some = {name: attention(seed)[name] for name in NAMES[1 : 1 + count]}
        weights |= some
        told(lambda rounds, some=some: send(rounds, some, last=None))
        told(Rounds.settle)
        told(Rounds.settle_alone)
        assert engine.fingerprint() == MemoryEngine(weights, tp=len(engine.hosts)).fingerprint()
        assert told(lambda rounds: rounds.changed) == [True] * len(engine.hosts)
    told(lambda rounds: send(rounds, attention(5), last=None))
    assert engine.fingerprint() == MemoryEngine(attention(5), tp=len(engine.hosts)).fingerprint()


def test_an_update_that_is_not_over_is_not_some_weights_alone(engine: MemoryEngine, told: Any) -> None:
    told(lambda rounds: setattr(rounds, "first", lambda: attention(1).items()))
    told(lambda rounds: send(rounds, {name: attention(3)[name] for name in NAMES[:-1]}, last=None))

    def refused(rounds: Rounds) -> None:
        with pytest.raises(PlanError, match="4 of 5 tensors came: these are not some weights alone"):
            rounds.settle_alone()

    told(refused)
    assert engine.fingerprint() == MemoryEngine(attention(1), tp=len(engine.hosts)).fingerprint()
    told(lambda rounds: send(rounds, attention(3), last=None))
    assert engine.fingerprint() == MemoryEngine(attention(3), tp=len(engine.hosts)).fingerprint()


def test_an_update_after_one_that_failed_begins_with_its_first_name(engine: MemoryEngine, told: Any) -> None:
    told(lambda rounds: send(rounds, attention(2), last=None))
    assert all(len(found) == 1 for found in told(lambda rounds: heard(rounds, {"surprise": torch.ones(2)})))
    assert told(lambda rounds: heard(rounds, attention(3))) == [[]] * len(engine.hosts)
    assert engine.fingerprint() == MemoryEngine(attention(3), tp=len(engine.hosts)).fingerprint()


def test_every_update_with_a_gap_is_heard_of(engine: MemoryEngine, told: Any) -> None:
    """By a trainer that goes on after an error, each time; by one that begins anew, once."""
    weights = {name: tensor for name, tensor in attention(3).items() if name != NAMES[2]}
    told(lambda rounds: heard(rounds, weights))
    for _ in range(3):
        assert [len(found) for found in told(lambda rounds: heard(rounds, weights))] == [1] * len(engine.hosts)
    first = {NAMES[0]: attention(3)[NAMES[0]]}
    assert all(len(found) == 1 for found in told(lambda rounds: heard(rounds, first)))
    assert told(lambda rounds: heard(rounds, attention(3))) == [[]] * len(engine.hosts)
    assert engine.fingerprint() == MemoryEngine(attention(3), tp=len(engine.hosts)).fingerprint()


class Tied(torch.nn.Module):
    """A head that is the embedding, and two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.first, self.second = torch.nn.LayerNorm(3, bias=False), torch.nn.LayerNorm(3, bias=False)


def test_tensors_of_the_same_bytes_by_chance_are_not_tied_for_good() -> None:
    """A state dict lists a tied head; norms that are all ones are two, and one of them may come alone."""
    host = ToyHost(Tied(), lambda model, name, tensor: model.get_parameter(name).copy_(tensor))
    rounds = Rounds(Receiver(host), Peers(0, 1, None, 5), cast=False)
    weights = dict(sorted(Tied().state_dict().items()))
    send(rounds, weights, last=None)
    rounds.finish()
    for name, value in (("second.weight", 3.0), ("first.weight", 2.0)):
        send(rounds, {name: torch.full((3,), value)}, last=None)
        rounds.finish()
    found = host.model.state_dict()
    assert [found[f"{name}.weight"].tolist() for name in ("first", "second")] == [[2.0] * 3, [3.0] * 3]
    assert torch.equal(found["head.weight"], weights["embed.weight"])
