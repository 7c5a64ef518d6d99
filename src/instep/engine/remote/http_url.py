"""Reads a server's URL: its scheme, its short name, and whether it is on this machine."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

from instep.engine.remote.http_token import is_loopback
from instep.errors import ConfigError

HOST_AND_PORT = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):\d+(/[^?#@]*)?")


class Place(NamedTuple):
    """Where a server is. url: with its scheme. local: whether the server is on this machine."""

    url: str
    name: str
    local: bool


def place(url: str) -> Place:
    """Reads a URL. `host:8000`, which errors and `instep status` print, means
    `http://host:8000`. No error shows the URL: it may hold a password.

    Raises `ConfigError` for a URL that is none or holds a password.
    """
    url = (f"http://{url}" if HOST_AND_PORT.fullmatch(url) else url).rstrip("/")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError("an engine's URL has no valid host or port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError("an engine's URL is like http://host:8000 or https://host/path")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("an engine's URL must not hold a password: set INSTEP_TOKEN, or give HttpEngine(url, token=...)")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    name = host + (f":{port}" if port else "") + parts.path.rstrip("/")
    return Place(url, name, is_loopback(parts.hostname))
