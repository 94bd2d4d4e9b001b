"""A block that ends when the client has left, in the task that runs it."""

from __future__ import annotations

import asyncio

import pytest

from hibachi.server.web.exchange import Gone, Leaving


async def left_by(*calls):
    """What a block raises during which these are called, and how often its task is cancelled behind it."""
    ready, task = asyncio.Event(), asyncio.current_task()
    try:
        with Leaving() as leaving:
            for call in calls:
                asyncio.get_running_loop().call_soon(call, leaving, task)
            await ready.wait()
    except (Gone, asyncio.CancelledError) as e:
        return type(e), task.cancelling()


def now(leaving, task):
    leaving.now()


def cancel(leaving, task):
    task.cancel()


@pytest.mark.parametrize(
    ("calls", "raised"),
    (
        ((now,), (Gone, 0)),
        ((now, now), (Gone, 0)),
        ((cancel,), (asyncio.CancelledError, 1)),
        ((now, cancel), (asyncio.CancelledError, 1)),
        ((cancel, now), (asyncio.CancelledError, 1)),
    ),
    ids=lambda given: "-".join(f.__name__ for f in given if callable(f)),
)
def test_who_leaves_ends_the_block_and_nothing_else_is_taken_for_it(calls, raised):
    """One that others cancel as well stays cancelled."""
    assert asyncio.run(left_by(*calls)) == raised


def test_an_error_of_the_block_goes_on_and_behind_it_nobody_is_cancelled():
    async def failing():
        with Leaving() as leaving:
            leaving.now()
            raise ValueError("of the block")

    async def over():
        with Leaving() as leaving:
            pass
        assert leaving.now() is False
        await asyncio.sleep(0)
        return asyncio.current_task().cancelling()

    with pytest.raises(ValueError, match="of the block"):
        asyncio.run(failing())
    assert asyncio.run(over()) == 0
