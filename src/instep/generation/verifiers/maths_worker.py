"""Compares answers for `maths.py`: JSON in, JSON out, over a socket. Runs as a script in a process
of its own."""

import json
import math
import resource
import sys
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    from math_verify import parse, verify

    memory = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    asker = Connection(int(sys.argv[2]))
    while True:
        try:
            question = json.loads(asker.recv_bytes())
        except (EOFError, OSError):  # who asked is gone
            return
        reply: dict[str, float | str] = {"score": 0.0}
        if question:
            # Deadlines are the asker's: math-verify's own are alarms, which interrupt anything but
            # a call into C.
            expected = parse(question["expected"], parsing_timeout=None)
            if expected:
                answer = parse(question["answer"], parsing_timeout=None)
                right = verify(expected, answer, timeout_seconds=None) or near(expected, answer, question.get("tolerance", 0.0))
                reply = {"score": float(right)}
            else:
                reply = {"error": "is no mathematics"}
        asker.send_bytes(json.dumps(reply).encode())


def near(expected: list[Any], answer: list[Any], tolerance: float) -> bool:
    """Whether a number of the answer differs from an expected one by at most `tolerance` of the
    latter's size."""
    if not tolerance:
        return False
    for one in expected:
        for other in answer:
            try:
                wanted, found = float(one), float(other)
            except (TypeError, ValueError):
                continue
            if math.isfinite(found) and abs(found - wanted) <= tolerance * abs(wanted):
                return True
    return False


if __name__ == "__main__":
    main()
