"""Compares answers for `maths.py`: a line of JSON in, a line of JSON out. Runs as a script in a process of its own."""

import json
import math
import resource
import sys
from typing import Any


def main() -> None:
    from math_verify import parse, verify

    memory = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    replies, sys.stdout = sys.stdout, sys.stderr  # nobody else prints among the replies
    for line in sys.stdin:
        question = json.loads(line)
        reply: dict[str, float | str] = {"score": 0.0}
        if question:
            # Deadlines are the asker's: math-verify's own are alarms, which interrupt anything but a call into C.
            expected = parse(question["expected"], parsing_timeout=None)
            if expected:
                answer = parse(question["answer"], parsing_timeout=None)
                right = verify(expected, answer, timeout_seconds=None) or near(expected, answer, question.get("tolerance", 0.0))
                reply = {"score": float(right)}
            else:
                reply = {"error": "is no mathematics"}
        print(json.dumps(reply), file=replies, flush=True)


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
