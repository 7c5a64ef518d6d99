"""Write constraints.txt: the versions of all packages in this environment. Run by `make constraints`.

A version's local part (`+cpu`) is left out, and so is what each build of torch pins itself: the
same release of torch for GPUs then fits too.
"""

from __future__ import annotations

import re
from importlib.metadata import distributions

from setup import CONSTRAINTS, ROOT

HEAD = """\
# The versions that the tests passed with. scripts/setup.py installs them; users of instep are free.
# Made by `make constraints`, see CONTRIBUTING.md.
"""
LEFT_OUT = re.compile(r"instep|pip|triton|(nvidia|cuda)-.*")


def pinned() -> list[str]:
    found = {re.sub(r"[-_.]+", "-", one.name).lower(): one.version.partition("+")[0] for one in distributions()}
    return [f"{name}=={version}" for name, version in sorted(found.items()) if not LEFT_OUT.fullmatch(name)]


if __name__ == "__main__":
    (ROOT / CONSTRAINTS).write_text(HEAD + "\n".join(pinned()) + "\n")
