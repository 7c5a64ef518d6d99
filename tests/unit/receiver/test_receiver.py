"""The receiver inside a worker: it never raises, and never says that it serves what it does not.

Invariant 7: worker methods never raise, replies carry the sequence number. Invariant 2: known states. Invariant 5: proof before label.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from helpers.call_by_call import Model, Trainer, fill, refused, serves, weights
from helpers.toys import ToyHost, described
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from instep.protocol import Reply, Request, TraceRequest, WorkerReceipt, decode, encode, raw
from instep.receiver.state import Receiver

GOOD = encode(Request(7, "trainer", raw(None)))
GARBAGE = {
    "nothing": b"",
    "noise": b"\xc1\xff\x00garbage",
    "another type": msgspec.msgpack.encode([1, 2, 3]),
    "truncated": GOOD[:-3],
    "too much": GOOD + b"\x00",
    "no session": msgspec.msgpack.encode({"seq": 7}),
}


@pytest.mark.parametrize("payload", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("method", ["hello", "commit", "no such method"])
def test_garbage_is_answered(trainer: Trainer, method: str, payload: bytes) -> None:
    reply = decode(trainer.receiver.handle(method, payload), Reply)
    assert (reply.seq, reply.state, reply.version) == (-1, "serving", None)
    assert reply.fault is not None


@given(
    st.sampled_from(["hello", "trace", "prepare", "ready", "commit", "abort", "status", "digest", ""]),
    st.binary(max_size=60),
    st.integers(-(2**40), 2**40),
)
def test_any_body_is_answered_with_the_number_of_the_request(method: str, body: bytes, seq: int) -> None:
    """Invariant 7, and 6: a body is data of one struct or it is refused."""
    receiver = Receiver(ToyHost(Model(), fill))
    try:
        msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    reply = decode(receiver.handle(method, encode(Request(seq, "fuzz", msgspec.Raw(body)))), Reply)
    assert (reply.seq, reply.state) == (seq, "serving")


@pytest.mark.parametrize(
    "body",
    [
        None,
        5,
        "text",
        [],
        {},
        {"tensors": [["w", "float32", [-1]]], "signature": "x"},
        {"tensors": [["w", "nothing", [1]]], "signature": "x"},
    ],
)
@pytest.mark.parametrize("method", ["trace", "prepare", "commit"])
def test_a_body_of_another_shape_is_refused(trainer: Trainer, method: str, body: Any) -> None:
    reply = trainer.ask(method, body)
    assert reply.fault is not None
    assert reply.state == "serving"


def test_an_unknown_method_is_refused(trainer: Trainer) -> None:
    refused(trainer.ask("unpickle"), "ConfigError", "unknown method 'unpickle'")


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), KeyError("w"), ValueError("\udcff is no text"), RecursionError(), AssertionError()]
)
def test_what_the_host_raises_comes_back_as_a_fault(trainer: Trainer, host: ToyHost, error: Exception) -> None:
    def broken(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        raise error

    host.fill = broken
    refused(trainer.trace(), "PlanError", f"refuses a.weight [4, 6]: {type(error).__name__}")
    host.fill = fill
    assert trainer.trace().fault is None
    assert trainer.prepare("v1", weights(1.0)).fault is None
    host.fill = broken
    reply = trainer.commit("v1")
    refused(reply, "ApplyError", type(error).__name__)
    assert (reply.state, reply.version) == ("dirty", None)


def test_a_push(trainer: Trainer, host: ToyHost) -> None:
    reply = trainer.push("v1", 1.0)
    assert (reply.fault, reply.state, reply.version) == (None, "serving", "v1")
    assert serves(host, 1.0)
    receipt = decode(reply.body, WorkerReceipt)
    assert receipt.rank == 0
    assert receipt.direct == ["a", "b"]
    assert trainer.who().prepared is None
    assert trainer.who().holding == []


def test_nothing_visible_changes_before_the_commit(trainer: Trainer, host: ToyHost) -> None:
    """Invariant 1."""
    trainer.push("v1", 1.0)
    for reply in (trainer.trace(), trainer.prepare("v2", weights(2.0)), trainer.ask("status")):
        assert (reply.fault, reply.state, reply.version) == (None, "serving", "v1")
        assert serves(host, 1.0)
    assert trainer.who().prepared == "v2"
    assert len(trainer.who().holding) == 1


def test_a_commit_without_a_preparation(trainer: Trainer) -> None:
    trainer.trace()
    refused(trainer.commit("v1"), "VersionConflict", "version 'v1' is not prepared here")
    trainer.prepare("v1", weights(1.0))
    refused(trainer.commit("v2"), "VersionConflict", "version 'v2' is not prepared here")
    assert trainer.commit("v1").fault is None
    refused(trainer.commit("v1"), "VersionConflict", "not prepared")


def test_a_preparation_without_a_plan(trainer: Trainer) -> None:
    refused(trainer.prepare("v1", weights(1.0)), "PlanError", "has no plan for these tensors")


def test_a_list_that_is_not_the_signed_one(trainer: Trainer) -> None:
    refused(trainer.ask("trace", TraceRequest(described(weights(0.0)), "other")), "PlanError", "not the one that was signed")
