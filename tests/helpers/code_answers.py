# ruff: noqa: E501
"""Answers with the score that they deserve: `(name, answer, tests, score)`."""

from __future__ import annotations

from typing import Any


def python(text: str) -> str:
    return f"```python\n{text}\n```"


DOUBLE = "def double(x):\n    return 2 * x"
DOUBLES: list[Any] = ["assert double(2) == 4", "assert double(-1) == -2"]
TWO: list[Any] = [{"input": "", "output": "2"}]
READ: list[Any] = [{"input": "1\n", "output": "2\n"}, {"input": "41\n", "output": "42\n"}]
LIES = """
class Yes:
    def __init__(self, *a, **k): pass
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __sub__(self, other): return 0.0
    __rsub__ = __add__ = __radd__ = __mul__ = __abs__ = __sub__
    def __round__(self, n=None): return self
    def __hash__(self): return 1
    def __getattr__(self, name): return lambda *a, **k: True
"""

RIGHT: list[tuple[str, str, list[Any], float]] = [
    ("a function", python(DOUBLE), DOUBLES, 1.0),
    ("a program", python("print(int(input()) + 1)"), READ, 1.0),
    ("both kinds of tests", python(f"{DOUBLE}\nprint(2)"), [*TWO, *DOUBLES], 1.0),
    ("stderr", python("import sys\nprint('debug', file=sys.stderr)\nprint(2)"), TWO, 1.0),
    ("a warning", python("import warnings\nwarnings.warn('w')\nprint(2)"), TWO, 1.0),
    ("python3", "```python3\nprint(2)\n```", TWO, 1.0),
    ("Python", "```Python\nprint(2)\n```", TWO, 1.0),
    ("py", "```py\nprint(2)\n```", TWO, 1.0),
    ("PY3 and words", "```PY3 title=\"a.py\"\nprint(2)\n```", TWO, 1.0),
    ("a class in braces", "```{.python .numbered}\nprint(2)\n```", TWO, 1.0),
    ("no language", "```\nprint(2)\n```", TWO, 1.0),
    ("tildes", "~~~python\nprint('```')\nprint(2)\n~~~", [{"input": "", "output": "``` 2"}], 1.0),
    ("four backticks", "````python\nprint('''\n```\n''')\nprint(2)\n````", [{"input": "", "output": "``` 2"}], 1.0),
    ("no fence", "print(2)", TWO, 1.0),
    ("CRLF", "```python\r\nif True:\r\n    print(2)\r\n```\r\n", TWO, 1.0),
    ("a later block in another language", python("print(2)") + "\nRun it:\n```bash\npython a.py\n```", TWO, 1.0),
    ("a later block without a language", python("print(2)") + "\nIt prints:\n```\n2\n```", TWO, 1.0),
    ("later code between backticks", python("print(2)") + "\nUsage: ```x```", TWO, 1.0),
    ("backticks within", python("print('''```x\n''');print(2)"), [{"input": "", "output": "```x 2"}], 1.0),
    ("the last of two", python("print(3)") + "\nNo:\n" + python("print(2)"), TWO, 1.0),
    ("a block in a list", "1. So:\n\n   ```python\n   if True:\n       print(2)\n   ```\n", TWO, 1.0),
    ("a block that is not closed", "```python\nprint(2)", TWO, 1.0),
    ("closed at the end of a line", "```python\nprint(2)```", TWO, 1.0),
    ("70 KB", python("print('x' * 70_000)"), [{"input": "", "output": "x" * 70_000}], 1.0),
    ("3 MB", python("print('x' * 3_000_000)"), [{"input": "", "output": "x" * 3_000_000}], 1.0),
    ("prints much beside its function", python(f"print('x' * 5_000_000)\n{DOUBLE}"), DOUBLES, 1.0),
    ("prints in its function", python("def double(x):\n    print('1\\n' * 1000)\n    return 2 * x"), DOUBLES, 1.0),
    ("a main part", python(f"{DOUBLE}\nif __name__ == '__main__':\n    double(int(input()))"), DOUBLES, 1.0),
    ("a dataclass", python("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int"), ["assert P(1).x == 1", "assert P(1) == P(1)"], 1.0),
    ("pickle", python("import pickle\nclass P:\n    def __init__(self): self.x = 1"), ["assert pickle.loads(pickle.dumps(P()))", "assert pickle.loads(pickle.dumps(P())).x == 1"], 1.0),
    ("copies", python("class P:\n    def __init__(self): self.x = [1]"), ["import copy\np = P()\nq, r = copy.deepcopy(p), copy.copy(p)\np.x.append(2)\np.y = 3\nassert q.x == [1] and not hasattr(r, 'y')"], 1.0),
    ("a class with a state", python("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()"), ["s = Stack()\ns.push(3)\ns.push(4)", "assert s.pop() == 4", "assert s.items == [3]"], 1.0),
    ("changes its argument", python("def sort(x): x.sort()"), ["a = [3, 1, 2]\nsort(a)\nassert a == [1, 2, 3]"], 1.0),
    ("a generator", python("def count(n):\n    yield from range(n)"), ["assert list(count(3)) == [0, 1, 2]", "assert next(iter(count(1))) == 0", "assert sum(count(4)) == 6"], 1.0),
    ("an endless generator", python("def count():\n    n = 0\n    while True:\n        yield n\n        n += 1"), ["from itertools import islice", "assert list(islice(count(), 3)) == [0, 1, 2]"], 1.0),
    ("takes a function", python("def twice(f, x): return f(f(x))"), ["assert twice(lambda x: x + 1, 3) == 5", "assert twice(abs, -3) == 3"], 1.0),
    ("returns a function", python("def adder(n): return lambda x: x + n"), ["assert adder(2)(3) == 5"], 1.0),
    ("raises", python("def f(x):\n    raise ValueError('no')"), ["try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'", "import pytest\nwith pytest.raises(ValueError, match='no'):\n    f(1)"], 1.0),
    ("raises its own", python("class Wrong(KeyError): pass\ndef f(): raise Wrong('a')"), ["try:\n    f()\nexcept Wrong as e:\n    assert e.args == ('a',)\nelse:\n    assert False"], 1.0),
    ("a coroutine", python("async def f(x): return x + 1"), ["import asyncio\nassert asyncio.run(f(1)) == 2"], 1.0),
    ("named tuples", python("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)"), ["assert f() == (1, 2)", "assert f().x == 1", "assert f() == P(1, 2)", "x, y = f()\nassert y == 2"], 1.0),
    ("counters and the like", python("from collections import *\ndef f(s): return Counter(s)\ndef g():\n    d = defaultdict(list)\n    d[1].append(2)\n    return d\ndef h(): return deque([1])\ndef o(): return OrderedDict(a=1)"), ["assert f('aab') == {'a': 2, 'b': 1}", "assert f('aab').most_common(1) == [('a', 2)]", "assert g() == {1: [2]}", "from collections import deque\nassert h() == deque([1])", "assert list(o()) == ['a']"], 1.0),
    ("all kinds of values", python("def same(x): return x"), [f"x = {x}\nassert same(x) == x and type(same(x)) is type(x)" for x in ("None", "True", "10**5000", "-1.5e300", "float('inf')", "'\\udc80é'", "b'\\x00\\xff'", "(1, (2,))", "{1, 2}", "frozenset([1])", "{(1, 2): [3]}", "1+2j", "range(3)", "bytearray(b'a')", "__import__('decimal').Decimal('0.10')", "__import__('fractions').Fraction(1, 3)", "__import__('datetime').datetime(2026, 1, 2, 3)", "__import__('datetime').timedelta(days=1)")], 1.0),
    ("numpy", python("import numpy as np\ndef f(n): return np.arange(n)\ndef g(): return np.float32(0.5)"), ["import numpy as np\nassert np.array_equal(f(3), [0, 1, 2])", "assert (f(3) == np.arange(3)).all()", "assert f(3).shape == (3,)", "assert g() == 0.5"], 1.0),
    ("an enumeration", python("import enum\nclass Colour(enum.Enum):\n    RED = 1\ndef f(): return Colour.RED"), ["assert f() == Colour.RED", "assert f() is Colour.RED", "assert f().value == 1", "assert f().name == 'RED'"], 1.0),
    ("imports for its tests", python("import math\nfrom collections import Counter\ndef f(): return 1 / 3"), ["assert math.isclose(f(), 0.333333, rel_tol=1e-3)", "assert Counter('aa')['a'] == 2"], 1.0),
    ("a variable", python("total = 0\ndef add(x):\n    global total\n    total += x"), ["add(1)", "assert total == 1"], 1.0),
    ("operators of its own class", python("class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n    def __eq__(self, o): return self.x == o.x\n    def __lt__(self, o): return self.x < o.x\n    def __len__(self): return self.x\n    def __repr__(self): return f'V({self.x})'"), ["assert V(1) + V(2) == V(3)", "assert V(1) < V(2)", "assert len(V(3)) == 3", "assert repr(V(1)) == 'V(1)'", "assert not V(1) == V(2)", "assert sorted([V(2), V(1)])[0].x == 1"], 1.0),
    ("a tree that the tests build", python("def depth(n): return 0 if n is None else 1 + max(depth(n.left), depth(n.right))\ndef flip(n):\n    n.left, n.right = n.right, n.left\n    return n"), ["class Node:\n    def __init__(self, left=None, right=None):\n        self.left, self.right = left, right", "assert depth(Node(Node(), None)) == 2", "n = Node(Node())\nassert flip(n) is n and n.left is None and n.right is not None"], 1.0),
    ("a check function", python(DOUBLE), ["def check(candidate):\n    assert candidate(1) == 2\n    assert candidate('a') == 'aa'\ncheck(double)"], 1.0),
    ("unittest", python("import unittest\ndef f(): return 1"), ["unittest.TestCase().assertEqual(f(), 1)"], 1.0),
    ("its own queue", python("class Q:\n    def put(self, x): self.x = x\n    def get(self): return self.x\nqueue = Q()"), ["queue.put(2)\nassert queue.get() == 2"], 1.0),
    ("compares by a method", python("class P:\n    def __init__(self, x): self.x = x\n    def equals(self, o): return self.x == o.x"), ["assert P(1).equals(P(1))", "assert not P(1).equals(P(2))"], 1.0),
    ("the name of a builtin", python("def sum(x):\n    return 0\ndef f(): return [1, 2]"), ["assert sum(f()) == 3"], 1.0),
]  # fmt: skip

