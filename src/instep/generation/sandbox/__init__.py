"""Runs untrusted Python programs: each apart from the machine, within limits, and leaving
nothing behind.

`level()` is what this machine gives, `SandboxLimits.sandbox` what a program insists on.
docs/generation.md has what each protects from.
"""

from instep.generation.sandbox.kept import level, reasons, require, run_python
from instep.generation.sandbox.programs import LEVELS, End, Level, Run, SandboxLimits

__all__ = ["LEVELS", "End", "Level", "Run", "SandboxLimits", "level", "reasons", "require", "run_python"]
