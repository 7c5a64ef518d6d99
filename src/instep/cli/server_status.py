"""Asks servers about their engines, and makes rows of the answers. Imports little, so that
`status` and `watch` start at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
from rich.table import Table
from rich.text import Text

from instep.engine.remote.http_token import SET_IT, token_of, turned_away
from instep.engine.remote.http_url import Place, place
from instep.errors import WORDS
from instep.extras import needed_by

State = Literal["serving", "paused", "waiting", "dirty", "refused", "unreachable"]

PATH = "/instep/v1/status"
DEADLINE = 10.0  # seconds for an answer
SETTLING, AGAIN = 5.0, 0.2  # seconds; before another question
FIRST = "its own first weights"
HOLDING: dict[State, str] = {
    "serving": "serves",
    "paused": "is paused, and holds",
    "waiting": "does not generate yet, and holds",
}
COLOURS: dict[State, str] = {"serving": "green", "paused": "yellow", "waiting": "yellow"}  # else red
COLUMNS = ("engine", "version", "lag", "state", "last pause", "last error")


class Row(msgspec.Struct, frozen=True):
    """One engine.

    version: None for its own first weights. lag: versions begun since then that it does not serve.
    last_pause: seconds.
    state: `waiting` refuses to generate until it has caught up; `dirty` until a push heals it.
    `refused` does not let this caller in.
    """

    engine: str
    state: State
    version: str | None = None
    lag: int | None = None
    last_pause: float | None = None
    last_error: str | None = None

    def __str__(self) -> str:
        if self.state in HOLDING:
            return f"{self.engine}: {HOLDING[self.state]} {self.version or FIRST}"
        what = WORDS["dirty"] if self.state == "dirty" else self.state
        return f"{self.engine}: {what}" + (f" ({self.last_error})" if self.last_error else "")


def ask(urls: Sequence[str]) -> list[Row]:
    """Returns one row for each URL, in order, within `DEADLINE`. Raises `ConfigError` for an
    invalid URL."""
    with needed_by("an engine's URL"):
        import httpx  # noqa: F401
    places = [place(url) for url in urls]
    token = token_of()

    async def every() -> list[Row]:
        return await asyncio.gather(*(_row(place, token) for place in places))

    return asyncio.run(every())


def settled(urls: Sequence[str]) -> list[Row]:
    """Asks as `ask` does, again and again until no engine is paused, for `SETTLING` at most."""
    deadline = time.monotonic() + SETTLING
    rows = ask(urls)
    while any(row.state == "paused" for row in rows) and time.monotonic() < deadline:
        time.sleep(AGAIN)
        rows = ask(urls)
    return rows


async def _row(place: Place, token: str | None) -> Row:
    import httpx

    url, name, local = place
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        async with asyncio.timeout(DEADLINE), httpx.AsyncClient(trust_env=not local, timeout=None) as client:
            response = await client.get(url + PATH, headers=headers)
        said = response.json()
    except TimeoutError:
        return Row(name, "unreachable", last_error=f"no answer within {DEADLINE:g} s")
    except httpx.TransportError as error:
        return Row(name, "unreachable", last_error=f"{type(error).__name__}: {error}".rstrip(": "))
    except ValueError:
        said = None
    if response.status_code == 401:
        return Row(name, "refused", last_error=f"{turned_away(bool(headers))}: {SET_IT}")
    if response.status_code != 200 or not isinstance(said, dict) or "versions" not in said:
        state: State = "refused" if response.status_code == 403 else "unreachable"
        return Row(name, state, last_error=_why(response.status_code, said))
    return row(name, said)


def row(name: str, said: dict[str, Any]) -> Row:
    """Makes a row of the answer of a server's status route."""
    refuses = said.get("refuses")
    state: State = "dirty" if said["state"] == "dirty" else "waiting" if refuses else "paused" if said.get("paused") else "serving"
    errors = [worker["last_error"] for worker in said.get("workers", ()) if worker.get("last_error")]
    error = refuses or (errors[0] if errors else None)
    return Row(name, state, " and ".join(said["versions"]) or None, said.get("lag"), said.get("last_pause"), error)


def _why(status: int, said: Any) -> str:
    text = said.get("error") if isinstance(said, dict) else None
    if isinstance(text, str) and status in (403, 503):
        return text
    return f"answered {status}: it has no instep routes, start it with `instep serve`"


def table(rows: Iterable[Row]) -> Table:
    made = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        made.add_column(name, justify="right" if name in ("lag", "last pause") else "left", overflow="fold")
    for one in rows:
        version = one.version or (FIRST if one.state not in ("refused", "unreachable") else "")
        pause = "" if one.last_pause is None else f"{1e3 * one.last_pause:.0f} ms"
        texts = [one.engine, version, "" if one.lag is None else str(one.lag), one.state, pause, " ".join((one.last_error or "").split())]
        made.add_row(*(Text(text, COLOURS.get(one.state, "red") if text is texts[3] else "") for text in texts))
    return made


def as_json(rows: Sequence[Row]) -> str:
    return msgspec.json.encode({"engines": rows}).decode()
