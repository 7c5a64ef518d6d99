"""Runs untrusted Python programs: each apart from the machine, within limits, and leaving
nothing behind.

`level()` is what this machine gives, `SandboxLimits.sandbox` what a program insists on. docs/generation.md has what each protects from.
"""

from instep.generation.sandbox.kept import level, reasons, require
from instep.generation.sandbox.limits import LEVELS, Level, SandboxLimits
from instep.generation.sandbox.programs import End, Run
from instep.generation.sandbox.run import run_python

__all__ = ["LEVELS", "End", "Level", "Run", "SandboxLimits", "level", "reasons", "require", "run_python"]
