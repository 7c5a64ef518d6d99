"""How much memory is free: in files as Linux has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from instep.cli.plan_memory import Free, free

GB = 10**9


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {(8 << 30) >> 10} kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def two(folder: str, most: object, used: int, cached: int = 0) -> dict[str, str]:
    """A control group of version 2."""
    place = f"sys/fs/cgroup/{folder}"
    return {
        f"{place}/memory.max": f"{most}\n",
        f"{place}/memory.current": f"{used}\n",
        f"{place}/memory.stat": f"anon 1\ninactive_file {cached}\n",
    }


def one(folder: str, most: int, used: int, cached: int = 0) -> dict[str, str]:
    """Of version 1."""
    place = f"sys/fs/cgroup/memory/{folder}"
    return {
        f"{place}/memory.limit_in_bytes": f"{most}\n",
        f"{place}/memory.usage_in_bytes": f"{used}\n",
        f"{place}/memory.stat": f"cache 5\ntotal_inactive_file {cached}\n",
    }


TWO, ONE = {"proc/self/cgroup": "0::/a/b\n"}, {"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n"}
UNLIMITED = 9223372036854771712


@pytest.mark.parametrize(
    ("files", "nbytes", "limit"),
    [
        ({}, 8 << 30, "machine"),
        ({**TWO, **two("a/b", "max", GB), **two("a", "max", GB)}, 8 << 30, "machine"),
        ({**TWO, **two("a/b", 4 * GB, GB)}, 3 * GB, "4.0 GB of the control group /a/b"),
        ({**TWO, **two("a/b", 4 * GB, 3 * GB, cached=2 * GB)}, 3 * GB, "a/b"),
        ({**TWO, **two("a/b", "max", GB), **two("a", 2 * GB, GB)}, GB, "2.0 GB of the control group /a"),
        ({**TWO, **two("", 3 * GB, GB)}, 2 * GB, "3.0 GB"),
        ({**TWO, **two("a/b", GB, 2 * GB)}, 0, "a/b"),
        ({**ONE, **one("a/b", UNLIMITED, GB), **one("", UNLIMITED, GB)}, 8 << 30, "machine"),
        ({**ONE, **one("a/b", 4 * GB, 3 * GB, cached=GB)}, 2 * GB, "control group /a/b"),
        ({**ONE, **one("", 5 * GB, GB)}, 4 * GB, "5.0 GB"),
    ],
)
def test_the_least_of_all_limits_counts(files: dict[str, str], nbytes: int, limit: str, tmp_path: Path) -> None:
    found = free(system(tmp_path, files))
    assert found is not None
    assert found.nbytes == nbytes
    assert limit in found.limit


def test_a_system_that_tells_nothing_limits_nothing(tmp_path: Path) -> None:
    assert free(tmp_path) is None


def test_this_machine_tells() -> None:
    found = free()
    assert isinstance(found, Free | None)
    assert found is None or 0 < found.nbytes < 1 << 50
