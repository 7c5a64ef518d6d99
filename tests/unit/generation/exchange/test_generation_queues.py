"""The ends of queues: items that wait for room, and what is handed over while somebody gives up."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import pytest
from helpers.rollouts import run, until

from instep.generation.exchange.queues import Port


class Counting(queue.Queue[Any]):
    """Counts attempts to put."""

    attempts = 0

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self.attempts += 1
        super().put(item, block, timeout)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred attempts of the real patience are half a minute."""
    monkeypatch.setattr("instep.generation.exchange.queues.PATIENCE", 0.002)


def never() -> bool:
    return False


@pytest.mark.usefixtures("impatient")
def test_an_item_waits_for_room_as_long_as_it_takes_and_the_event_loop_goes_on() -> None:
    async def story() -> None:
        items = Counting(maxsize=1)
        items.put("first")
        port, ticks = Port(items, "results"), 0
        putting = [asyncio.ensure_future(port.put(name, never)) for name in ("second", "third")]
        while items.attempts < 100:
            await asyncio.sleep(0)
            ticks += 1
        assert not any(task.done() for task in putting)
        assert ticks > 100
        found: list[str] = []
        while len(found) < 3:
            found.append(await asyncio.to_thread(items.get, True, 5.0))
        assert found == ["first", "second", "third"]
        assert await asyncio.gather(*putting) == [True, True]
        port.close()

    run(story())


@pytest.mark.usefixtures("impatient")
def test_an_item_that_is_not_wanted_any_more_is_not_put() -> None:
    async def story() -> None:
        items = Counting(maxsize=1)
        items.put("first")
        port, old = Port(items, "results"), False
        putting = asyncio.ensure_future(port.put("second", lambda: old))
        await until(lambda: items.attempts > 3)
        old = True
        assert await putting is False
        assert items.get() == "first"
        assert items.empty()
        port.close()

    run(story())


def test_what_arrives_while_its_taker_gives_up_is_not_lost() -> None:
    async def story() -> None:
        items: queue.Queue[str] = queue.Queue()
        port = Port(items, "prompts")
        getting = asyncio.ensure_future(port.get())
        await asyncio.sleep(0.01)
        getting.cancel()
        items.put("late")
        assert await getting == "late"
        port.close()

    run(story())