WRONG: list[tuple[str, str, list[Any], float]] = [
    ("wrong", python("def double(x): return x"), DOUBLES, 0.0),
    ("half", python("def double(x): return abs(2 * x)"), DOUBLES, 0.0),
    ("nothing", "", DOUBLES, 0.0),
    ("no Python", "I do not know.", TWO, 0.0),
    ("prints more", python("print(2)\nprint(3)"), TWO, 0.0),
    ("prints the right thing on stderr", python("import sys\nprint(2, file=sys.stderr)"), TWO, 0.0),
    ("fails after it printed", python("print(2)\nraise SystemExit(1)"), TWO, 0.0),
    ("is killed after it printed", python("print(2)\nimport os; os.abort()"), TWO, 0.0),
    ("breaks when it is loaded", python(f"{DOUBLE}\n1 / 0"), DOUBLES, 0.0),
    ("an endless stream", python("while True: print('2 ' * 1000)"), TWO, 0.0),
    ("prints numbers", python("print('0\\n1\\n' * 1000)\nimport sys; sys.stdout.flush()\nimport os; os._exit(0)"), DOUBLES, 0.0),
    ("writes numbers to all descriptors", python("import os\nfor n in range(64):\n    try: os.write(n, b'0\\n1\\n')\n    except OSError: pass"), DOUBLES, 0.0),
    ("opens its outputs anew", python("for n in (1, 2, 3):\n    for way in ('/proc/self/fd', '/proc/1/fd', '/dev/fd'):\n        try: open(f'{way}/{n}', 'w').write('0\\n1\\n')\n        except OSError: pass"), DOUBLES, 0.0),
    ("says it is ready and passes", python("import os, struct, json\nfor m in ({'ready': True}, {'value': {'dict': []}, 'after': []}, {'value': True, 'after': []}):\n    d = json.dumps(m).encode()\n    os.write(3, struct.pack('I', len(d)) + d)"), DOUBLES, 0.0),
    ("junk in its channel", python("import os\nos.write(3, b'\\xff' * 1000)"), DOUBLES, 0.0),
    ("a huge message", python("import os\nos.write(3, b'\\xff\\xff\\xff\\xff' + bytes(1000))"), DOUBLES, 0.0),
    ("deep JSON", python("import os, struct\nd = b'[' * 100_000\nos.write(3, struct.pack('I', len(d)) + d)\nimport time; time.sleep(1)"), DOUBLES, 0.0),
    ("compile replaced", python("import builtins\nbuiltins.compile = lambda *a, **k: '0'"), DOUBLES, 0.0),
    ("exec and AssertionError replaced", python("import builtins\nbuiltins.exec = lambda *a, **k: None\nbuiltins.AssertionError = type('E', (Exception,), {})"), DOUBLES, 0.0),
    ("exits", python("raise SystemExit(0)"), DOUBLES, 0.0),
    ("os._exit", python("import os; os._exit(0)"), DOUBLES, 0.0),
    ("exits in its function", python("def double(x):\n    import os; os._exit(0)"), DOUBLES, 0.0),
    ("raises SystemExit in its function", python("def double(x): raise SystemExit(0)"), DOUBLES, 0.0),
    ("raises what ends loops", python("def f():\n    raise StopIteration"), ["for x in f():\n    assert False"], 0.0),
    ("looks at frames", python("import sys\nf = sys._getframe()\nwhile f:\n    f.f_globals.update(assert_=None, judge=lambda: None)\n    f = f.f_back\ndef double(x):\n    f = sys._getframe()\n    while f:\n        for v in list(f.f_locals.values()):\n            if isinstance(v, dict) and 'expected' in v: return v['expected']\n        f = f.f_back"), DOUBLES, 0.0),
    ("looks for the tests on its disk", python("import os, gc\nfound = [open(os.path.join(d, n), errors='replace').read() for d, _, ns in os.walk('.') for n in ns]\nfound += [o for o in gc.get_objects() if isinstance(o, str)]\nassert any('double(' + '-1)' in f for f in found if isinstance(f, str))\n" + DOUBLE), DOUBLES, 0.0),
    ("reads its parent's memory", python("import os\nopen(f'/proc/{os.getppid()}/mem', 'rb').read(1)\n" + DOUBLE), DOUBLES, 0.0),
    ("replaces what answers", python("import __main__\n__main__.Peer.perform = lambda *a: True"), DOUBLES, 0.0),
    ("a result that equals all", python(LIES + "double = Yes"), DOUBLES, 0.0),
    ("a number that equals all", python("class N(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\ndef double(x): return N(7)"), DOUBLES, 0.0),
    ("a list that equals all", python("class L(list):\n    def __eq__(self, o): return True\ndef f(): return L()"), ["assert f() == [1]"], 0.0),
    ("a text that starts with all", python(LIES + "f = Yes"), ["assert f().startswith('ab')"], 0.0),
    ("a number near all", python(LIES + "f = Yes"), ["assert abs(f() - 0.5) < 1e-6"], 0.0),
    ("says that it equals all", python(LIES + "f = Yes"), ["assert f().equals(2)"], 0.0),
    ("holds all", python(LIES + "f = Yes"), ["assert 2 in f()"], 0.0),
    ("larger than all", python(LIES + "f = Yes"), ["assert f() > 2"], 0.0),
    ("between all", python(LIES + "f = Yes"), ["assert 1 < f() < 3"], 0.0),
    ("a type that is all", python("class M(type):\n    def __instancecheck__(self, o): return True\nclass Y(metaclass=M):\n    __class__ = int\nf = Y"), ["assert isinstance(f(), int)"], 0.0),
    ("an array that equals all", python(LIES + "f = Yes"), ["import numpy as np\nassert np.array_equal(f(), [1, 2])"], 0.0),
    ("its own isclose", python("def isclose(*a, **k): return True\ndef f(): return 1.0"), ["assert isclose(f(), 2.0)"], 0.0),
    ("its own math", python("class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(): return 1.0"), ["assert math.isclose(f(), 2.0)"], 0.0),
    ("its own all and abs", python("def all(x): return True\ndef abs(x): return 0\ndef f(): return 1.0"), ["assert all([f() == 2])", "assert abs(f() - 3) < 1e-6"], 0.0),
    ("a value of a library that equals all", python("from unittest.mock import ANY, _ANY\ndef f(): return ANY\ng = _ANY"), ["assert f() == 2", "assert g() == 2"], 0.0),
    ("reaches for the tests through their function", python("def f(key):\n    key.__globals__['f'] = 1\n    return key.__code__.co_consts"), ["assert f(lambda x: 7)[1] == 7"], 0.0),
    ("asks the judge for more than it was given", python("import __main__\ndef f(key):\n    peer = key._peer\n    return peer.ask('get', 0, '__globals__')"), ["assert f(lambda x: x)['f']"], 0.0),
    ("gives the tests names that they did not ask for", python("import __main__\ndef double(x): return 1\ndef answer(*_): return {'all': ('value', lambda x: True), 'double': ('value', double)}\nreal = __main__.Peer.perform\n__main__.Peer.perform = lambda self, do, on, *a: answer() if (do, on) == ('call', 0) else real(self, do, on, *a)"), ["assert all([double(2) == 4])"], 0.0),
    ("gives a name a private member of a library", python("import __main__\n__main__.described = lambda v: ('member', 'random', '_os')\ndef f(): return 1"), ["assert f.getpid()", "assert f.path"], 0.0),
    ("its own unittest", python("class unittest:\n    class TestCase:\n        def assertEqual(self, a, b): pass\ndef f(): return 1"), ["unittest.TestCase().assertEqual(f(), 2)"], 0.0),
    ("lists without an end", python("def f():\n    while True: yield 0"), ["assert 1 in f()"], 0.0),
    ("a fork that answers later", python("import os\nif os.fork() == 0:\n    while True: pass\nprint(2)"), TWO, 0.0),
    ("a wrong type", python("def double(x): return str(2 * x)"), DOUBLES, 0.0),
    ("syntax", python("def double(x:"), DOUBLES, 0.0),
]  # fmt: skip
