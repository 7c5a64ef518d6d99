"""`instep status`: what each engine serves."""

from __future__ import annotations

from instep.cli import FAILED, PARTLY
from instep.cli.output import console
from instep.cli.server_status import as_json, ask, table


def status(urls: list[str], /, *, json: bool = False) -> int:
    """Ask servers what their engines serve: version, lag, state, last pause, last error.

    Exit code 0 if every engine serves, 3 if some do, 1 if none does. Nothing is changed.

    Parameters
    ----------
    urls
        Of servers that `instep serve` started, such as http://gpu1:8000.
    json
        Print the rows as JSON on stdout.
    """
    rows = ask(urls)
    if json:
        print(as_json(rows))
    else:
        console().print(table(rows))
    serving = sum(row.state in ("serving", "paused") for row in rows)
    return 0 if serving == len(rows) else PARTLY if serving else FAILED
