"""How many proposals pay: what a step costs by its number of tokens, how often a row's proposals are right, and from
both the set that raises the expected tokens per second the most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

SAMPLES = 15  # steps of a size whose median is what such a step costs
TRIALS = 3  # steps after which a size is known: the first may compile or grow something
REFRESH = 16  # steps after which what was learned counts
AGE = 1000  # steps after which a size that did not run is forgotten, as contexts and machines change
PRIOR = 0.6  # of proposals, how many are right before any was seen
HIGHEST = 0.98  # no guess is certain, however long the record
HOLDS = 16  # steps for which it holds whether guesses could pay
WEIGHT = 3.0  # what a record begins with counts as so many proposals
MEMORY, COMMON_MEMORY = 0.95, 0.99  # how much of a record counts still after a step
START, STAY = 1.08, 1.04  # gains from which a step has guesses: after a step without any, after one with some
PROBE = 0.01  # of the time of all steps, how much a draft model may take to find out whether it pays by now
SAVED = 0.05  # seconds of that which are kept for later at most
LASTS = 32  # steps among which the time is shared that a draft model takes to get up to a row's newest token
DECIDED = 4  # steps for which it stays at no guesses where none pay
PLAIN = 16  # of the steps that have guesses, one in so many has none: what such steps take must be known
PROOF = 64, 8, 20.0  # steps with guesses that are looked at, and how often; trust in what is expected, in tokens
PAUSE = 64, 4096  # steps without guesses, at least and at most, after some that brought less than expected


class Costs:
    """What a step of so many tokens takes, in seconds, learned from the steps that run.

    Steps are put together by size: 1, 2, 3, 4, up to 6, 8, 12, 16, ... tokens. Of each size the median counts, but no
    step costs more than a larger one: where it seems so, others had the machine at that time. Between known sizes the
    cost is linear. Beyond the largest, and before one that is further away than twice the tokens, it
    goes on as before up to twice the tokens; from there it is taken to grow in proportion, or towards the next. So
    larger steps are tried out little by little.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._sizes: dict[int, _StepSize] = {}
        self._curve: tuple[Any, Any] | None = None  # tokens and seconds at the corners
        self._expected: dict[int, float] = {}

    def note(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens, with its proposals among them, has taken so many seconds."""
        self._steps += 1
        size = self._sizes.get(_size_of(tokens))
        if size is None:
            size = self._sizes[_size_of(tokens)] = _StepSize()
        if self._steps - size.last > AGE:
            size.steps.clear()
        size.last = self._steps
        size.steps.append((tokens, max(seconds, 1e-9)))
        if len(size.steps) <= TRIALS or self._steps % REFRESH == 0:
            self._curve = None
            self._expected.clear()

    def knows(self, tokens: int) -> bool:
        """Whether steps of this size were measured."""
        size = self._sizes.get(_size_of(tokens))
        return size is not None and self._is_known(size)

    def predict(self, tokens: Any) -> Any:
        """Seconds for a step of so many tokens, or for each number of an array. Some size must be known."""
        if self._curve is None:
            self._curve = self._corners()
        return np.interp(tokens, *self._curve)

    def expect(self, tokens: float) -> float:
        """`predict` for one number, rounded; 0 as long as no size is known, so that it becomes known."""
        n = round(tokens)
        if (found := self._expected.get(n)) is None:
            known = any(self._is_known(size) for size in self._sizes.values())
            found = self._expected[n] = float(self.predict(n)) if known else 0.0
        return found

    def _is_known(self, size: _StepSize) -> bool:
        return len(size.steps) >= TRIALS and self._steps - size.last <= AGE

    def _corners(self) -> tuple[Any, Any]:
        known = sorted(size.cost() for size in self._sizes.values() if self._is_known(size))
        if not known:
            raise ValueError("No size of a step is known: ask knows() first.")
        least = list(accumulate((seconds for _, seconds in reversed(known)), min))
        known = [(x, y) for (x, _), y in zip(known, reversed(least), strict=True)]
        corners: list[tuple[float, float]] = []
        slope = 0.0
        for (x, y), (after, more) in zip(known, [*known[1:], (1000 * known[-1][0], np.inf)], strict=True):
            if corners:
                slope = max(0.0, (y - corners[-1][1]) / (x - corners[-1][0]))
            corners.append((x, y))
            if after > 2 * x and y + slope * x < y + (more - y) * x / (after - x):
                corners.append((2 * x, y + slope * x))
        x, y = corners[-1]
        xs, ys = zip(*corners, (1000 * x, 1000 * y), strict=True)
        return np.array(xs), np.array(ys)


class _StepSize:
    """The last steps of a size: tokens, seconds. last: the number of the newest one."""

    def __init__(self) -> None:
        self.steps: deque[tuple[int, float]] = deque(maxlen=SAMPLES)
        self.last = 0

    def cost(self) -> tuple[float, float]:
        seconds = sorted(s for _, s in self.steps)
        return sum(t for t, _ in self.steps) / len(self.steps), seconds[len(seconds) // 2]


def _size_of(tokens: int) -> int:
    """The largest number of tokens of the same size: a power of two, or three quarters of one."""
    power: int = 1 << (tokens - 1).bit_length()
    return 3 * power // 4 if tokens <= 3 * power // 4 else power


class Records:
    """Of each request, how likely its next proposed token is right, by who proposes. A new one begins with what is
    common.
    """

    def __init__(self) -> None:
        self._common: dict[str, _Record] = {}
        self._each: dict[Hashable, dict[str, _Record]] = {}

    def rate(self, key: Hashable, by: str = "") -> float:
        record = self._each.get(key, {}).get(by) or self._common.get(by)
        return PRIOR if record is None else min(record.rate, HIGHEST)

    def note(self, key: Hashable, tried: int, right: int, by: str = "") -> None:
        """Of `tried` proposals the first `right` were what came.

        A step that took none of a request's proposals can say whether the first would have been right: so a record
        gets better again without a step that costs more.
        """
        common = self._common.setdefault(by, _Record(PRIOR))
        own = self._each.setdefault(key, {})
        record = own.get(by)
        if record is None:
            record = own[by] = _Record(common.rate)
        seen = min(right + 1, tried)  # of those behind a wrong one, nothing is known
        record.note(seen, right, MEMORY)
        common.note(seen, right, COMMON_MEMORY)

    def forget(self, key: Hashable) -> None:
        self._each.pop(key, None)


class _Record:
    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._seen, self._right = WEIGHT, WEIGHT * rate

    def note(self, seen: int, right: int, memory: float) -> None:
        self._seen = memory * self._seen + seen
        self._right = memory * self._right + right
        self.rate = self._right / self._seen


def best(
    tokens: int, counts: Sequence[int], rates: Sequence[float], seconds: Callable[[Any], Any], budget: int
) -> tuple[list[int], float]:
    """Of n rows' proposals, how many of each are worth computing, and the gain in tokens per second.

    tokens: of the step without proposals. counts: how many proposals each row has. rates: how likely the next one of
    each row is right, if those before it are; below 1. seconds: what steps of so many tokens cost. budget: the most
    proposals.
    """
    n = np.asarray(counts, np.int64)
    row = np.repeat(np.arange(len(n)), n)
    nth = np.arange(1, len(row) + 1) - np.repeat(np.cumsum(n) - n, n)
    likely = np.asarray(rates, np.float64)[row] ** nth
    order = np.argsort(-likely, kind="stable")[:budget]  # of a row, the earlier ones first
    if not len(order):
        return [0] * len(n), 1.0
    more = np.arange(len(order) + 1)
    speed = (tokens + np.concatenate([[0.0], np.cumsum(likely[order])])) / seconds(tokens + more)
    most = int(np.argmax(speed))
    return np.bincount(row[order[:most]], minlength=len(n)).tolist(), float(speed[most] / speed[0])


class HowMany:
    """Chooses for each step how many proposals its rows compute."""

    def __init__(self) -> None:
        self.costs, self.records = Costs(), Records()
        self._some = False  # the last step that could have guesses had some
        self._answers: dict[tuple[int, int, bool], bool] = {}  # of `worth`, which hold for some steps
        self._asked = 0

    def worth(self, tokens: int, most: int) -> bool:
        """Whether `most` guesses could pay in a step of so many tokens if they were as good as any: else nobody needs
        to make them. False where it is not known yet what the step costs without them.
        """
        if most <= 0 or not self.costs.knows(tokens):
            return False
        self._asked += 1
        if self._asked % HOLDS == 0:  # costs change slowly, and an answer takes as long as a step of a small model
            self._answers.clear()
        answer = self._answers.get((tokens, most, self._some))
        if answer is None:
            more = np.arange(most + 1)
            speed = (tokens + HIGHEST * more) / self.costs.predict(tokens + more)
            answer = bool(speed.max() >= self._enough() * speed[0])
            self._answers[tokens, most, self._some] = answer
        return answer

    def pays(self, tokens: int, counts: Sequence[int], rates: Sequence[float], seconds: float) -> bool:
        """As `worth`, for guesses as good as each row's were so far, by somebody who takes so many seconds for them."""
        if not any(counts) or not self.costs.knows(tokens):
            return False
        alone = float(self.costs.predict(tokens))
        _, gain = best(tokens, counts, rates, lambda n: self.costs.predict(n) + seconds, sum(counts))
        return gain * alone >= self._enough() * (alone + seconds)

    def choose(self, tokens: int, counts: Sequence[int], rates: Sequence[float], budget: int) -> list[int]:
        """How many of its proposals each of n rows computes.

        tokens: of the step without proposals: all that it computes, prompts and what is certain as well. counts: how
        many proposals each row has. rates: of each row, as `Records.rate`. budget: the most proposals of the step.
        """
        none = [0] * len(counts)
        if not any(counts) or budget <= 0 or not self.costs.knows(tokens):
            return none
        found, gain = best(tokens, counts, rates, self.costs.predict, budget)
        self._some = gain >= self._enough()
        return found if self._some else none

    def _enough(self) -> float:
        return STAY if self._some else START


class _Proof:
    """Of the tokens per second that were expected of steps with guesses, how many came: `share`. Some steps are held
    up by others on the machine, so the median of their times counts.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=PROOF[0])
        self._count = 0

    def note(self, gain: float, spent: float, came: float) -> None:
        """The expected gain; the time of the step, as a share of one without guesses; tokens of a row."""
        self._steps.append((gain, spent, came))
        self._count += 1
        if self._count % PROOF[1] == 0:
            gains, times, tokens = zip(*self._steps, strict=True)
            usual = sorted(times)[len(times) // 2]
            self.share = (PROOF[2] + sum(tokens)) / (PROOF[2] + sum(gains) * usual)


class Depth:
    """How many guesses of each row a draft model makes in a step, before it makes them. Its own time counts.

    What is expected of them is compared with what comes. Where that is too little, it pauses, longer each time.

    costs: of its calls, by their tokens; it notes them itself. how: of the main model.
    """

    def __init__(self, how: HowMany) -> None:
        self.costs, self._how = Costs(), how
        self._goes = _Record(1.0)  # of the guesses that it was asked for, how many it was sure enough to make
        self._proof = _Proof()
        self._saved, self._probes, self._probe = 0.0, 0, 0.0  # _probe: what the guess of this step should cost
        self._rows, self._steps = 0, 0  # of the last step, and how many in a row could have guesses since some pay
        self._rest, self._pause, self._paused = 0, PAUSE[0], False
        self._gain = 0.0  # that is expected of this step; 0 if it has no guesses, or some for a trial

    def choose(self, lacks: Sequence[int], rates: Sequence[float], most: Sequence[int]) -> list[int]:
        """How many guesses to ask for, for each of n rows that would compute one token each.

        lacks: tokens of each row that the draft model must compute before its first guess; 0 means it makes none.
        rates: as `Records.rate`. most: the most guesses of each row, >= 1.

        All zero where none pays; now and then one row gets one guess then, so that its record can get better.
        """
        n = len(most)
        rests, self._gain = self._rests(n), 0.0
        asked = [] if rests else [i for i in range(n) if lacks[i]]
        if not asked or not self._how.costs.knows(n):
            return [0] * n
        k, gain = deepest(
            n,
            [rates[i] for i in asked],
            self._goes.rate,
            max(most[i] for i in asked),
            self._how.costs.expect,
            self.costs.expect,
            len(asked) + (sum(lacks[i] for i in asked) - len(asked)) / LASTS,
        )
        if self._pays(gain):
            self._steps += 1
            if self._steps % PLAIN == 0:
                return [0] * n
            self._gain = gain
            return [min(k, most[i]) if lacks[i] else 0 for i in range(n)]
        probe = asked[self._probes % len(asked)]
        if self._saved < min(SAVED, cost := self.costs.expect(lacks[probe])):
            return [0] * n
        self._probes += 1
        self._saved -= cost
        self._probe = cost
        return [1 if i == probe else 0 for i in range(n)]

    def _rests(self, rows: int) -> bool:
        """Whether it is known without a look that this step has no guesses."""
        same, self._rows = rows == self._rows, rows
        if self._rest and (same or self._paused):
            self._rest -= 1
            return True
        if self._paused:
            self._paused, self._proof = False, _Proof()
        return False

    def _pays(self, gain: float) -> bool:
        enough = STAY if self._steps else START
        if gain * self._proof.share >= enough:
            return True
        self._rest = DECIDED
        if gain >= enough:  # it should
            self._pause = PAUSE[0] if self._steps > PAUSE[0] else min(2 * self._pause, PAUSE[1])
            self._rest, self._paused = self._pause, True
        self._steps = 0
        return False

    def note(self, asked: int, made: int) -> None:
        """Of a row's guesses that it was asked for, it made the first `made`."""
        self._goes.note(min(made + 1, asked), made, COMMON_MEMORY)

    def took(self, seconds: float, asking: float = 0.0, tokens: int = 0) -> None:
        """A step of the main model has taken so long, after so long for guesses, and has brought so many tokens; 0 if
        others than the rows of `choose` had a part in it.
        """
        self._saved = min(SAVED, self._saved + PROBE * seconds)
        if self._probe:
            self._saved -= max(0.0, asking - self._probe)
            self._probe = 0.0
        gain, self._gain = self._gain, 0.0
        if gain and tokens:
            self._proof.note(gain, (seconds + asking) / self._how.costs.expect(self._rows), tokens / self._rows)


def deepest(
    tokens: int,
    rates: Sequence[float],
    goes: float,
    most: int,
    seconds: Callable[[float], float],
    draft: Callable[[float], float],
    lack: float,
) -> tuple[int, float]:
    """How many guesses of each of n rows to make, and the expected gain in tokens per second, the draft model's time
    included. In plain Python, as most steps have few rows.

    tokens: of the step without guesses. rates: how likely a row's next guess is right. goes: how likely it is made.
    seconds, draft: what calls of so many tokens cost. lack: tokens that the draft model computes before.
    """
    each, one = [rate * goes for rate in rates], draft(len(rates))
    right, made, cost, expected = list(each), 0.0, draft(lack), 0.0
    found, best_speed = 1, 0.0
    for k in range(1, most + 1):
        expected += (more := sum(right))
        if more < best_speed * one:  # even if the main model took no longer for them; and later ones are worth less
            break
        made += len(rates) * goes**k
        speed = (tokens + expected) / (seconds(tokens + made) + cost)
        if speed > best_speed:
            found, best_speed = k, speed
        cost += one
        right = [a * b for a, b in zip(right, each, strict=True)]
    return found, best_speed * seconds(tokens) / tokens


WINDOW = 16  # steps that are waited for, until they are judged
REST = 64, 4096  # steps between two such windows, at least and at most: twice as many each time that it did not pay
BETTER = 1.02  # gain from which steps are waited for further on


class Waits:
    """Tries now and then to wait for steps, and goes on as long as these bring more tokens per second, with their
    proposals, than steps that begin before the last one is read.

    always: steps are waited for without a trial.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._ahead = Costs()  # of steps that begin before the last one is read
        self._left, self._rest = REST[0], REST[0]  # steps until the next window
        self._steps = 0  # of this window
        self._won = self._spent = 0.0  # seconds that its tokens would have taken otherwise, and did take
        self.waiting: bool = always
        """Whether the next step is waited for."""

    def note_ahead(self, rows: int, seconds: float) -> None:
        """A step of so many rows that decode has begun before the last one was read."""
        if self._always:
            return
        self._ahead.note(rows, seconds)
        self._left -= 1
        self.waiting = self._left <= 0 and self._ahead.knows(rows)

    def note_waited(self, rows: int, tokens: int, seconds: float) -> None:
        """A step of so many rows that decode was waited for, and has brought so many tokens."""
        if not self.waiting or self._always:
            return
        self._steps += 1
        if self._ahead.knows(rows):
            self._won += float(self._ahead.predict(rows)) * tokens / rows
            self._spent += seconds
        if self._steps < WINDOW:
            return
        pays = self._spent > 0 and self._won >= BETTER * self._spent
        self._steps, self._won, self._spent = 0, 0.0, 0.0
        if pays:
            self._rest = REST[0]
            return
        self._left, self._rest = self._rest, min(2 * self._rest, REST[1])
        self.waiting = False
