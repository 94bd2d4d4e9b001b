"""Slots: hand-off at once, first come first served, fair between clients, and nothing lost when somebody leaves."""

import asyncio
import random
from collections import Counter
from contextlib import suppress

import pytest

from hibachi.router.fleet import Fleet
from hibachi.router.policies import Ask, LeastConnection
from hibachi.router.queue import NoSlot, Queues
from hibachi.router.upstreams import Place, UpstreamState

from ..lib.leaks import kept


def fleet(*limits, models=("m",)):
    made = Fleet([Place(f"http://{n}", limit=limit) for n, limit in zip("abcdef", limits, strict=False)])
    for u in made.upstreams:
        u.state, u.models = UpstreamState.UP, {model: {"id": model} for model in models}
    made.changed()
    return made


def lines(made, **more):
    return Queues(made, LeastConnection(), **more)


ASK = Ask("m")


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


def run(test):
    asyncio.run(asyncio.wait_for(test(), 20))


def test_b17_the_oldest_waiter_has_a_slot_as_soon_as_it_is_free():
    async def test():
        made = fleet(1)
        line, order = lines(made), []
        u = line.take(ASK)
        assert u is made.upstreams[0] and line.take(ASK) is None

        async def wait(n):
            found = await line.wait(ASK, "me", 10)
            order.append(n)
            line.give_back(found, ASK)

        tasks = [asyncio.ensure_future(wait(n)) for n in range(5)]
        await settled()
        assert line.waiting == 5 and u.in_flight == 1
        line.give_back(u, ASK)
        assert u.in_flight == 1  # it has changed hands, and was never free
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3, 4] and u.in_flight == line.waiting == 0

    run(test)


def test_the_newest_makes_room_also_of_those_that_came_in_one_tick(monkeypatch):
    """uvloop's clock stands still for a millisecond: then the last of equals is the newest."""

    async def test():
        line = lines(fleet(1), most=3)
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 1.0)
        u = line.take(ASK)
        greedy = [asyncio.ensure_future(line.wait(ASK, "greedy", 10)) for _ in range(3)]
        await settled()
        small = asyncio.ensure_future(line.wait(ASK, "small", 10))
        await settled()
        assert [task.done() for task in greedy] == [False, False, True] and not small.done()
        with pytest.raises(NoSlot, match="full"):
            await greedy.pop()
        for task in (*greedy, small):
            task.cancel()
        await asyncio.gather(*greedy, small, return_exceptions=True)
        line.give_back(u, ASK)

    run(test)


def test_who_asks_for_much_waits_behind_who_asks_for_little():
    async def test():
        made = fleet(1)
        line, order = lines(made), []
        u = line.take(ASK)

        async def wait(who):
            found = await line.wait(ASK, who, 10)
            order.append(who)
            line.give_back(found, ASK)

        tasks = [asyncio.ensure_future(wait(who)) for who in ("greedy",) * 6 + ("small",) * 2]
        await settled()
        line.give_back(u, ASK)
        await asyncio.gather(*tasks)
        assert order == ["greedy", "small", "greedy", "small", "greedy", "greedy", "greedy", "greedy"]

    run(test)


def test_a_slot_goes_to_whoever_can_use_it():
    """Of several models, to the one who came first; never to who has been there already."""

    async def test():
        made = fleet(1, 1)
        a, b = made.upstreams
        b.models = {"x": {"id": "x"}, "m": {"id": "m"}}
        made.changed()
        line = lines(made)
        assert {line.take(ASK), line.take(ASK)} == {a, b}
        first = asyncio.ensure_future(line.wait(Ask("x"), "1", 10))
        await settled()
        second = asyncio.ensure_future(line.wait(ASK, "2", 10, (a,)))
        await settled()
        third = asyncio.ensure_future(line.wait(ASK, "3", 10))
        await settled()
        line.give_back(a, ASK)
        assert await third is a
        line.give_back(b, ASK)
        assert await first is b and not second.done()
        line.give_back(b, ASK)
        assert await second is b
        for u in (a, b):
            line.give_back(u, ASK)
        assert line.waiting == 0

    run(test)


def test_too_many_too_late_and_nobody_there():
    async def test():
        made = fleet(1)
        line = lines(made, most=1, wait_for=0.05)
        u = line.take(ASK)
        late = asyncio.ensure_future(line.wait(ASK, "1", 0.1))
        await settled()
        with pytest.raises(NoSlot, match="full"):
            await line.wait(ASK, "2", 10)
        with pytest.raises(NoSlot, match="late"):
            await late
        u.state = UpstreamState.ILL
        began = asyncio.get_running_loop().time()
        with pytest.raises(NoSlot, match="none"):
            await line.wait(ASK, "3", 10)
        assert 0.04 < asyncio.get_running_loop().time() - began < 5
        waiting = asyncio.ensure_future(line.wait(ASK, "4", 10))
        await settled()
        u.state = UpstreamState.UP
        line.give_back(u, ASK)
        line.changed()
        assert await waiting is u
        line.give_back(u, ASK)
        with pytest.raises(NoSlot, match="none"):  # no model of that name
            await line.wait(Ask("other"), "5", 10)
        assert not line.waiting and not u.in_flight

    run(test)


