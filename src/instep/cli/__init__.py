"""The `instep` command. Only this file and cyclopts are read for `instep --help`; a command's own file is imported when it runs.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 partly done (some of the engines), 4 digests differ.
With `--json` the result alone is on stdout; everything else goes to stderr.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from instep.errors import DigestMismatch, InstepError, SyncError

if TYPE_CHECKING:
    from cyclopts import App

FAILED, PARTLY, DIGESTS_DIFFER = 1, 3, 4
INTERRUPTED = 130  # as shells have it
EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 partly done, 4 digests differ. With --json the result alone is on stdout."

EXTRAS = {"vllm": "vllm", "ray": "ray", "httpx": "http", "rich": "cli", "transformers": "demo", "gguf": "demo", "matplotlib": "demo"}
"""Packages that only some commands need, and the extra that brings each."""


def app() -> App:
    """The command line as cyclopts sees it. Raises `ModuleNotFoundError` without cyclopts."""
    from cyclopts import App, Parameter

    root = App(
        name="instep",
        help="Keep LLM inference engines in step with a trainer's weights.",
        help_epilogue=EXIT_CODES,
        default_parameter=Parameter(negative=()),
        result_action="return_value",
    )
    root.command("instep.cli.demo:demo", name="demo", help="A language model learns while a live engine follows it.")
    root.command("instep.cli.doctor:doctor", name="doctor", help="What this machine has, and what to do about what it lacks.")
    root.command("instep.cli.plan:plan", name="plan", help="Which way each layer of a model takes into vLLM, and why.")
    root.command("instep.cli.serve:serve", name="serve", help="vLLM's server for a model, which trainers can push to.")
    root.command("instep.cli.push:push", name="push", help="A checkpoint into servers that are running.")
    root.command("instep.cli.status:status", name="status", help="What each server's engine serves, how far it is behind, what went wrong.")
    root.command("instep.cli.watch:watch", name="watch", help="The same, live.")
    root.command("instep.cli.verify:verify", name="verify", help="Whether servers hold the weights of a checkpoint.")
    root.command("instep.cli.bench:bench", name="bench", help="Pushes beside vLLM's own ways and the limits of this machine.")
    return root


def exit_code(error: InstepError) -> int:
    if isinstance(error, DigestMismatch):
        return DIGESTS_DIFFER
    if isinstance(error, SyncError) and any(state.serving == "new" for state in error.engines):
        return PARTLY
    return FAILED


def missing(error: ImportError) -> str | None:
    """What to install where a command could not import a package of an extra; None for any other error."""
    cause = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error  # cyclopts wraps those of a command's own file
    name = (cause.name or "").partition(".")[0]
    return f'ConfigError: this command needs {name}\n  next: pip install "instep[{EXTRAS[name]}]"' if name in EXTRAS else None


def main() -> None:
    """Entry point of the console script. Ends the process."""
    try:
        root = app()
    except ModuleNotFoundError as error:
        if error.name != "cyclopts":
            raise
        sys.exit('the instep command needs cyclopts: pip install "instep[cli]"')
    try:
        sys.exit(root(sys.argv[1:]))
    except InstepError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(exit_code(error))
    except ImportError as error:
        if (text := missing(error)) is None:
            raise
        print(text, file=sys.stderr)
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
