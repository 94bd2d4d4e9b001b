"""The models of these tests. The next token is the last one plus 1, unless said otherwise."""

import threading
from contextlib import nullcontext

import numpy as np

from hibachi import NumpyBackend

from ..lib.waits import PATIENCE, until  # noqa: F401  # for who imports both from here


class Next:
    """Level 0. Remembers the shape of every batch that it saw."""

    def __init__(self):
        self.shapes = []

    def forward(self, tokens):
        self.shapes.append(tokens.shape)
        return tokens[:, -1] + 1


class Soft:
    """Before a toy of level 2: its logits leave a doubt, so that sampling may draw any token."""

    def step(self, params, cache, x):
        logits, cache = super().step(params, cache, x)
        return logits / 500, cache


class Counting:
    """Before a toy of level 2: notes how many tokens each of its calls has; each program, where steps are compiled."""

    def __init__(self, backend):
        super().__init__(backend)
        self.sizes = []

    def step(self, params, cache, x):
        self.sizes.append(len(x.tok))
        return super().step(params, cache, x)


class Turnstile:
    """Lets one step through at a time, so that a test decides what happens during a step."""

    def __init__(self):
        super().__init__()
        self._begun, self._let = threading.Semaphore(0), threading.Semaphore(0)

    def arrive(self):
        """Called by a step when it begins."""
        self._begun.release()
        if not self._let.acquire(timeout=PATIENCE):
            raise TimeoutError("nobody opened the turnstile")

    def wait(self):
        """Until the next step has begun."""
        assert self._begun.acquire(timeout=PATIENCE)

    def let(self, n=1):
        """Let n steps through."""
        self._let.release(n)

    def open(self):
        """Let everything through from now on."""
        self.let(1000)


class Gate(Turnstile, Next):
    """Level 0, one forward pass at a time."""

    def forward(self, tokens):
        self.arrive()
        return super().forward(tokens)


class GatedNumpy(Turnstile, NumpyBackend):
    """One step at a time, whatever the model; free: any number."""

    free = False

    def guard(self):
        if not self.free:
            self.arrive()
        return nullcontext()


class Background(threading.Thread):
    """A call in a thread of its own, which does not outlive a test that fails."""

    def __init__(self, call, *args):
        super().__init__(daemon=True)
        self._call, self._args = call, args
        self._out = self._error = None
        self.start()

    def run(self):
        try:
            self._out = self._call(*self._args)
        except BaseException as e:
            self._error = e

    def result(self):
        self.join(PATIENCE)
        assert not self.is_alive(), "it hangs"
        if self._error is not None:
            raise self._error
        return self._out


def ints(items):
    return [int(np.asarray(i)) for i in items]


def step_with_nan(step, bad, params, cache, x):
    """A level-2 step on NumPy in which `bad` tokens [T] are NaN, in the cache too, and so is all that sees them.

    In a paged cache NaN is in the keys: see `ArrayBackend.storable`.
    """
    with np.errstate(invalid="ignore"):
        states = [layer.copy() for layer in cache if not isinstance(layer, tuple)]
        out, new = step(params, cache, x)
    sick = bad.copy()
    for state in states:
        sick |= np.isnan(state).any(axis=1)[x.seg]
    paged = [layer for layer in new if isinstance(layer, tuple)]
    before = None
    while before is None or (sick != before).any():  # a row may see what another writes in this call
        before = sick.copy()
        for keys, values in paged:
            keys.reshape(-1, *keys.shape[2:])[x.slot[sick]] = np.nan
            values.reshape(-1, *values.shape[2:])[x.slot[sick]] = 0
        for t, (i, at) in enumerate(zip(x.seg.tolist(), x.pos.tolist(), strict=True)):
            sick[t] |= (sick & (x.seg == i) & (x.pos <= at)).any()
            seen = (keys[x.block_table[i]].reshape(-1, keys[0, 0].size)[:at] for keys, _ in paged)
            sick[t] |= any(np.isnan(keys).any() for keys in seen)
    out[sick[x.last]] = np.nan
    for layer in new:
        if not isinstance(layer, tuple):
            layer[np.unique(x.seg[sick])] = np.nan
    return out, new
