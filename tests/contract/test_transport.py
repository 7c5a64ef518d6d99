"""Publish and pull through shared memory: what a worker opens is what the trainer had, and nobody leaves memory behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from instep.digest import CHUNK, digest
from instep.errors import SourceError, TransportError
from instep.protocol import ITEM_BYTES, Location, Manifest, TensorMeta
from instep.transport import Published
from instep.transport.reader import WorkerContext
from instep.transport.registry import open_location
from instep.transport.shm import segment as shm
from instep.transport.shm.publish import ShmTransport

Values = list[tuple[str, torch.Tensor]]
ME = WorkerContext("worker", 5.0)


@pytest.fixture
def transport(segments: Path) -> Iterator[ShmTransport]:
    transport = ShmTransport()
    yield transport
    transport.close()
    assert list(segments.iterdir()) == []


def describe(values: Values) -> list[TensorMeta]:
    return [TensorMeta(name, str(value.dtype).removeprefix("torch."), tuple(value.shape)) for name, value in values]


def publish(transport: ShmTransport, values: Values, tensors: list[TensorMeta] | None = None) -> Manifest:
    tensors = tensors or describe(values)
    return manifest_of(tensors, transport.publish(tensors, values))


def manifest_of(tensors: list[TensorMeta], published: Published) -> Manifest:
    return Manifest("v1", None, tensors, published.digests, published.location)


def of_dtype(dtype: str) -> torch.Tensor:
    return torch.arange(-6, 6).to(getattr(torch, dtype)).reshape(3, 4)


VALUES = {
    **{dtype: of_dtype(dtype) for dtype in ITEM_BYTES},
    "0-d": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(3, 5).t(),
    "strided": torch.randn(9, 4)[::2, 1:3],
    "expanded": torch.randn(3, 1).expand(3, 4),
    "with an offset": torch.randn(12)[5:],
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "needs gradients": torch.nn.Parameter(torch.randn(4)),
    "more than one chunk": torch.randn(CHUNK // 4 * 2 + 3),
    "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def test_every_kind_of_tensor_arrives(transport: ShmTransport) -> None:
    values = list(VALUES.items())
    manifest = publish(transport, values)
    reader = open_location(manifest, ME)
    for meta, (name, value) in zip(manifest.tensors, values, strict=True):
        arrived = reader.tensor(meta)
        assert (arrived.dtype, arrived.shape) == (value.dtype, value.shape), name
        assert torch.equal(bits(arrived), bits(value)), name
        assert manifest.digests[name] == digest(value, meta), name
    del arrived
    assert reader.close()


@pytest.mark.parametrize("value", [torch.randn(5, 3), torch.randn(3, 5).t()], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float64"])
def test_values_are_cast_to_what_their_description_says(transport: ShmTransport, value: torch.Tensor, dtype: str) -> None:
    meta = TensorMeta("w", dtype, (5, 3))
    reader = open_location(publish(transport, [("w", value)], [meta]), ME)
    assert torch.equal(bits(reader.tensor(meta)), bits(value.to(getattr(torch, dtype))))


def test_an_alias_shares_the_bytes_of_what_it_stands_for(transport: ShmTransport) -> None:
    tensors = [TensorMeta("head", "float32", (2, 2), alias_of="embed"), TensorMeta("embed", "float32", (2, 2))]
    manifest = publish(transport, [("embed", torch.eye(2))], tensors)
    reader = open_location(manifest, ME)
    assert reader.tensor(tensors[0]).data_ptr() == reader.tensor(tensors[1]).data_ptr()
    assert manifest.location.nbytes == 64


def test_tensors_that_are_not_finite_are_named(transport: ShmTransport) -> None:
    values = [("good", torch.ones(3)), ("bad", torch.tensor([1.0, float("nan")])), ("worse", torch.tensor([float("-inf")]))]
    assert transport.publish(describe(values), values).non_finite == ("bad", "worse")


A, B = ("a", torch.ones(4)), ("b", torch.ones(2, 2))
BAD_SOURCES = {
    "a tensor that was not announced": ([A, B], [A, B, ("c", torch.ones(1))], "c"),
    "another shape": ([A, B], [A, ("b", torch.ones(4))], "b"),
    "a tensor is missing": ([A, B], [A], "b"),
    "a tensor comes twice": ([A, B], [A, B, A], "a"),
}


@pytest.mark.parametrize(("announced", "given", "tensor"), BAD_SOURCES.values(), ids=BAD_SOURCES)
def test_a_source_that_breaks_its_word(transport: ShmTransport, announced: Values, given: Values, tensor: str) -> None:
    with pytest.raises(SourceError) as caught:
        transport.publish(describe(announced), given)
    assert caught.value.tensor == tensor
    assert transport.segments == {}
    assert len(transport.free) == 1  # its memory is used for the next


def test_nothing_is_written_any_more_after_a_failed_publish(transport: ShmTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next version gets the same memory: a copy of the last one that is still under way would land in it."""
    running: list[int] = []
    submit = transport.pool.submit

    def slow(job: Callable[..., object], *args: object) -> object:
        def later() -> object:
            time.sleep(0.05)
            try:
                return job(*args)
            finally:
                running.pop()

        running.append(1)
        return submit(later)

    monkeypatch.setattr(transport.pool, "submit", slow)
    large = ("a", torch.ones(CHUNK))
    with pytest.raises(SourceError):
        transport.publish(describe([large]), [large, B])
    assert not running


