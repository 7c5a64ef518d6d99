"""`instep push`: a checkpoint into running servers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from instep import WeightSync
from instep.cli import PARTLY
from instep.cli.checkpoints import CANARY, CANARY_BOUND, Checkpoint, Urls, advise, connected, version_of
from instep.cli.hub import found
from instep.cli.output import terminable
from instep.cli.server_status import settled
from instep.config import Require, TransportName, check_version
from instep.engine import Engine
from instep.errors import InstepError
from instep.telemetry import Event, Sink, progress_bar

SECONDS, BYTES_A_SECOND = 60.0, 100e6


def push(
    model: str,
    /,
    *,
    engine: Urls,
    version: str | None = None,
    require: Require = "all",
    transport: TransportName = "auto",
    canary: bool = False,
    json: bool = False,
) -> int:
    """Bring servers that are running to the weights of a checkpoint: all of them or none, proved to
    be the same bytes.

    Where the servers have a token, set INSTEP_TOKEN or INSTEP_TOKEN_FILE to it. Ctrl-C and SIGTERM
    end the push: engines go on, and the last lines say with what.

    Exit code 0 if every engine serves it, 3 if some do (the message says which), 4 if bytes
    differed on the way, 130 after Ctrl-C, 1 otherwise.

    Parameters
    ----------
    model
        A directory of safetensors files, one such file, or a Hub id, taken from huggingface_hub's
        cache or downloaded into it.
    engine
        URLs of servers that `instep serve` started, such as http://gpu1:8000.
    version
        The label of these weights; by default the directory's name, of a Hub id the revision.
    require
        `all`: no engine takes the version unless every one can. `any`: those that can go on without
        the others.
    transport
        How the bytes travel; `auto` takes the fastest that reaches every engine.
    canary
        Afterwards score a few tokens with the engines and with transformers: they have to agree.
    json
        Print the receipt as JSON on stdout.
    """
    engines, bar = connected(engine), progress_bar()  # what is wrong with them is said first
    if version is not None:
        check_version(version)
    with interruptible(engine, lambda: bar(Event("failed", version or ""))):
        source = Checkpoint(found(model))
        if version is None:
            version = version_of(source.folder)
            say(f"version {version}: the name of the directory, as --version does not say another")
        with following(source, engines, require, transport, canary, bar) as sync:
            receipt = sync.push(version)
            for line in casts(sync):
                say(line)
    why = receipt.why or ("it was asked for" if transport != "auto" else "the fastest")
    say(f"transport {receipt.transport}: {why}")
    print(msgspec.json.encode(receipt.as_dict()).decode() if json else receipt)
    return PARTLY if receipt.failed else 0


@contextmanager
def following(
    source: Checkpoint,
    engines: Sequence[Engine],
    require: Require,
    transport: TransportName,
    canary: bool,
    bar: Sink,
) -> Iterator[WeightSync]:
    """Yields the `WeightSync` for a checkpoint, and prints the settings it chose. An error's
    next step is one for the command line."""
    timeout = SECONDS + source.nbytes / BYTES_A_SECOND
    rate = f"one for every {BYTES_A_SECOND / 1e6:.0f} MB"
    say(f"timeout {timeout:.0f} s for each phase: {SECONDS:.0f}, and {rate}")
    if canary:
        bound = f"accepted up to a difference of {CANARY_BOUND:g} in a log-probability"
        say(f"canary: tokens {CANARY[0]} to {CANARY[-1]}, {bound}")
        source.score(list(CANARY))  # what is missing for it is said before anything moves
    try:
        with WeightSync(
            source,
            engines,
            require=require,
            transport=transport,
            cast=True,
            timeout=timeout,
            canary=CANARY if canary else None,
            canary_bound=CANARY_BOUND,
            sinks=[bar],
        ) as sync:
            yield sync
    except InstepError as error:
        advise(error)
        raise


@contextmanager
def interruptible(urls: Sequence[str], end: Callable[[], None]) -> Iterator[None]:
    """Makes Ctrl-C and SIGTERM end this block, and prints then what each engine serves.

    end: called before that.
    """
    try:
        with terminable():
            yield
    except KeyboardInterrupt:
        end()
        say("interrupted; what each engine serves now:")
        for row in settled(urls):
            say(f"  {row}")
        raise


def casts(sync: WeightSync) -> list[str]:
    """Returns lines about the tensors that the engine stores in other dtypes than the checkpoint
    has."""
    session = sync._session
    dtypes = {meta.name: meta.dtype for meta in session.described}
    plan = next((member.plan for member in session.fleet.members if member.plan is not None), None)
    lines = []
    for done, stored in (("rounded", plan.rounded), ("widened, which changes no value,", plan.widened)) if plan else ():
        pairs = Counter((dtypes[name], dtype) for name, dtype in stored.items())
        lines += [f"cast: {count} tensors {done} from {old} to {new}, which the engine stores" for (old, new), count in pairs.items()]
    return lines


def say(line: str) -> None:
    """Prints a choice and its reason to stderr; stdout belongs to the result."""
    print(line, file=sys.stderr)
