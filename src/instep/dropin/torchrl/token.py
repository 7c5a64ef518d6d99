"""What lets a receiver in that nobody gave a token to: one that the processes of a user on a
machine share.

TorchRL's page makes the scheme in both processes from the same arguments, and none of them is a
secret.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import tempfile
from pathlib import Path

from instep.engine.remote.http_token import token_of

logger = logging.getLogger("instep")


def default_token() -> str:
    """The environment's token; without one, this user's on this machine.

    Raises `ConfigError` for an environment's token that cannot be used.
    """
    return token_of() or _users_token()


def _users_token() -> str:
    """From a file that no other user can read. Random where there can be no such file."""
    folder = Path(tempfile.gettempdir()) / f"instep-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{folder} is open to other users")
        return _read_or_make(folder / "token")
    except OSError as error:
        logger.warning(
            "receivers in other processes need this scheme's token, which they cannot find by themselves: %s",
            error,
        )
        return secrets.token_hex(32)


def _read_or_make(path: Path) -> str:
    if not path.exists():
        new = path.with_name(secrets.token_hex(8))
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            os.link(new, path)  # whole, and the first one stays
        except FileExistsError:
            pass
        finally:
            new.unlink(missing_ok=True)
    return path.read_text()
