"""What a worker refuses to prepare, and what it says that it serves after every kind of failure.

Invariant 2: known states. Invariant 4: nothing is skipped silently. Invariant 5: proof before label.
"""

from __future__ import annotations

import pytest
import torch
from helpers.call_by_call import Trainer, fill, refused, serves, weights
from helpers.toys import Checkpoint, ToyHost, described
from torch import nn

from instep.plan.packed import packed
from instep.plan.routes import signature
from instep.protocol import Arrival, PrepareRequest, decode
from instep.receiver.kept import Kept

WRONG_LISTS = {
    "a tensor is missing": {"a.weight": torch.ones(4, 6)},
    "one more": weights(1.0) | {"c": torch.ones(1)},
    "another shape": weights(1.0) | {"b.weight": torch.ones(4)},
}


@pytest.mark.parametrize("tensors", WRONG_LISTS.values(), ids=WRONG_LISTS)
def test_a_manifest_of_another_plan_is_refused_before_anything_is_written(trainer: Trainer, host: ToyHost, tensors: Checkpoint) -> None:
    """Invariant 4."""
    trainer.push("v1", 1.0)
    refused(trainer.prepare("v2", tensors), "PlanError", "not those of the plan")
    assert (trainer.commit("v2").state, serves(host, 1.0)) == ("serving", True)


def test_bytes_that_changed_on_the_way_are_named(trainer: Trainer, host: ToyHost) -> None:
    """Invariant 5."""
    trainer.trace()
    manifest = trainer.manifest("v1", weights(1.0))
    trainer.transport.segments[manifest.location.address].view[packed(manifest.tensors).offsets["b.weight"]] ^= 1
    reply = trainer.prepare_manifest(manifest)
    refused(reply, "DigestMismatch", "b.weight arrived with digest")
    assert reply.fault is not None
    assert reply.fault.tensor == "b.weight"
    assert trainer.who().prepared is None
    refused(trainer.commit("v1"), "VersionConflict", "not prepared")
    assert serves(host, 0.0)


@pytest.mark.usefixtures("apart")
def test_a_commit_does_not_run_ahead_of_the_proof(trainer: Trainer, host: ToyHost) -> None:
    """Invariant 5: also for a trainer that never asks whether the bytes are proved."""
    trainer.trace()
    manifest = trainer.manifest("v1", weights(1.0))
    trainer.transport.segments[manifest.location.address].view[packed(manifest.tensors).offsets["a.weight"]] ^= 1
    trainer.ask("prepare", PrepareRequest(manifest, signature(described(weights(0.0))), 60.0, 10.0))
    reply = trainer.commit("v1")
    refused(reply, "DigestMismatch", "a.weight")
    assert (reply.state, reply.version, serves(host, 0.0)) == ("serving", None, True)


def test_a_small_version_is_proved_in_the_call_that_prepares_it(trainer: Trainer, host: ToyHost) -> None:
    trainer.trace()
    listed = signature(described(weights(0.0)))
    reply = trainer.ask("prepare", PrepareRequest(trainer.manifest("v1", weights(1.0)), listed, 60.0, 10.0))
    assert decode(reply.body, Arrival).done
    trainer.ask("abort")
    manifest = trainer.manifest("v2", weights(1.0))
    trainer.transport.segments[manifest.location.address].view[packed(manifest.tensors).offsets["a.weight"]] ^= 1
    refused(trainer.ask("prepare", PrepareRequest(manifest, listed, 60.0, 10.0)), "DigestMismatch", "a.weight")
    assert trainer.who().prepared is None
    assert serves(host, 0.0)


def test_a_tensor_without_a_digest_is_not_taken_on_trust(trainer: Trainer) -> None:
    trainer.trace()
    manifest = trainer.manifest("v1", weights(1.0))
    del manifest.digests["b.weight"]
    refused(trainer.prepare_manifest(manifest), "TransportError", "no digest for b.weight")


def test_abort_forgets_and_may_be_repeated(trainer: Trainer, host: ToyHost) -> None:
    trainer.trace()
    trainer.prepare("v1", weights(1.0))
    for _ in range(3):
        assert trainer.ask("abort").fault is None
        assert (trainer.who().prepared, trainer.who().holding) == (None, [])
    refused(trainer.commit("v1"), "VersionConflict", "not prepared")
    assert serves(host, 0.0)


def test_it_stays_dirty_until_a_version_is_whole(trainer: Trainer, host: ToyHost) -> None:
    """Invariant 2."""
    trainer.push("v1", 1.0)

    def half(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        if name == "b.weight":
            raise RuntimeError("boom")
        fill(model, name, tensor)

    trainer.receiver.kept = Kept()
    trainer.trace()  # nothing is known of its layers: every one takes the session again
    host.fill = half
    trainer.prepare("v2", weights(2.0))
    reply = trainer.commit("v2")
    assert (reply.state, reply.version) == ("dirty", "v1")
    assert "boom" in (trainer.who().last_error or "")
    for method in ("abort", "hello", "status"):
        assert trainer.ask(method).state == "dirty"
    assert trainer.prepare("v3", weights(3.0), base="nobody knows").fault is None  # a dirty worker follows no version
    assert trainer.commit("v3").state == "dirty"
    host.fill = fill
    reply = trainer.push("v3", 3.0)
    assert (reply.fault, reply.state, reply.version) == (None, "serving", "v3")
    assert serves(host, 3.0)
    assert trainer.who().last_error is None


def test_a_loader_that_keeps_the_published_bytes_is_caught(trainer: Trainer, host: ToyHost) -> None:
    """Its memory will hold the next version: such an engine would change between commits (invariant 1)."""
    kept = []

    def keep(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
        fill(model, name, tensor)
        kept.append(tensor)

    trainer.trace()
    trainer.prepare("v1", weights(1.0))
    host.fill = keep
    reply = trainer.commit("v1")
    refused(reply, "ApplyError", "kept views of the published bytes")
    assert (reply.state, reply.version) == ("dirty", None)
    kept.clear()
    host.fill = fill
    assert trainer.push("v2", 2.0).state == "serving"


def test_the_same_version_again(trainer: Trainer, host: ToyHost) -> None:
    trainer.push("v1", 1.0)
    assert trainer.push("v1", 1.0).fault is None
    trainer.push("v2", 2.0)
    assert trainer.push("v1", 1.0).version == "v1"
    refused(trainer.prepare("v2", weights(1.0)), "VersionConflict", "'v2' was served before, with other bytes")
    assert serves(host, 1.0)


@pytest.mark.parametrize(("base", "text"), [("v0", "follows 'v0', but the engine serves 'v1'"), ("v1", "")])
def test_base(trainer: Trainer, base: str, text: str) -> None:
    trainer.push("v1", 1.0)
    reply = trainer.prepare("v2", weights(2.0), base=base)
    if text:
        refused(reply, "VersionConflict", text)
    assert (reply.fault is None) == (base == "v1")
