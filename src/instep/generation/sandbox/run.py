"""Runs programs through a keeper, a process that this one starts once (see `keeper.py`)."""

from __future__ import annotations

import asyncio
import socket

from instep.generation.sandbox.kept import kept
from instep.generation.sandbox.limits import SandboxLimits
from instep.generation.sandbox.programs import GRACE, REPORT, Prints, Run, job, lost, report


async def run_python(
    program: str, limits: SandboxLimits, stdin: str = "", *, prints: Prints = "all", channel: socket.socket | None = None
) -> Run:
    """Runs a program with this interpreter and its packages, in an environment of its own.
    Cancelling kills the program.

    channel: a socket that the program gets as descriptor 3; it is closed here. Raises `ConfigError` where this machine gives a weaker
    sandbox than `limits.sandbox`, and `MissingExtra`.
    """
    keeper = await kept(limits.sandbox)
    said = b""
    try:
        asker = keeper.start(channel)
    except OSError as error:
        return lost(f"its keeper is gone: {error}")
    finally:
        if channel:
            channel.close()
    reader, writer = await asyncio.open_unix_connection(sock=asker)
    try:
        async with asyncio.timeout(limits.seconds + GRACE):
            writer.write(job(program, limits, stdin, prints))
            await writer.drain()
            while len(said) <= limits.output + REPORT and (part := await reader.read(1 << 16)):
                said += part
    except TimeoutError:
        return lost(f"nothing was heard of it in {limits.seconds + GRACE:g} seconds")
    except OSError as error:
        return lost(f"its warden is gone: {error}")
    finally:
        writer.close()  # which ends all of it
    return report(said)
