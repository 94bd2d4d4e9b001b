"""What a step costs by its number of tokens, proposed ones among them, and what proposals would bring."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from hibachi.common.phases import phase
from hibachi.engine.autoregressive import AutoregressiveBatchInference
from hibachi.engine.runners.meters import Drafted
from hibachi.engine.runners.runner import Outcome, Runner
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import StepPlan
from hibachi.engine.speculation.config import SpeculativeConfig
from hibachi.engine.speculation.drafting import Drafting
from hibachi.engine.speculation.howmany import HowMany, best
from hibachi.request import SamplingParams

SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens of a step
BATCHES = (1, 2, 4, 8)
RIGHT = 0.8  # of proposals, how many are right
ROUNDS = 11
PROMPT = 16  # tokens
ROOM = PROMPT + 2 * ROUNDS * len(SIZES) + max(SIZES)  # positions of the cache that measuring takes


class _Sized(Drafting):
    """Has one row compute steps of the sizes that are wanted, one after the other, and notes what they took."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.drafted = Drafted()
        self.seconds: dict[int, list[float]] = {}
        self._left = list(reversed(sizes))

    @property
    def over(self) -> bool:
        return not self._left

    def propose(self, scheduler: Scheduler, runner: Runner) -> None:
        seqs = [seq for seq in scheduler.order if seq.row >= 0 and not scheduler.prefilling(seq)]
        for seq in seqs if self._left else ():
            n = self._left.pop() - 1
            scheduler.propose([(seq, n)])
            seq.owner.draft = np.zeros(n, np.int32)  # mostly wrong, which costs the same

    def took(self, plan: StepPlan, seconds: float) -> None:
        if int(plan.q.max()) == 1:
            tokens = int(plan.q.sum()) + (0 if plan.draft is None else int(plan.draft.sum()))
            self.seconds.setdefault(tokens, []).append(seconds)

    def judge(self, plan: StepPlan, outcome: Outcome) -> None:
        """Right or wrong, they cost the same."""

    def forget(self, seq: Seq) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """There is nothing to close."""


def step_costs(engine: AutoregressiveBatchInference) -> dict[int, float]:
    """Seconds of a step by its number of tokens, medians: of one request, with so many proposals and one more token.

    The engine must be idle, without overlapping steps, and one that tokens can be proposed to; it makes no proposals
    afterwards. A model with a short context has fewer sizes.
    """
    core = engine.core
    assert core is not None
    # The sizes by turns, so that a machine that is slow for a while is so for each. The first turn is not counted.
    core.drafting = sized = _Sized(SIZES * (1 + ROUNDS))
    new = min(ROOM, engine.max_model_len) - PROMPT
    prompt = np.random.default_rng(0).integers(0, engine.facts.vocab_size, PROMPT).astype(np.int32)
    try:
        with phase("measuring steps by their tokens"):
            for _ in engine.run(prompt, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)):
                if sized.over:
                    break
    finally:
        core.drafting = None
    return {n: median(sized.seconds[n][1:]) for n in SIZES if len(sized.seconds.get(n, ())) > 1}


def gains(costs: dict[int, float]) -> dict[int, tuple[float, float]]:
    """What `speculative_config="auto"` would do if so many proposals as RIGHT says were right: {requests in a step:
    (proposals of a request, tokens per second compared with none)}. 0 proposals: they would not pay.
    """
    how, most = HowMany(), SpeculativeConfig().num_speculative_tokens
    for tokens, seconds in costs.items():
        for _ in range(3):
            how.costs.note(tokens, seconds)
    found = {}
    for rows in BATCHES:
        counts = how.choose(rows, [most] * rows, [RIGHT] * rows, rows * most)
        gain = best(rows, counts, [RIGHT] * rows, how.costs.predict, rows * most)[1] if any(counts) else 1.0
        found[rows] = sum(counts) / rows, gain
    return found


def told(costs: dict[int, float]) -> str:
    """Both, for people."""
    lines = ["Milliseconds of a step by its number of tokens, proposals among them:", ""]
    lines += [
        "tokens " + "".join(f"{n:>8}" for n in costs),
        "ms     " + "".join(f"{1000 * seconds:>8.3g}" for seconds in costs.values()),
        "",
    ]
    lines.append(f'speculative_config="auto" with {RIGHT:.0%} right proposals, by requests in a step:')
    for rows, (each, gain) in gains(costs).items():
        does = f"{gain:.1f}x the tokens per second, {each:.3g} proposals a request" if each else "no proposals"
        lines.append(f"{rows:>6}  {does}")
    return "\n".join(lines)
