"""The `instep` command. For `instep --help` only this file, cyclopts and the commands' docstrings
are read; a command's own file is imported when it runs, or is asked for its own help.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 partly done (some of the engines), 4 digests differ,
5 not all compared, 130 interrupted.
With `--json` the result alone is on stdout; everything else goes to stderr.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import instep
from instep import extras
from instep.cli.output import end_by_sigpipe, outputs, reader_left
from instep.errors import DigestMismatch, InstepError, SyncError

if TYPE_CHECKING:
    from cyclopts import App

FAILED, PARTLY, DIGESTS_DIFFER, NOT_ALL_COMPARED = 1, 3, 4, 5
INTERRUPTED = 130  # as shells have it
EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 partly done, 4 digests differ, "
    "5 not all compared, 130 interrupted. With --json the result alone is on stdout."
)

COMMANDS = ("demo", "doctor", "plan", "serve", "push", "status", "watch", "verify", "bench")
"""Each is a function in the file of its name."""


def app() -> App:
    """Makes the command line for cyclopts. Raises `ModuleNotFoundError` without cyclopts."""
    from cyclopts import App, Parameter

    root = App(
        name="instep",
        help="Keep LLM inference engines in step with a trainer's weights.",
        help_epilogue=EXIT_CODES,
        version=lambda: instep.__version__,
        default_parameter=Parameter(negative=()),
        result_action="return_value",
    )
    for name in COMMANDS:
        root.command(f"instep.cli.{name}:{name}", name=name, help=docstring(name))
    root.register_install_completion_command(help="Install completion for the shell that runs this.")
    return root


def docstring(command: str) -> str | None:
    """Returns a command's docstring, read without importing the command's packages."""
    module = ast.parse(Path(__file__).with_name(f"{command}.py").read_text())
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    return ast.get_docstring(next(node for node in functions if node.name == command))


def exit_code(error: InstepError) -> int:
    if isinstance(error, DigestMismatch):
        return DIGESTS_DIFFER
    if isinstance(error, SyncError) and any(state.serving == "new" for state in error.engines):
        return PARTLY
    return FAILED


def missing(error: ImportError) -> str | None:
    """Returns what to install for a command that lacks a package of an extra; None for any other
    error."""
    cause = error.__cause__  # cyclopts wraps errors of a command's own file
    package = extras.missing_package(cause if isinstance(cause, ImportError) else error)
    return f"MissingExtra: {extras.missing('this command', package)}" if package else None


def main() -> None:
    """Entry point of the console script. Ends the process."""
    try:
        root = app()
    except ModuleNotFoundError as error:
        if error.name != "cyclopts":
            raise
        sys.exit('the instep command needs cyclopts: pip install "instep[cli]"')
    try:
        sys.exit(finished(root))
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


def finished(root: App) -> int:
    """Runs the command that the arguments name. Returns its exit code.

    Ends the process where nobody reads its output any more.
    """
    read = outputs()
    try:
        code: int = root(sys.argv[1:])
        print(end="", flush=True)
        return code
    except (BrokenPipeError, SystemExit):  # rich makes the latter of the former
        if reader_left(read):
            end_by_sigpipe()
        raise
