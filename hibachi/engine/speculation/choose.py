"""Whether tokens are proposed to a model, and who proposes them."""

from __future__ import annotations

import logging

from hibachi.engine.build import Built
from hibachi.engine.speculation import draft_models as draftmodels
from hibachi.engine.speculation.config import METHODS, SpeculativeConfig
from hibachi.engine.speculation.drafter_thread import Aside
from hibachi.engine.speculation.drafting import Drafting
from hibachi.engine.speculation.find import drafter_of
from hibachi.engine.speculation.howmany import Depth, HowMany
from hibachi.engine.speculation.ngram import NgramDrafter
from hibachi.engine.speculation.proposers import Apart, Asker, ByNgrams, WithModel
from hibachi.errors import UnsupportedOperation

log: logging.Logger = logging.getLogger("hibachi.engine")


def made(config: SpeculativeConfig | None, built: Built, name: str, differ: str | None) -> Drafting | None:
    """What proposes tokens to an engine; None means nobody does.

    name: of the model. differ: why proposals may change bits, as the check of the model has it. Raises
    UnsupportedOperation; ConfigError or MissingExtra for a drafter that cannot be made.
    """
    if config is None:
        return None
    why = built.runner.cannot_speculate()
    if why is None and config.model is not None and not built.facts.limits.blocks:
        why = "a draft model needs one that keeps its cache in blocks"
    if why is None and config.auto:
        why = built.runner.cannot_gain(built.facts.deterministic) or differ
    if why is None:
        how = HowMany() if config.auto else None
        return Drafting(_asker(config, built, how), config.num_speculative_tokens, how)
    if config.auto:
        log.info("speculative_config: off for %s, as %s", name, why)
        return None
    raise UnsupportedOperation(f"speculative_config cannot be used with {name}, as {why}. Leave it out.")


def _asker(config: SpeculativeConfig, built: Built, how: HowMany | None) -> Asker:
    vocab = built.facts.vocab_size
    assert vocab is not None
    if config.method == "ngram":
        return ByNgrams(NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max), vocab, how)
    if config.method in METHODS:
        depth = None if how is None else Depth(how)
        model = draftmodels.made(config, built.facts, built.runner.backend, depth)
        return WithModel(model, vocab, how, depth)
    name = config.method if isinstance(config.method, str) else type(config.method).__name__
    return Apart(Aside(drafter_of(config.method, vocab), vocab, name), how, name)
