"""Compares answers for `maths.py`: a line of JSON in, a line of JSON out. Runs as a script in a process of its own."""

import json
import resource
import sys


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
                reply = {"score": float(verify(expected, parse(question["answer"], parsing_timeout=None), timeout_seconds=None))}
            else:
                reply = {"error": f"the label {question['expected']!r} is no mathematics"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
