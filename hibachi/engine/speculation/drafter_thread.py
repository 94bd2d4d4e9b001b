"""A drafter in a thread of its own: no step waits for it longer than it was told to, and none fails with it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from hibachi.engine.speculation.protocol import NOTHING, Checked, Drafter, Tokens, checked
from hibachi.errors import text_of

log: logging.Logger = logging.getLogger("hibachi.draft")

PATIENCE = 3  # failures in a row after which a drafter is off
LATELY = 0.2  # how much of `DrafterThread.seconds` is the last question's


class _Question(NamedTuple):
    keys: list[Hashable]
    tokens: list[Tokens]
    most: list[int]


class _Over(NamedTuple):
    key: Hashable


class DrafterThread:
    """Asks a drafter. All calls come from one thread, that of the steps: `ask` as soon as a step's tokens are known,
    and `take` when the next step begins.

    An answer that is late, an exception, or something that is no proposals is a failure. After three in a row the
    drafter is off, and the log says so once. name: what the log calls it.
    """

    off: bool
    seconds: float  # that `take` has waited lately; 0 before the first

    def __init__(self, drafter: Drafter, vocab_size: int, name: str) -> None:
        self._drafter, self._vocab_size, self._name = drafter, vocab_size, name
        self._work: SimpleQueue[_Question | _Over | None] = SimpleQueue()
        self._answers: SimpleQueue[Checked] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._due = False  # the next `take` is for a question
        self._busy = False  # an answer is to come
        self._new = False  # ... to the newest question
        self._failures = 0
        self._forgets = callable(getattr(drafter, "forget", None))
        self.off = False
        self.seconds = 0.0

    def ask(self, keys: Sequence[Hashable], tokens: Sequence[Tokens], most: Sequence[int]) -> None:
        """Ask for proposals, as `Drafter.propose`; the tokens are copied. While it is busy with an earlier question, it
        is not asked, which counts as late.
        """
        if self.off or not keys:
            return
        self._due = True
        self._new = not self._busy or self._answer(0.0) is not None  # what came too late is dropped
        if not self._new:
            return
        if self._thread is None:
            of = (self._drafter, self._vocab_size, self._work, self._answers)
            self._thread = threading.Thread(target=_run, args=of, name="hibachi-drafter", daemon=True)
            self._thread.start()
        self._busy = True
        self._work.put(_Question(list(keys), [row.copy() for row in tokens], list(most)))

    def take(self, wait: float = 0.0) -> list[Tokens] | None:
        """The proposals for the rows of the last `ask`, int32 arrays in their order; None if there are none in time.

        wait: seconds to wait for them. While this thread runs Python code, the drafter's hardly does: with 0, answers
        come in time only if this thread has waited for something else since it asked.
        """
        if not self._due:
            return None
        self._due = False
        began = time.perf_counter()
        answer = self._answer(wait) if self._new else None
        self.seconds += LATELY * (time.perf_counter() - began - self.seconds)
        wrong = f"no answer within {wait * 1000:.3g} ms" if answer is None else answer.wrong
        if wrong is None:
            self._failures = 0
        else:
            self._fail(wrong)
        return None if answer is None else answer.proposals

    def forget(self, key: Hashable) -> None:
        """A request is over."""
        if self._thread is not None and not self.off and self._forgets:
            self._work.put(_Over(key))

    def close(self) -> None:
        """End the thread once it has answered; the drafter is asked no more."""
        if not self.off:
            self.off = True
            self._due = False
            self._work.put(None)

    def _answer(self, wait: float) -> Checked | None:
        try:
            answer = self._answers.get(timeout=wait)
        except Empty:
            return None
        self._busy = False
        return answer

    def _fail(self, wrong: str) -> None:
        self._failures += 1
        if self._failures == PATIENCE:
            self.close()
            log.warning(
                "The drafter %r is off, as it failed %d times in a row; the last time: %s. Requests go on without its "
                "proposals.",
                self._name,
                PATIENCE,
                wrong,
            )


def _run(
    drafter: Drafter, vocab_size: int, work: SimpleQueue[_Question | _Over | None], answers: SimpleQueue[Checked]
) -> None:
    trouble = None  # in forgetting; told with the next answer
    while (to_do := work.get()) is not None:
        try:
            if isinstance(to_do, _Over):
                drafter.forget(to_do.key)  # type: ignore[attr-defined]  # the protocol does not ask for it
                continue
            answer = checked(drafter.propose(*to_do), to_do.most, vocab_size)
        except BaseException as e:
            if isinstance(to_do, _Over):
                trouble = text_of(e)
                continue
            answer = Checked([NOTHING] * len(to_do.most), text_of(e))
        answers.put(answer._replace(wrong=answer.wrong or trouble))
        trouble = None
