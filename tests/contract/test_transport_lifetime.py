"""What is left of a trainer's shared memory after the ways in which a process can end, and what a worker cannot do to it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from instep.protocol import Manifest, TensorMeta, encode
from instep.transport.reader import WorkerContext
from instep.transport.registry import open_location
from instep.transport.shm import segment as shm
from instep.transport.shm.publish import ShmTransport

META = TensorMeta("w", "float32", (4,))
ME = WorkerContext("worker", 5.0)

PROCESS = """
import json, os, signal, sys, traceback
from pathlib import Path
import torch
from instep.protocol import Manifest, TensorMeta, decode
from instep.transport.reader import WorkerContext
from instep.transport.shm import segment as shm
from instep.transport.shm.publish import ShmTransport
from instep.transport.registry import open_location

folder, manifest = Path(sys.argv[1]), decode(bytes.fromhex(sys.argv[2]), Manifest)
shm.directory = lambda: folder
meta = manifest.tensors[0]
ME = WorkerContext("worker", 5.0)

def publish():
    global transport
    transport = ShmTransport()
    return transport.publish([meta], [("w", torch.ones(4))]).location.address

def killed():
    publish()
    os.kill(os.getpid(), signal.SIGKILL)

def ended():
    publish()

def raised():
    publish()
    raise ValueError("the training loop failed")

def forked():
    address = publish()
    if os.fork() == 0:
        raise SystemExit  # runs what runs at the exit of an interpreter
    os.wait()
    assert (folder / address).exists()

def wrote():
    view = open_location(manifest, ME).tensor(meta)
    assert view.sum() == 4
    (folder / "read").touch()
    view.zero_()

def run(case):
    before = set(os.listdir(folder))
    child = os.fork()
    if child == 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        globals()[case]()
        raise SystemExit
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, sorted(set(os.listdir(folder)) - before)

found = {}
for case in ("ended", "raised", "forked", "wrote", "killed"):  # a trainer that starts sweeps: the killed one is the last
    found[case] = run(case)
print(json.dumps(found))
"""
"""Forks a process for each case: torch is imported once for all of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("segments")


@pytest.fixture(scope="module")
def living(folder: Path) -> Iterator[Manifest]:
    """What a trainer that lives through all of this has published."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm, "directory", lambda: folder)
        transport = ShmTransport()
        published = transport.publish([META], [("w", torch.ones(4))])
        yield Manifest("v1", None, [META], published.digests, published.location)
        transport.close()


@pytest.fixture(scope="module")
def ends(folder: Path, living: Manifest) -> dict[str, tuple[int, list[str]]]:
    """Exit code of each case, and the files that it left."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(folder), encode(living).hex()], capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout)


def test_segments_of_a_killed_trainer_are_swept_and_those_of_a_living_one_stay(
    folder: Path, living: Manifest, ends: dict[str, tuple[int, list[str]]]
) -> None:
    code, left = ends["killed"]
    assert code == -signal.SIGKILL
    assert len(left) == 1
    (folder / "instep-notes.txt").touch()
    assert shm.sweep() == left
    assert {path.name for path in folder.iterdir() if path.name.startswith("instep")} == {living.location.address, "instep-notes.txt"}
    assert open_location(living, ME).tensor(META).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(("case", "expected"), [("ended", 0), ("raised", 1), ("forked", 0)])
def test_a_trainer_that_ends_without_closing_leaves_nothing(ends: dict[str, tuple[int, list[str]]], case: str, expected: int) -> None:
    """Forked: ... and a child of it that ends does not take the memory away from it."""
    assert ends[case] == [expected, []]


def test_published_bytes_cannot_be_written_by_a_worker(living: Manifest, ends: dict[str, tuple[int, list[str]]]) -> None:
    assert ends["wrote"] == [-signal.SIGSEGV, ["read"]]
    assert open_location(living, ME).tensor(META).tolist() == [1, 1, 1, 1]
