"""Verifiers judge an answer against the prompt's label. Each gives a score, 1 for right and 0
for wrong."""

from instep.generation.verifiers.base import Answer, Verifier
from instep.generation.verifiers.code import CodeTests, code_block
from instep.generation.verifiers.final import final
from instep.generation.verifiers.instructions import Instructions
from instep.generation.verifiers.numeric import Numeric, last_number
from instep.generation.verifiers.text import ExactMatch, Format, WordOverlap

__all__ = [
    "Answer",
    "CodeTests",
    "ExactMatch",
    "Format",
    "Instructions",
    "Numeric",
    "Verifier",
    "WordOverlap",
    "code_block",
    "final",
    "last_number",
]
