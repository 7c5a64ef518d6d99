"""`instep verify`: do running servers hold the weights of a checkpoint?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from math import floor
from typing import Any

import msgspec

from instep.cli import DIGESTS_DIFFER, FAILED, NOT_ALL_COMPARED, PARTLY
from instep.cli.checkpoints import CANARY, CANARY_BOUND, Checkpoint, Urls, advise, connected
from instep.cli.hub import found
from instep.engine import Engine
from instep.errors import InstepError
from instep.verify import Verified
from instep.verify import verify as compare

DEADLINE = 120.0  # seconds for each call
SHOWN = 5  # tensors of each kind that are named


def verify(model: str, /, *, engine: Urls, canary: bool = False, json: bool = False) -> int:
    """Compare the weights that servers hold now with a checkpoint, by digests. Nothing is changed,
    generation goes on.

    What a server keeps in a layout of its own cannot be read back. The result says what share was,
    and --canary covers the rest: it compares what the engine computes. Where the server has a
    token, set INSTEP_TOKEN or INSTEP_TOKEN_FILE to it.

    Exit code 0 if all was read back and is equal, or what was is and the canary agrees; 4 if
    something differs; 5 if what was read back is equal, and the rest is not known; 3 if some
    engines could not be asked, 1 if none could.

    Parameters
    ----------
    model
        A directory of safetensors files, one such file, or a Hub id, taken from huggingface_hub's
        cache or downloaded into it.
    engine
        URLs of servers that `instep serve` started, such as http://gpu1:8000.
    canary
        Also score a few tokens with the engines and with transformers.
    json
        Print the result as JSON on stdout.
    """
    engines = connected(engine)  # what is wrong with them is said before a model is downloaded
    source = Checkpoint(found(model))
    if canary:
        source.score(list(CANARY))  # what is missing for it is said first
    results = asyncio.run(every(source, engines, CANARY if canary else ()))
    if json:
        print(msgspec.json.encode({"engines": [as_dict(name, result) for name, result in results]}).decode())
    else:
        print("\n".join(line for name, result in results for line in lines(name, result)))
    return exit_code([result for _, result in results])


async def every(source: Checkpoint, engines: Sequence[Engine], canary: Sequence[int]) -> list[tuple[str, Verified | InstepError]]:
    """Compares the engines one after the other, each with the checkpoint as it is read."""
    results: list[tuple[str, Verified | InstepError]] = []
    for engine in engines:
        try:
            results.append((engine.name, await compare(source, engine, deadline=DEADLINE, canary=canary)))
        except InstepError as error:
            advise(error)
            results.append((engine.name, error))
    return results


def word(result: Verified | InstepError) -> str:
    if isinstance(result, InstepError):
        return "failed"
    asked = result.canary_gap is not None
    agrees = result.canary_gap is not None and result.canary_gap <= CANARY_BOUND
    if result.differing or result.dirty or (asked and not agrees):
        return "differs"
    return "not all compared" if result.unread and not agrees else "equal"


def exit_code(results: Sequence[Verified | InstepError]) -> int:
    words = [word(result) for result in results]
    if "differs" in words:
        return DIGESTS_DIFFER
    if "failed" in words:
        return FAILED if set(words) == {"failed"} else PARTLY
    return NOT_ALL_COMPARED if "not all compared" in words else 0


def as_dict(name: str, result: Verified | InstepError) -> dict[str, Any]:
    if isinstance(result, InstepError):
        return {"engine": name, "result": "failed", "error": f"{type(result).__name__}: {result.args[0]}", "next_step": result.next_step}
    return asdict(result) | {"result": word(result), "share": result.share}


def lines(name: str, result: Verified | InstepError) -> list[str]:
    if isinstance(result, InstepError):
        return [f"{name}: failed: {type(result).__name__}: {result}"]
    label = "DIRTY" if result.dirty else result.version or "its own first weights"
    differ, unread = len(result.differing), len(result.unread)
    text = f"{result.engine} ({label}): {word(result)}: "
    text += f"{result.equal} of {result.equal + differ + unread} tensors equal, {differ} differ, "
    text += f"{unread} cannot be read back; {floor(100 * result.share)} % of the bytes were"
    text += f" ({result.compared / 1e6:.1f} of {result.total / 1e6:.1f} MB)"
    if result.canary_gap is not None:
        text += f", canary gap {result.canary_gap:.2g} (bound {CANARY_BOUND:g})"
    found = [text, *_named("differs", result.differing), *_named("not read back", result.unread)]
    if word(result) == "not all compared":
        found.append("  next: --canary compares what the engine computes")
    return found


def _named(kind: str, tensors: dict[str, str]) -> list[str]:
    shown = [f"  {kind}: {name}: {why}" for name, why in list(tensors.items())[:SHOWN]]
    return shown + [f"  {kind}: {len(tensors) - SHOWN} more"] * (len(tensors) > SHOWN)
