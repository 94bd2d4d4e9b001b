"""Whether other requests never change a bit of one: what was decided, and what a trial of the model found."""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import replace

from hibachi.engine.batchengine import Facts
from hibachi.engine.runners.cached import CachedRunner
from hibachi.engine.runners.groups import telling
from hibachi.engine.runners.selfcheck import ProposalsDiffer, selfcheck, steps
from hibachi.engine.speculation.config import SpeculativeConfig

log: logging.Logger = logging.getLogger("hibachi.engine")
UNTRIED = "that other requests change no bit of one is being tried beside the first requests, and was not found false"


class Promise:
    """Of a model with a cache. deterministic: None means that something else decides, see `Built`.

    Where the bits have a name, they are those of kernels that were tested, and a trial is a matter of caution. There it
    runs beside the first requests, which need not wait for it: the thread that steps the engine takes one step of it
    after each of its own, and goes on where there is nothing else to do. So no call of the model runs beside another
    one, and requests are at most so much later as if they had waited.
    """

    def __init__(self, deterministic: bool | None, *, asked: bool, config: SpeculativeConfig | None) -> None:
        """asked: a difference is an error, and found before the first request. config: of proposals."""
        self.deterministic = deterministic
        self.differ: str | None = None  # how the bits of a step with proposals differ from those of others
        self._asked, self._config = asked, config
        self._trial: Generator[int, None, int] | None = None
        self.waits: bool = False
        """Whether the trial was left for later: only then an engine has to do with this."""
        self._why: str | None = None  # the promise is not kept
        self._runner: CachedRunner | None = None  # that was tried
        self._fingerprint = ""

    def check(self, runner: CachedRunner) -> bool:
        """Try a new runner if need be, now or by `step`; whether it is deterministic, as far as is known. Raises
        NotDeterministic, and what the model raises, if determinism was asked for.
        """
        self._runner, self._fingerprint = runner, runner.backend.fingerprint()
        if not self.deterministic:
            self._settle(None)
            return False
        speculated = self._config is not None and runner.cannot_speculate() is None
        named = runner.backend.numerics is not None and getattr(runner.model, "portable", False)
        # A trial of compiled programs compiles those that requests will need, and for a cache of the same size.
        if named and not self._asked and not runner.backend.shapes.compiled:
            self.waits, self._trial = True, steps(runner, speculated=speculated)
            return True
        try:
            with telling(runner.name):
                selfcheck(runner, unused=True, speculated=speculated)
        except Exception as e:
            self._settle(e)
        else:
            self._settle(None)
        return self.deterministic

    def step(self) -> bool:
        """Take a step of a trial that was left for later; whether there was one to take. Only for the thread that steps
        the engine.
        """
        if self._trial is None:
            return False
        try:
            next(self._trial)
        except StopIteration:
            self._settle(None)
        except Exception as e:
            self._settle(e)
        return True

    def again(self) -> int:
        """Try it once more, see `selfcheck`; 0 means that there is nothing to try here. One that was left for later is
        not needed any more then. Raises NotDeterministic.
        """
        if self._runner is None:
            return 0
        compared = selfcheck(self._runner, speculated=self._runner.cannot_speculate() is None)
        if self._trial is not None:
            self._settle(None)
        return compared

    def close(self) -> None:
        """There will be no further step."""
        if self._trial is not None:
            self._trial.close()

    def _settle(self, error: Exception | None) -> None:
        self._trial = None
        if isinstance(error, ProposalsDiffer):
            self.differ = str(error)
            if self._config is not None and not self._config.auto:
                self.deterministic, self._why = False, self.differ
                log.warning("deterministic=False, as speculative_config may change bits: %s", error)
        elif error is not None:
            if self._asked:
                raise error
            self.deterministic, self._why = False, f"the check of the model failed: {error}"
            log.warning("deterministic=False, as %s", self._why)
        log.info("deterministic=%s; %s", bool(self.deterministic), self._fingerprint)
        if not self.proposes:
            log.info("speculative_config: off from now on, as proposals may change bits")

    @property
    def proposes(self) -> bool:
        """False: tokens were proposed where that paid, until it was found that they may change bits."""
        auto = self._config is not None and self._config.auto
        return not (self.waits and auto and (self.differ is not None or not self.deterministic))

    def told(self, facts: Facts) -> Facts:
        """An engine's facts from before the trial, as they are now."""
        if not self.waits:
            return facts
        remark = UNTRIED if self._trial is not None else self._why or self.differ
        if remark is None:
            return facts
        speculates, remarks = facts.speculates and self.proposes, (*facts.remarks, remark)
        return replace(facts, deterministic=bool(self.deterministic), speculates=speculates, remarks=remarks)
