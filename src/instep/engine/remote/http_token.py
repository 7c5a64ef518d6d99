"""The token that opens an engine's control routes.

Trainers and servers find it in the variable `INSTEP_TOKEN`, or in the file that `INSTEP_TOKEN_FILE`
names.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path

from instep.errors import ConfigError

VARIABLE, FILE = "INSTEP_TOKEN", "INSTEP_TOKEN_FILE"
SET_IT = f"set {VARIABLE}, or {FILE}, to the token that the server was started with"
TOKEN = re.compile(r"[\x21-\x7e]{8,512}")


_taken: str | None = None


def token_of(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the token, or None if none is set. Raises `ConfigError` for a token that cannot be
    used, without showing it."""
    if _taken is not None and environment is os.environ:
        return _taken
    given, file = environment.get(VARIABLE), environment.get(FILE)
    if given and file:
        raise ConfigError(f"{VARIABLE} and {FILE} are both set: keep one of them")
    if file:
        try:
            given = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the file that {FILE} names: {type(error).__name__}") from None
        given = given or "-"  # an empty file is a mistake, not the wish to have no token
    return checked(given) if given else None


def take_token() -> str | None:
    """Takes the token out of the environment, so that processes started from now on do not
    inherit it. Later calls of `token_of` still find it."""
    global _taken
    _taken = token_of()
    os.environ.pop(VARIABLE, None)
    return _taken


def checked(token: str) -> str:
    if not TOKEN.fullmatch(token):
        raise ConfigError(
            "the token must be 8 to 512 printable ASCII characters without spaces",
            next_step=f"make one: {VARIABLE}=$(openssl rand -hex 32)",
        )
    return token


def refusal(header: bytes, token: str) -> str | None:
    """Why the server refuses a request with this `Authorization` header, or None. The comparison
    takes the same time for any token."""
    scheme, _, given = header.partition(b" ")
    if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), token.encode()):
        return None
    return "the token is not the server's" if header else f"these routes need a token: {SET_IT}"


def turned_away(sent: bool) -> str:
    """Says what an answer of 401 means. sent: whether the request had a token."""
    return "refused the token" if sent else "needs a token, and none is set here"


def is_loopback(host: str) -> bool:
    """Whether `host` is the loopback, which only processes of this machine reach."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
