"""Check what `make demo` left behind: python scripts/check_demo.py [DIRECTORY]

Exit code 1, and what is wrong, unless the reward rose, every push was proved and the picture is there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from instep.demo.record import RISE, Run, Step

PNG = b"\x89PNG\r\n\x1a\n"
LEAST = 10_000
"""Bytes. An empty figure of the picture's size is smaller than this."""


def complaints(out: Path) -> list[str]:
    """What is wrong with the results in the directory `out`, one sentence each."""
    if not (out / "demo.json").is_file():
        return [f"there is no {out / 'demo.json'}: the demo did not reach its end"]
    run = msgspec.json.decode((out / "demo.json").read_bytes(), type=Run)
    found = [complaint for step in run.steps if (complaint := unproved(step))]
    if not run.steps:
        found.append("the demo made no step")
    if not run.after.reward > run.before.reward + RISE:
        found.append(f"the reward did not rise: {run.before.reward:.2f} to {run.after.reward:.2f}")
    picture = (out / "demo.png").read_bytes() if (out / "demo.png").is_file() else b""
    if not picture.startswith(PNG) or len(picture) < LEAST:
        found.append(f"{out / 'demo.png'} is no picture")
    return found


def unproved(step: Step) -> str | None:
    """What speaks against the push of a step; None where nothing does."""
    push, version = step.push, f"step-{step.step}"
    if push["version"] != version or push["failed"] or not push["engines"]:
        return f"{version} did not reach the engine"
    if int(push["digest"], 16) == 0 or not all(engine["read_back"] for engine in push["engines"]):
        return f"{version} was not compared with the trainer's bytes"
    if push["canary_gap"] is None:
        return f"{version} was served without a canary"
    return None


def main(out: Path) -> None:
    if found := complaints(out):
        sys.exit("\n".join(found))
    print(f"{out}: the reward rose, every push was proved, the picture is there")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-results"))
