"""Handles of shared memory: opened by their plain fields, and nothing that comes with one is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.toys import bits
from torch.multiprocessing import reductions

from instep.dropin.colocate_sender import ColocateSender
from instep.dropin.handles import SEGMENT, mine, of_worker, rebuild_ipc, share
from instep.errors import PlanError, TransportError
from instep.transport.shm.segment import Segment

FIELDS = (
    torch.Tensor, torch.Size([2, 3]), (3, 1), 0, torch.storage.TypedStorage, torch.bfloat16, 0, b"m" + bytes(64), 512, 0, True, b"counter",
    3, b"event", True,
)  # fmt: skip
"""What `reduce_tensor` makes of a CUDA tensor."""


def changed(index: int, value: Any) -> tuple[Any, ...]:
    return (*FIELDS[:index], value, *FIELDS[index + 1 :])


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What PyTorch's own function is called with, in the place of a GPU."""
    calls: list[tuple[Any, ...]] = []

    def rebuild_cuda_tensor(*fields: Any) -> torch.Tensor:
        calls.append(fields)
        return torch.zeros(2, 3)

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    return calls


def test_a_function_that_comes_with_a_handle_is_not_called() -> None:
    called: list[Any] = []
    with pytest.raises(TransportError, match="only those of reduce_tensor are opened"):
        rebuild_ipc((lambda *fields: called.append(fields), FIELDS))
    with pytest.raises(TransportError, match="only those of reduce_tensor are opened"):
        rebuild_ipc(reductions.reduce_tensor(torch.zeros(3)))  # a CPU tensor's brings objects
    assert called == []


class Callable:
    def __call__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("called")


@pytest.mark.parametrize("index", [0, 4])
def test_classes_of_a_handle_are_not_used(rebuilt: list[tuple[Any, ...]], index: int) -> None:
    rebuild_ipc((reductions.rebuild_cuda_tensor, changed(index, Callable())))
    assert rebuilt[0][index] in (torch.Tensor, torch.storage.TypedStorage)


@pytest.mark.parametrize("index", [1, 2, 3, 6, 7, 8, 9, 11, 12, 13, 14])
def test_other_fields_are_numbers_and_bytes(rebuilt: list[tuple[Any, ...]], index: int) -> None:
    with pytest.raises(TransportError, match="neither a number nor bytes"):
        rebuild_ipc((reductions.rebuild_cuda_tensor, changed(index, (Callable(),) if index in (1, 2) else Callable())))
    assert rebuilt == []


def test_a_handle_may_be_plain_and_the_gpu_may_have_another_number(rebuilt: list[tuple[Any, ...]]) -> None:
    plain = list(changed(5, "bfloat16"))
    plain[0], plain[1], plain[2], plain[4] = None, [2, 3], [3, 1], None
    rebuild_ipc(("rebuild_cuda_tensor", plain), device_id=5)
    assert rebuilt == [(*changed(6, 5)[:10], False, *FIELDS[11:])]
    with pytest.raises(PlanError, match="object"):
        rebuild_ipc(("rebuild_cuda_tensor", changed(5, "object")))


def test_a_tensor_without_a_gpu_has_no_handle() -> None:
    with pytest.raises(TransportError, match="on cpu"):
        share(torch.zeros(3))


def test_a_segment_is_opened_by_its_name_alone(segments: Path) -> None:
    segment = Segment(8192)
    segment.view[:3] = [1, 2, 3]
    opened = rebuild_ipc((SEGMENT, [segment.name, 8192]))
    assert opened[:3].tolist() == [1, 2, 3]
    segment.view[0] = 7
    assert opened[0] == 7
    for name in ("../etc/passwd", "instep-" + "0" * 32):
        with pytest.raises(TransportError):
            rebuild_ipc((SEGMENT, [name, 8]))
    with pytest.raises(TransportError, match="does not have"):
        rebuild_ipc((SEGMENT, [segment.name, 1 << 40]))
    del opened
    segment.close()


def test_a_device_is_found_with_and_without_its_prefix() -> None:
    assert mine({"GPU-a": 1, "b": 2}, "GPU-b") == 2
    assert mine({"GPU-a": 1}, "a") == 1
    with pytest.raises(PlanError, match=r"device GPU-c: there is something for GPU-a"):
        mine({"GPU-a": 1}, "GPU-c")


HANDLE, OTHER = ("rebuild_cuda_tensor", [None, [2], [1]]), ("segment", ("name", 7))


@pytest.mark.parametrize(
    "handles",
    [
        {"GPU-a": HANDLE, "GPU-b": OTHER},
        [{"GPU-b": OTHER}, {"GPU-a": HANDLE}],
        [("GPU-b", OTHER), ("GPU-a", HANDLE)],
        [OTHER, HANDLE],
    ],
    ids=["a mapping", "mappings", "pairs", "by rank"],
)
def test_handles_of_all_workers_come_in_the_forms_that_trainers_gather_them_in(handles: Any) -> None:
    assert of_worker(handles, "GPU-a", 1) == HANDLE


@pytest.mark.parametrize("handles", [None, [], {}, [OTHER], [{"GPU-b": OTHER}], [("GPU-b", OTHER)]])
def test_a_worker_for_which_there_is_no_handle_says_so(handles: Any) -> None:
    with pytest.raises(PlanError, match="nothing is meant for this worker's device GPU-a"):
        of_worker(handles, "GPU-a", 1)


def test_buckets_are_aligned_and_hold_every_byte(segments: Path) -> None:
    """A buffer of twice the largest tensor is filled as often as needed."""
    weights = {f"w{index}": torch.randn(size).to(torch.bfloat16) for index, size in enumerate([100, 1, 129, 30, 500, 77])}
    sender = ColocateSender(weights, "CPU-0")
    found = {}
    with sender._buffer() as (buffer, _):
        assert buffer.numel() == 2 * 1024
        for bucket in sender._buckets(buffer):
            for item in bucket:
                assert item.offset % 256 == 0
                found[item.meta.name] = buffer[item.offset : item.offset + item.meta.nbytes].clone()
    assert {name: value.tolist() for name, value in found.items()} == {name: bits(value).tolist() for name, value in weights.items()}
    assert list(segments.iterdir()) == []