def test_who_waits_for_what_is_lost_waits_no_longer():
    async def test():
        made = fleet(1, 1)
        line, u = lines(made, wait_for=10), made.upstreams[0]
        u.state = UpstreamState.ILL
        lost, pinned = (
            asyncio.ensure_future(line.wait(Ask("m", only=u.name, in_memory=kept), "1", 10)) for kept in (True, False)
        )
        await settled()
        assert not lost.done()
        u.gone = True
        line.changed()
        with pytest.raises(NoSlot, match="lost"):
            await lost
        assert not pinned.done()  # its file may be there again
        pinned.cancel()

    run(test)


def test_who_waits_for_a_slot_despairs_only_while_nobody_takes_requests():
    async def test():
        made = fleet(1)
        line = lines(made, wait_for=0.1)
        u = line.take(ASK)
        waiting = asyncio.ensure_future(line.wait(ASK, "1", 10))
        await settled()
        u.state = UpstreamState.ILL
        line.changed()
        await asyncio.sleep(0.05)
        u.state = UpstreamState.UP
        line.changed()
        await asyncio.sleep(0.15)
        assert not waiting.done()  # it is busy, but there
        u.state = UpstreamState.ILL
        line.changed()
        with pytest.raises(NoSlot, match="none"):
            await waiting

    run(test)


def test_b26_slots_are_never_negative_nor_above_the_limit():
    """Clients that leave at any moment, upstreams that come and go, limits that change."""

    async def test():
        rng = random.Random(5)
        made = fleet(2, 3, 1)
        line = lines(made, most=12, wait_for=0.01)
        done, ends, held = 0, Counter(), kept(line)

        async def client(n):
            nonlocal done
            ask = Ask(rng.choice(["m", "", f"only {n}"]))
            try:
                u = line.take(ask) or await line.wait(ask, f"{n % 5} {n // 50}", rng.choice([0.001, 1]))
            except (NoSlot, asyncio.CancelledError) as e:
                ends[str(e) or "left"] += 1
                return
            assert 0 < u.in_flight <= 3
            try:
                await asyncio.sleep(rng.random() * 0.002)
            finally:
                line.give_back(u, ask)
            done += 1

        tasks = []
        for n in range(600):
            tasks.append(asyncio.ensure_future(client(n)))
            if rng.random() < 0.2:
                rng.choice(tasks).cancel()
            if rng.random() < 0.1:
                u = rng.choice(made.upstreams)
                u.state = UpstreamState.ILL if u.takes else UpstreamState.UP
                line.changed()
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.002)
            assert all(0 <= u.in_flight <= u.place.limit for u in made.upstreams)
        for u in made.upstreams:
            u.state = UpstreamState.UP
        line.changed()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        assert done > 100 and line.waiting == 0 and min(ends[how] for how in ("full", "late", "none", "left")) > 0, ends
        assert kept(line) == held  # whoever leaves, and however, leaves nothing: neither a place nor an empty line
        assert [u.in_flight for u in made.upstreams] == [0, 0, 0]

    run(test)


def test_who_leaves_a_line_in_which_others_wait_leaves_nothing():
    async def test():
        line = lines(fleet(1))
        u = line.take(ASK)
        stays = asyncio.ensure_future(line.wait(ASK, "stays", 10))
        await settled()
        held = kept(line)
        for n in range(20):
            leaves, late = (asyncio.ensure_future(line.wait(ASK, f"{who} {n}", 0.001)) for who in "12")
            await settled()
            leaves.cancel()
            found = await asyncio.gather(leaves, late, return_exceptions=True)
            assert [type(e) for e in found] == [asyncio.CancelledError, NoSlot]
        assert kept(line) == held and line.waiting == 1
        line.give_back(u, ASK)
        line.give_back(await stays, ASK)

    run(test)


def test_who_leaves_the_configuration_ends_what_it_has():
    async def test():
        made = fleet(2, 2)
        line = lines(made)
        a, b = made.upstreams
        a.in_flight = 1
        made.settle([b.place])
        line.changed()
        assert made.upstreams == [b] and made.leaving == [a] and not a.takes
        assert line.take(ASK) is b
        line.give_back(a, ASK)
        assert made.leaving == []

    run(test)


@pytest.mark.parametrize("state", [UpstreamState.UP, UpstreamState.TRIED])
def test_a_slot_that_comes_as_its_client_leaves_goes_to_the_next(state):
    async def test():
        made = fleet(1)
        line = lines(made)
        u = line.take(ASK)
        first, second = (asyncio.ensure_future(line.wait(ASK, who, 10)) for who in "12")
        await settled()
        u.state = state
        line.give_back(u, ASK)  # to the first, which does not know yet
        first.cancel()
        assert await second is u and u.in_flight == 1 and (u.trial is ASK) == (state is UpstreamState.TRIED)
        line.give_back(u, ASK)
        assert u.in_flight == line.waiting == 0

    run(test)


def test_which_models_there_are_is_known_when_everybody_was_reached_once():
    made = fleet(1, 1)
    a, b = made.upstreams
    assert made.known
    a.state = UpstreamState.ILL
    assert made.known  # its models are still those that it had
    b.state = UpstreamState.ILL
    assert not made.known
    a.state, b.models = UpstreamState.UP, {}
    assert not made.known
    b.state = UpstreamState.UP
    assert made.known  # it has none
