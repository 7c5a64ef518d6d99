"""`check_weights_changed` of the worker extensions."""

from __future__ import annotations

from functools import partial

import pytest
from helpers.rlhf_workers import Engine
from helpers.toys import ToyHost

from instep.dropin.extension import RoundsExtension
from instep.errors import VersionConflict
from unit.dropin.test_dropin_rounds import alone


def test_whether_weights_changed_is_told_by_digests_that_are_known(host: ToyHost) -> None:
    rounds = alone(host)
    worker = Engine(1).workers[0]
    vars(worker)["instep_rounds"] = rounds
    changed = partial(RoundsExtension.check_weights_changed, worker)
    rounds.receiver.history.update({"one": "a", "two": "b", "one again": "a", "live": None})
    for now, answers in {"one": (False, True, False), "two": (True, False, True), "one again": (False, True, False)}.items():
        rounds.receiver.version = now
        assert (changed(since="one"), changed(since="two"), changed(since="one again")) == answers
        with pytest.raises(VersionConflict, match="only the trainer knows the digests of 'live'"):
            changed(since="live")
    rounds.receiver.version = "live"
    assert changed(since="live") is False
    with pytest.raises(VersionConflict, match="only the trainer knows the digests of 'one' and 'live'"):
        changed(since="one")
    with pytest.raises(VersionConflict, match="did not serve 'three'; it served one, two, one again, live"):
        changed(since="three")
