"""One round: what has come of a trainer and is not committed (see `rounds.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from instep.dropin.together import Stage
from instep.errors import InstepError


@dataclass
class Round:
    """Tensors in the order in which they came, and what is known of the update that they are of."""

    stage: Stage
    names: list[str] = field(default_factory=list)
    fault: InstepError | None = None
    told: int = 0  # how many names had come when the trainer heard of an error
    says: bool = True  # the trainer says where the round ends
    whole: bool = False  # all weights have come, but the next name may show that some of them came alone
    doubtful: list[str] = field(default_factory=list)  # before any order is known: names that came alone, or began what followed
    unseen: bool = False  # before any order is known: a loader computes weights, and its end cannot be seen
    arrived: float = 0.0  # elements, and with how many of them the next look is due
    look_at: float = 0.0
