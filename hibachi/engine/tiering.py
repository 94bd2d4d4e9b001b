"""Between an engine and its tiers: what a step stores and loads, and requests that wait for what stores have."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from hibachi.engine.build import Built
from hibachi.engine.runners.entries import bytes_of
from hibachi.engine.runners.job import Job
from hibachi.engine.runners.runner import Runner, raise_for_all
from hibachi.engine.scheduler.names import chained, state_name
from hibachi.engine.scheduler.scheduler import TOGETHER, Scheduler
from hibachi.engine.scheduler.step import EntryStores, StepPlan
from hibachi.engine.scheduler.tiers import Tiers
from hibachi.engine.tiers.config import KVTiers
from hibachi.engine.tiers.host import HostTier
from hibachi.engine.tiers.waiting import PendingLoads
from hibachi.errors import ConfigError, UnsupportedOperation, shown, text_of

log: logging.Logger = logging.getLogger("hibachi.engine")
FORMAT = b"hibachi tiers 1"
LATEST = 0.5  # seconds that a block waits for others to be stored with

Brought = Callable[[Job, "Exception | None"], None]


def made(tiers: KVTiers, model: Any, built: Built, brought: Brought) -> Tiering:
    """The tiers of a built engine. Raises ConfigError or UnsupportedOperation."""
    facts, name = built.facts, type(model).__name__
    identity = tiers.cache_id or getattr(model, "cache_id", None)
    if not isinstance(identity, str) or not identity:
        raise ConfigError(
            f"What tiers keep is found by other processes: expected {name} to have `cache_id`, a text that "
            f"names its weights and changes with them; got {shown(identity)}. Set it, or leave kv_tiers out."
        )
    source = built.runner.entries
    if source is None or not built.block_size:
        raise UnsupportedOperation(f"Tiers keep prefixes, and {name} shares none here. Leave kv_tiers out.")
    try:
        kinds = source.entry_kinds()
    except UnsupportedOperation as e:
        raise UnsupportedOperation(f"Tiers cannot keep what {name} computes: {e}. Leave kv_tiers out.") from e
    bits = facts.numerics or facts.fingerprint
    words = repr((identity, bits, facts.dtype, facts.layers, facts.limits.block_size, kinds))

    def root_of(generation: int) -> bytes:
        return chained(FORMAT, words, generation)

    sizes = [bytes_of(some) for some in kinds]
    host = tiers.open(root_of(0), max(sizes))
    return Tiering(host, built.runner, built.scheduler, root_of, brought, fail=tiers.load_failure == "fail")


class Tiering(PendingLoads[Job]):
    """The tiers of one engine. root_of: from a generation to the root of all names."""

    def __init__(
        self,
        host: HostTier,
        runner: Runner,
        scheduler: Scheduler,
        root_of: Callable[[int], bytes],
        brought: Brought,
        *,
        fail: bool,
    ) -> None:
        super().__init__(host, brought)
        self.fail, self._runner, self._root_of = fail, runner, root_of
        assert runner.entries is not None
        self._entries = runner.entries
        self._stored = 0.0  # when all was stored that could be
        self._prepared: StepPlan | None = None  # the last step that was
        self._sizes = [bytes_of(kinds) for kinds in self._entries.entry_kinds()]
        self._generation = host.generation(root_of(0))
        scheduler.tiers = Tiers(root_of(self._generation), host.find)
        host.warm()

    # ---- steps -------------------------------------------------------------------------------------------------

    def store(self, stores: EntryStores | None) -> None:
        """Hand over what is to be kept. What fails here is not kept."""
        if stores is None or not any(stores):
            return
        try:
            for some, size in zip(self._entries.outgoing(stores), self._sizes, strict=True):
                for entries in some:
                    self.host.keep(entries, size * len(entries.names), now=not self._runner.backend.asynchronous)
        except Exception as e:
            if self._runner.backend.fatal(e):
                raise
            log.info("blocks could not be read to be kept: %s", text_of(e))

    def after(self, scheduler: Scheduler, *, all_: bool = False) -> None:
        """Store what has become sound with a step, or all that still waits for that."""
        now = time.monotonic()
        late = all_ or now - self._stored > LATEST
        self._stored = now if late else self._stored
        self.store(scheduler.take_stores(0 if late else TOGETHER))

    def before(self, plan: StepPlan) -> None:
        """Store and load what a step asks for, once: one that is run again may have written to what it stores. Raises
        StepFailed.
        """
        if plan is self._prepared:
            return
        self._prepared = plan
        try:
            self.store(plan.stores)
            if plan.loads is not None and any(plan.loads):
                self._entries.incoming(plan.loads)
        except Exception as e:
            self.host.clear()  # else the same would be loaded again, without end
            raise_for_all(e, self._runner.backend, cache_lost=True)

    # ---- requests ----------------------------------------------------------------------------------------------

    def keep(self, job: Job, scheduler: Scheduler, *, pin: bool | None, importance: float | None) -> int:
        """See `BatchEngine.keep`. From any thread."""
        seq, size, checkpoints = job.seq, scheduler.limits.block_size, scheduler.checkpoints
        assert scheduler.tiers
        names = scheduler.tiers.names(seq, seq.prompt_len // size)
        concerned = dict.fromkeys(names if scheduler.pool else (), self._sizes[0])
        if checkpoints:
            at = {*range(checkpoints.every, len(names) + 1, checkpoints.every), (seq.prompt_len - 1) // size}
            concerned |= {state_name(names[n - 1]): self._sizes[1] for n in at if 0 < n <= len(names)}
        if importance is not None:
            self.host.weigh(concerned, importance)
        if pin is not None:
            self.host.pin(concerned, on=pin)
        return len(names) * size

    def store_again(self, job: Job, scheduler: Scheduler) -> None:
        """Store what of a prompt is on the device and no longer in host memory."""
        seq, pool, checkpoints = job.seq, scheduler.pool, scheduler.checkpoints
        if scheduler.tiers is None or seq.keys is None:
            return
        names = scheduler.tiers.names(seq, seq.prompt_len // scheduler.limits.block_size)
        blocks = pool.match(seq.salt, seq.keys, len(names))[0] if pool else []
        unsound = set(pool.unsound(blocks) if pool else ())
        n, slot = (checkpoints and checkpoints.find(seq.salt, seq.keys, len(names))) or (0, 0)
        states = [(slot, state_name(names[n - 1]))] if n else []
        stores = EntryStores([pair for pair in zip(blocks, names, strict=False) if pair[0] not in unsound], states)
        self.store(EntryStores(*([pair for pair in pairs if not self.host.has(pair[1])] for pairs in stores)))

    # ---- all of it ---------------------------------------------------------------------------------------------

    def forget(self, scheduler: Scheduler) -> None:
        """Nothing that was kept is found from now on, here or after a restart."""
        assert scheduler.tiers
        self._generation = max(self._generation + 1, time.time_ns())  # later than what others reset before
        scheduler.tiers.renew(self._root_of(self._generation))
        self.host.forget(self._generation)

    def close(self) -> None:
        self.host.close()
