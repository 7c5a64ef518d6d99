"""Two buffers in a directory, each a whole version in a safetensors file, and a third file that
says which is the newer.

    buffer-0.safetensors   version, tensors and digests of both kinds in the header, then the bytes
    buffer-1.safetensors
    newest                 0 or 1

A writer fills the older buffer: under another name, then renamed over it, then `newest` is replaced
the same way. So whatever has a name is whole, also after a crash at any point, and a reader keeps
the file that it opened, whatever is renamed over it meanwhile. What a reader has opened says itself
which version it is.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from instep.digest import digest
from instep.errors import ConfigError, SourceError, TransportError
from instep.extras import needed_by
from instep.forked import close, keep
from instep.plan.routes import check_metadata
from instep.protocol import TensorMeta
from instep.source import Source, again, unchanged
from instep.transport import Placed
from instep.transport.again import check

NEWEST = "newest"


class Header(msgspec.Struct, frozen=True):
    version: str
    tensors: list[TensorMeta]
    digests: dict[str, int]


def write(directory: Path, source: Source, version: str) -> None:
    """Returns when `version` is the newest, on the disk itself.

    Raises `SourceError` where the trainer changed its weights meanwhile, `ConfigError` where
    another writer is at work, `TransportError` where the disk does not take it: the versions that
    were there are there still.
    """
    with needed_by("a double buffer"):
        from safetensors import SafetensorError

    try:
        with locked(directory):
            _write(directory, source, version)
    except (OSError, SafetensorError) as error:
        raise TransportError(f"cannot write {version} to {directory}: {error}", next_step="the older versions are still there") from error


def _write(directory: Path, source: Source, version: str) -> None:
    from safetensors.torch import save_file

    with unchanged(source):
        metas = source.metadata()
        check_metadata(metas)
        own = {meta.name: meta for meta in metas if meta.alias_of is None}
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in source.tensors()}
        digests = {name: digest(copies[name], meta) for name, meta in own.items()}
        check(metas, Placed(source.tensors, lambda: again(source)), digests)
    header = Header(version, metas, digests)
    slot = 1 - (newest(directory) or 0)
    new = directory / f"buffer-{slot}.new"
    save_file(copies, new, {"instep": msgspec.json.encode(header).decode()})
    replace(new, buffer(directory, slot))
    mark = directory / f"{NEWEST}.new"
    mark.write_text(str(slot))
    replace(mark, directory / NEWEST)


def newest(directory: Path) -> int | None:
    """The buffer that holds the newest version; None where nothing was written yet. Raises
    `SourceError` for a file that says neither."""
    try:
        text = (directory / NEWEST).read_text()
    except FileNotFoundError:
        return None
    if text not in ("0", "1"):
        raise SourceError(f"{directory / NEWEST} should say 0 or 1, it says {text[:20]!r}", next_step="copy the directory again")
    return int(text)


def buffer(directory: Path, slot: int) -> Path:
    return directory / f"buffer-{slot}.safetensors"


def replace(new: Path, old: Path) -> None:
    """Renames `new` over `old`, so that after a crash of the machine too either of them is there,
    whole."""
    flush(new)
    new.replace(old)
    flush(old.parent)


def flush(path: Path) -> None:
    """What was written to a file, or the names in a directory, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """One writer at a time; the lock ends with the process."""
    directory.mkdir(parents=True, exist_ok=True)
    file = keep(os.open(directory / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another trainer is writing to {directory}", next_step="give each trainer a directory of its own") from None
        yield
    finally:
        close(file)


class Buffer:
    """One opened version, as a source. Each tensor is checked against its digest when it is given
    out.

    Raises `SourceError` for a file that is no whole version.
    """

    def __init__(self, path: Path) -> None:
        with needed_by("a double buffer"):
            from safetensors import SafetensorError, safe_open

        self.path = path
        self._open = ExitStack()
        try:
            self._file: Any = self._open.enter_context(safe_open(path, framework="pt"))
            self._header = msgspec.json.decode((self._file.metadata() or {}).get("instep", ""), type=Header)
        except (SafetensorError, OSError, msgspec.DecodeError) as error:
            raise SourceError(f"{path} is no whole version: {error}", next_step="write it again, or copy it again") from error

    @property
    def version(self) -> str:
        return self._header.version

    def metadata(self) -> list[TensorMeta]:
        return self._header.tensors

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in self._header.tensors:
            if meta.alias_of is None:
                tensor = self._file.get_tensor(meta.name)
                if digest(tensor, meta) != self._header.digests.get(meta.name):
                    raise SourceError(f"{meta.name} in {self.path} is not what {self.version} has", tensor=meta.name)
                yield meta.name, tensor

    def stamp(self) -> Hashable:
        return self.version

    def score(self, token_ids: list[int]) -> list[float] | None:  # noqa: ARG002
        return None

    def close(self) -> None:
        self._open.close()
