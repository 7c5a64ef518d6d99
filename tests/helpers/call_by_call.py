"""A trainer that talks to one worker call by call, for tests of the receiver."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from helpers.toys import Checkpoint, ToyHost, bits, described
from instep.plan.routes import signature
from instep.protocol import Arrival, CommitRequest, Identity, Manifest, PrepareRequest, Reply, Request, TraceRequest, decode, encode, raw
from instep.receiver.state import Receiver
from instep.transport.shm.publish import ShmTransport

SHAPES = {"a.weight": (4, 6), "b.weight": (3,)}


def weights(value: float) -> Checkpoint:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Module(), nn.Module()
        for name, value in weights(0.0).items():
            self.get_submodule(name[0]).register_parameter("weight", nn.Parameter(value))


def fill(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.get_parameter(name).copy_(tensor)


class Trainer:
    """One session that talks to one worker."""

    def __init__(self, receiver: Receiver, transport: ShmTransport, session: str = "trainer") -> None:
        self.receiver, self.transport, self.session = receiver, transport, session
        self.seq = 100

    def ask(self, method: str, body: Any = None) -> Reply:
        self.seq += 1
        reply = decode(self.receiver.handle(method, encode(Request(self.seq, self.session, raw(body)))), Reply)
        assert reply.seq == self.seq
        return reply

    def who(self) -> Identity:
        return decode(self.ask("hello").body, Identity)

    def trace(self, tensors: Checkpoint | None = None) -> Reply:
        metas = described(tensors or weights(0.0))
        return self.ask("trace", TraceRequest(metas, signature(metas)))

    def manifest(self, version: str, tensors: Checkpoint, base: str | None = None) -> Manifest:
        published = self.transport.publish(described(tensors), tensors.items())
        return Manifest(version, base, described(tensors), published.digests, published.location)

    def prepare(self, version: str, tensors: Checkpoint, base: str | None = None, lease: float = 60.0) -> Reply:
        return self.prepare_manifest(self.manifest(version, tensors, base), lease)

    def prepare_manifest(self, manifest: Manifest, lease: float = 60.0) -> Reply:
        """Waits until the bytes are proved, as a trainer does."""
        reply = self.ask("prepare", PrepareRequest(manifest, signature(described(weights(0.0))), lease, 10.0))
        while reply.fault is None:
            reply = self.ask("ready")
            if reply.fault is None and decode(reply.body, Arrival).done:
                break
        return reply

    def commit(self, version: str) -> Reply:
        return self.ask("commit", CommitRequest(version))

    def push(self, version: str, value: float) -> Reply:
        assert self.trace().fault is None
        assert self.prepare(version, weights(value)).fault is None
        return self.commit(version)


def refused(reply: Reply, kind: str, text: str) -> None:
    assert reply.fault is not None
    assert reply.fault.kind == kind, reply.fault
    assert text in reply.fault.message


def serves(host: ToyHost, value: float) -> bool:
    return all(torch.equal(bits(host.model.get_parameter(name)), bits(tensor)) for name, tensor in weights(value).items())
