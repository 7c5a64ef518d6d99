"""Runs many families, each in a process of its own with a deadline.

The processes are forked from one that has imported vLLM and transformers, which takes longer than
all else that a family does.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import connection, forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from instep.bench.machine import cards, processor, versions
from instep.bench.models.engines import ONE_THREAD, environment
from instep.bench.models.families import kind
from instep.bench.models.outcome import Outcome, Setting
from instep.bench.subjects import ENVIRONMENT

IMPORTED = [
    "instep.bench.models.torchvision",  # before transformers
    "vllm.v1.engine.core",
    "transformers",
    "instep.bench.models.one",
]
MOST = 6
"""Engines that start at once: more of them take longer each than in turn."""
ERROR = re.compile(r"^(?:\([^)]*\) )?(?:\S+ )*?([\w.]*(?:Error|Exception|Exit|Timeout)\b: .+)$", re.M)
"""The last line of a traceback in a log, whatever the log writes before it."""
Work = Callable[[str, Path, int | None], None]
"""Takes a family, a folder of its own, and the number of its GPU."""

SEE_LOG = "root cause"
"""vLLM says with this that the reason is in the log of a process of its own."""


@dataclass
class Running:
    """A family in its process. gpu: the only one that the process sees."""

    name: str
    folder: Path
    gpu: int | None
    process: Any
    deadline: float
    began: float = field(default_factory=time.monotonic)

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def end(self) -> None:
        """Ends the process and all that it started, which form one process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()

    def outcome(self) -> Outcome:
        file, log = self.folder / "outcome.json", self.folder / "log"
        text = log.read_text(errors="replace") if log.exists() else ""
        if file.exists():
            found = msgspec.json.decode(file.read_bytes(), type=Outcome)
            causes = ERROR.findall(text) if SEE_LOG in found.why else []
            why = f"vLLM: {causes[0]}"[:400] if causes else found.why
            return msgspec.structs.replace(found, why=why)
        last = (ERROR.findall(text) or text.strip().split("\n"))[-1][:400]
        verdict, why = "ended", f"exit code {self.process.exitcode}: {last}"
        if self.late:
            verdict, why = "out of time", f"after {time.monotonic() - self.began:.0f} s: {last}"
        took = round(time.monotonic() - self.began, 1)
        return Outcome(family=self.name, kind=kind(self.name), verdict=verdict, why=why, took=took)  # type: ignore[arg-type]


def run(
    names: Sequence[str],
    jobs: int,
    deadline: float,
    tell: Callable[[Outcome], object],
    work: Work | None = None,
    context: Any = None,
) -> list[Outcome]:
    """Returns one outcome for each name, in the order of the names.

    jobs: families at once; GPUs are given to them in turn. deadline: seconds for each.
    tell: is called with each outcome as it comes.
    work: what runs in a process of its own, and writes `outcome.json`. context: of multiprocessing.
    """
    outcomes: dict[str, Outcome] = {}
    waiting, running = list(names), list[Running]()
    gpus: list[int | None] = [*range(torch.cuda.device_count())] or [None]
    context = context or _server()
    with TemporaryDirectory() as scratch:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    used = [one.gpu for one in running]
                    gpu = min(gpus, key=used.count)
                    running.append(_start(context, work or _family, waiting.pop(0), Path(scratch), gpu, deadline))
                first = min(one.deadline for one in running)
                sentinels = [one.process.sentinel for one in running]
                connection.wait(sentinels, max(0.0, first - time.monotonic()))
                for one in [one for one in running if one.late or not one.process.is_alive()]:
                    running.remove(one)
                    one.end()
                    outcomes[one.name] = one.outcome()
                    tell(outcomes[one.name])
        finally:
            for one in running:
                one.end()
    return [outcomes[name] for name in names]


def _server() -> Any:
    """Starts the process from which the others are forked."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with patch.dict(os.environ, environment(None) if torch.version.cuda is None else ENVIRONMENT | ONE_THREAD):
        forkserver.ensure_running()
    return context


def _start(context: Any, work: Work, name: str, scratch: Path, gpu: int | None, deadline: float) -> Running:
    folder = scratch / name
    folder.mkdir()
    process = context.Process(target=_alone, args=(work, name, folder, gpu))
    process.start()
    return Running(name, folder, gpu, process, time.monotonic() + deadline)


def _alone(work: Work, name: str, folder: Path, gpu: int | None) -> None:
    """Runs `work` as the leader of a process group, which can be ended together, and logs its
    output."""
    os.setsid()
    log = (folder / "log").open("w", buffering=1)
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    sys.stdout = sys.stderr = log
    work(name, folder, gpu)


def _family(name: str, folder: Path, gpu: int | None) -> None:
    """Tests a family and ends its process: engines leave threads behind."""
    os.environ.update(environment(gpu))

    from instep.bench.models.one import one

    written = folder / "written.json"
    written.write_bytes(msgspec.json.encode(one(name, folder)))
    written.rename(folder / "outcome.json")
    sys.stderr.flush()
    os._exit(0)


def setting(command: str) -> Setting:
    on_gpu = torch.cuda.is_available()
    return Setting(
        kind="gpu" if on_gpu else "cpu",
        machine=cards() if on_gpu else [processor()],
        versions=versions() | {"transformers": version("transformers")},
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=command,
    )
