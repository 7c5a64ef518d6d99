"""A worker extension as a framework has one of its own: it knows nothing of instep."""

from __future__ import annotations


class Framework:
    def framework_says(self) -> str:
        return "mine"
