"""A checkpoint directory as a source: safetensors files, mapped into memory and read as they are
asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from instep.errors import ConfigError, SourceError
from instep.extras import needed_by
from instep.protocol import TensorMeta, dtype_name
from instep.source.names import natural_key
from instep.source.tensors import check

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class CheckpointSource:
    """Reads a directory of safetensors files (single or sharded, with or without an index) or one
    such file. Names come in natural order.

    Files are looked up at each call, so that a checkpoint saved again is read again. Raises
    `ConfigError` where there is no such file or safetensors is not installed, `SourceError` for a
    missing or unreadable shard and for a name that two shards hold.
    """

    stays = True
    whole = True  # see `Guarded.whole`

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        with needed_by("reading a checkpoint"):
            import safetensors  # noqa: F401
        self._files()

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in self.tensors()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._opened() as shards:
            for name in sorted(shards, key=natural_key):
                try:
                    tensor = shards[name][1].get_tensor(name)
                except Exception as error:
                    raise SourceError(f"{name} cannot be read from {shards[name][0]}: {error}", tensor=name) from error
                check(name, tensor)
                yield name, tensor

    def stamp(self) -> Hashable:
        """Returns each file's name, time of change and size."""
        return tuple((file.name, (stat := file.stat()).st_mtime_ns, stat.st_size) for file in self._files())

    def score(self, token_ids: list[int]) -> list[float] | None:  # noqa: ARG002
        return None

    def _files(self) -> list[Path]:
        if self._path.is_file() and self._path.suffix == ".safetensors":
            return [self._path]
        if not self._path.is_dir():
            like_an_id = HUB_ID.fullmatch(str(self._path)) and not self._path.exists()
            raise ConfigError(
                f"{self._path} is neither a directory nor a .safetensors file",
                next_step=f"of a Hub id give the local copy: huggingface_hub.snapshot_download('{self._path}')" if like_an_id else None,
            )
        listed = sorted({self._path / name for name in self._index().values()})
        for file in listed:
            if not file.is_file():
                raise SourceError(f"{file.name} is listed in the index of {self._path} but missing", next_step="copy the whole checkpoint")
        files = listed or sorted(self._path.glob("*.safetensors"))
        if not files:
            found = ", ".join(sorted(entry.name for entry in self._path.iterdir())) or "nothing"
            raise ConfigError(f"no .safetensors file in {self._path}, found {found}", next_step="save the model with save_pretrained")
        return files

    def _index(self) -> dict[str, str]:
        """Returns the file name of each tensor; empty for a directory without an index."""
        index = min(self._path.glob("*.safetensors.index.json"), default=None)
        if index is None:
            return {}
        try:
            listed: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(f"{index} is no safetensors index: {error!r}") from error
        return listed

    @contextmanager
    def _opened(self) -> Iterator[dict[str, tuple[Path, Any]]]:
        """Yields each tensor's name with the file that holds it. Files stay open until the block
        ends."""
        from safetensors import SafetensorError, safe_open

        shards: dict[str, tuple[Path, Any]] = {}
        with ExitStack() as stack:
            for file in self._files():
                try:
                    shard = stack.enter_context(safe_open(file, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise SourceError(f"{file} cannot be read: {error}") from error
                for name in shard.keys():  # noqa: SIM118
                    if name in shards:
                        raise SourceError(f"{name} is in {shards[name][0].name} and again in {file.name}", tensor=name)
                    shards[name] = (file, shard)
            for name, file_name in self._index().items() if self._path.is_dir() else ():
                if name not in shards:
                    raise SourceError(f"{name} is listed in the index but not in {file_name}", tensor=name)
            yield shards
