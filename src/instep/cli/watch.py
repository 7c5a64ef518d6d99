"""`instep watch`: what each engine serves, live."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, Queue

from rich.console import Group
from rich.live import Live
from rich.text import Text

from instep.cli.output import console
from instep.cli.server_status import COLUMNS, Row, as_json, ask, table
from instep.errors import InstepError

Pressed = Callable[[float], str]

EVERY = 1.0  # seconds
BLINK = 0.05  # seconds within which a key is seen
FIELDS = ("engine", "version", "lag", "state", "last_pause", "last_error")


def watch(urls: list[str], /, *, json: bool = False) -> int:
    """Show what the engines of servers serve, asked once a second, until q or Ctrl-C.

    Keys: s sorts by the next column, r reverses, q quits. Where standard output is no terminal, the
    table is printed at each change.

    Parameters
    ----------
    urls
        Of servers that `instep serve` started, such as http://gpu1:8000.
    json
        Print the rows as one line of JSON on stdout at each change.
    """
    view = View()
    with suppress(KeyboardInterrupt), keys() as pressed:
        if json or not sys.stdout.isatty():
            changes(urls, json, pressed)
        else:
            live(urls, view, pressed)
    return 0


class View:
    """The order of the rows."""

    def __init__(self) -> None:
        self.column, self.reverse = 0, False

    def press(self, key: str) -> bool:
        """Applies a key. Returns whether to go on."""
        if key == "s":
            self.column, self.reverse = (self.column + 1) % len(COLUMNS), False
        elif key == "r":
            self.reverse = not self.reverse
        return key not in ("q", "\x03", "\x04")

    def sorted(self, rows: Sequence[Row]) -> list[Row]:
        """Returns the rows in order. Rows without a value come last in either direction."""
        field = FIELDS[self.column]
        having = [row for row in rows if getattr(row, field) is not None]
        return sorted(having, key=lambda row: getattr(row, field), reverse=self.reverse) + [row for row in rows if row not in having]

    def shown(self, rows: Sequence[Row]) -> Group:
        order = f"{COLUMNS[self.column]}, {'last' if self.reverse else 'first'} to {'first' if self.reverse else 'last'}"
        return Group(table(self.sorted(rows)), Text(f"\nsorted by {order}    s next column   r reverse   q quit", "dim"))


@contextmanager
def keys() -> Iterator[Pressed]:
    """Yields a function that waits so many seconds for a key and returns its letter, or an empty
    string. It never returns a letter if standard input is no terminal."""
    if not sys.stdin.isatty():
        yield no_key
        return
    import select
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""  # not through a buffer, which `select` does not see

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def answers(urls: Sequence[str], pressed: Pressed) -> Iterator[tuple[list[Row] | None, str]]:
    """Yields the rows when they come and each key when it is pressed. Raises what `ask` raises."""
    heard: Queue[list[Row] | InstepError] = Queue()
    threading.Thread(target=_ask_on, args=(urls, heard), daemon=True).start()  # nobody who quits waits for a silent server
    while True:
        with suppress(Empty):
            said = heard.get_nowait()
            if isinstance(said, InstepError):
                raise said
            yield said, ""
        if key := pressed(BLINK):
            yield None, key


def _ask_on(urls: Sequence[str], heard: Queue[list[Row] | InstepError]) -> None:
    try:
        while True:
            heard.put(ask(urls))
            time.sleep(EVERY)
    except InstepError as error:
        heard.put(error)


def changes(urls: Sequence[str], json: bool, pressed: Pressed) -> None:
    before: list[Row] = []
    for rows, key in answers(urls, pressed):
        if key and not View().press(key):
            return
        if rows is not None and rows != before:
            before = rows
            if json:
                print(as_json(rows), flush=True)
            else:
                console().print(table(rows))


def live(urls: Sequence[str], view: View, pressed: Pressed) -> None:
    last: list[Row] = []
    with Live(Text(f"asking {', '.join(urls)}", "dim"), console=console(), auto_refresh=False) as screen:
        for rows, key in answers(urls, pressed):
            if key and not view.press(key):
                return
            last = rows if rows is not None else last
            if last:
                screen.update(view.shown(last), refresh=True)