def test_memory_is_used_again_under_another_name(transport: ShmTransport, segments: Path) -> None:
    first = publish(transport, [("w", torch.zeros(4))])
    transport.release_all_but(set())
    second = publish(transport, [("w", torch.ones(4))])
    assert first.location.address != second.location.address
    assert [path.name for path in segments.iterdir()] == [second.location.address]
    with pytest.raises(TransportError, match=first.location.address):
        open_location(first, ME)
    assert open_location(second, ME).tensor(second.tensors[0]).tolist() == [1, 1, 1, 1]


def test_a_version_that_is_held_is_left_alone(transport: ShmTransport) -> None:
    first = publish(transport, [("w", torch.zeros(4))])
    transport.release_all_but({first.location.address})
    second = publish(transport, [("w", torch.ones(4))])
    transport.release_all_but({first.location.address})
    assert set(transport.segments) == {first.location.address}
    assert open_location(first, ME).tensor(first.tensors[0]).tolist() == [0, 0, 0, 0]
    assert second.location.address not in transport.segments


def test_a_larger_version_gets_new_memory_and_the_old_is_freed(transport: ShmTransport, segments: Path) -> None:
    publish(transport, [("w", torch.zeros(4))])
    transport.release_all_but(set())
    large = publish(transport, [("w", torch.zeros(100_000))])
    assert [path.name for path in segments.iterdir()] == [large.location.address]


def test_a_reader_says_whether_somebody_still_has_a_view(transport: ShmTransport) -> None:
    manifest = publish(transport, [("w", torch.ones(4))])
    reader = open_location(manifest, ME)
    view = reader.tensor(manifest.tensors[0])
    assert not reader.close()
    del view
    assert reader.close()
    assert reader.close()


@pytest.mark.parametrize(
    "address", ["", "x", "../etc/passwd", "instep-" + "0" * 31, "instep-" + "0" * 32 + "/..", "instep-" + "G" * 32, "/etc/passwd"]
)
def test_an_address_is_a_segments_name(transport: ShmTransport, address: str) -> None:
    manifest = publish(transport, [("w", torch.ones(4))])
    with pytest.raises(TransportError, match="is not a segment's name"):
        open_location(msgspec.structs.replace(manifest, location=msgspec.structs.replace(manifest.location, address=address)), ME)


def test_a_link_is_not_followed(transport: ShmTransport, segments: Path) -> None:
    manifest = publish(transport, [("w", torch.ones(4))])
    link = segments / ("instep-" + "0" * 32)
    link.symlink_to(segments / manifest.location.address)
    try:
        with pytest.raises(TransportError, match="cannot open"):
            open_location(msgspec.structs.replace(manifest, location=msgspec.structs.replace(manifest.location, address=link.name)), ME)
    finally:
        link.unlink()


BAD_LOCATIONS = {
    "too short": ({"nbytes": 1 << 30}, "the manifest says"),
    "past the end": ({"nbytes": 63}, "tensors take 64 bytes, its segment has 63"),
    "laid out otherwise": ({"packed": False}, "take 32768 bytes, its segment has 64"),
    "negative size": ({"nbytes": -1}, "its segment has -1"),
    "another transport": ({"transport": "pigeon"}, "does not know the transport 'pigeon'; known: ipc"),
}


@pytest.mark.parametrize(("change", "text"), BAD_LOCATIONS.values(), ids=BAD_LOCATIONS)
def test_a_location_that_does_not_fit(transport: ShmTransport, change: dict[str, object], text: str) -> None:
    manifest = publish(transport, [("w", torch.ones(4))])
    location: Location = msgspec.structs.replace(manifest.location, **change)
    with pytest.raises(TransportError, match=text):
        open_location(msgspec.structs.replace(manifest, location=location), ME)


def test_no_room_says_how_to_get_some(transport: ShmTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm.os, "statvfs", lambda path: SimpleNamespace(f_bavail=2, f_frsize=1 << 20))
    with pytest.raises(TransportError, match="has 2 MiB free, the model needs 4 MiB") as caught:
        publish(transport, [("w", torch.ones(1 << 20))])
    assert "--shm-size" in str(caught.value)


def test_a_closed_transport_says_so(segments: Path) -> None:
    transport = ShmTransport()
    transport.close()
    transport.close()
    with pytest.raises(TransportError, match="was closed"):
        publish(transport, [("w", torch.ones(4))])
    assert list(segments.iterdir()) == []


def test_a_sweep_in_the_moment_of_creation_takes_nothing(transport: ShmTransport, segments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = shm.fcntl.flock

    def swept_first(file: int, operation: int) -> None:
        if operation == shm.fcntl.LOCK_SH:
            assert shm.sweep() == []
        flock(file, operation)

    monkeypatch.setattr(shm.fcntl, "flock", swept_first)
    manifest = publish(transport, [("w", torch.ones(4))])
    assert [path.name for path in segments.iterdir()] == [manifest.location.address]
    assert open_location(manifest, ME).close()


def test_nothing_grows_over_200_versions(transport: ShmTransport, segments: Path) -> None:
    def target(descriptor: Path) -> str:
        try:
            return os.readlink(descriptor)
        except OSError:  # other tests' threads may still be closing theirs
            return ""

    def resources() -> tuple[int, int]:
        maps = sum(str(segments) in line for line in Path("/proc/self/maps").read_text().splitlines())
        return maps, sum(str(segments) in target(Path("/proc/self/fd") / name) for name in os.listdir("/proc/self/fd"))

    values = [("w", torch.randn(100_000)), ("v", torch.randn(10, 3))]
    seen = set()
    for step in range(200):
        manifest = publish(transport, values)
        reader = open_location(manifest, ME)
        assert reader.tensor(manifest.tensors[0]).nbytes == 400_000
        assert reader.close()
        transport.release_all_but(set())
        if step:
            seen.add((len(list(segments.iterdir())), *resources()))
    assert len(seen) == 1
