"""Joins an update that comes in several calls of vLLM's `update_weights`, or refuses it."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise

from msgspec import structs

from instep.errors import ConfigError, VersionConflict
from instep.protocol import Location, Manifest

ANEW = "call start_weight_update, then update_weights with each part that one update_infos() gave, then finish_weight_update"


class Parts:
    """Collects the parts that have come since `start_weight_update`. They may come in any order."""

    def __init__(self) -> None:
        self.found: dict[int, Manifest] = {}
        self.count = 0
        self.whole: Manifest | None = None

    def add(self, manifest: Manifest, part: int, count: int) -> Manifest | None:
        """Adds a part. Returns the whole version when no part is missing, else None.

        Raises `ConfigError` for numbers that count no parts, `VersionConflict` for a part that came
        before or is of another update.
        """
        if type(part) is not int or type(count) is not int or not 1 <= part <= count:
            raise ConfigError(f"part {part!r} of {count!r} is no part of an update: parts are counted from 1", next_step=ANEW)
        if self.found:
            self._check(manifest, part, count)
        self.found[part], self.count = manifest, count
        if len(self.found) == count:
            self.whole = _joined([self.found[number] for number in sorted(self.found)])
        return self.whole

    def missing(self) -> str | None:
        """Says which parts of an update that has begun have not come, or returns None."""
        if not self.found or self.whole is not None:
            return None
        absent = [number for number in range(1, self.count + 1) if number not in self.found]
        version = next(iter(self.found.values())).version
        return f"{version} has not come whole: part{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} of {self.count} did not come"

    def _check(self, manifest: Manifest, part: int, count: int) -> None:
        first = next(iter(self.found.values()))
        here = f"part {part} of {count} of {manifest.version}"
        if _update(manifest) != _update(first) or count != self.count:
            same = " under the same label" if manifest.version == first.version else ""
            text = f"{here} is of another update{same} than what came before it: {len(self.found)} of {self.count} of {first.version}"
            raise VersionConflict(text, next_step=ANEW)
        if part in self.found:
            raise VersionConflict(f"{here} came a second time", next_step=ANEW)


def split(manifest: Manifest, count: int) -> list[Manifest]:
    """Splits a version, in the order of its tensors, into parts of about the same size in bytes.
    Raises `ConfigError` for more parts than tensors."""
    tensors = manifest.tensors
    if not 1 <= count <= len(tensors):
        raise ConfigError(f"{len(tensors)} tensors cannot be sent in {count} parts")
    sizes = list(accumulate(meta.nbytes for meta in tensors))
    bounds = [0]
    for number in range(1, count):  # where this share of the bytes ends, with a tensor at least for each part
        share = bisect_left(sizes, sizes[-1] * number / count) + 1
        bounds.append(min(max(share, bounds[-1] + 1), len(tensors) - count + number))
    return [_of(manifest, {meta.name for meta in tensors[start:end]}) for start, end in pairwise([*bounds, len(tensors)])]


def _of(manifest: Manifest, names: set[str]) -> Manifest:
    return structs.replace(
        manifest,
        tensors=[meta for meta in manifest.tensors if meta.name in names],
        digests={name: value for name, value in manifest.digests.items() if name in names},
    )


def _update(manifest: Manifest) -> tuple[str, str | None, Location, bool]:
    """Returns what all parts of one update have in common. Each publication has its own address."""
    return manifest.version, manifest.base, manifest.location, manifest.merged


def _joined(parts: list[Manifest]) -> Manifest:
    tensors = [meta for part in parts for meta in part.tensors]
    digests = {name: value for part in parts for name, value in part.digests.items()}
    return structs.replace(parts[0], tensors=tensors, digests=digests)
