"""Whether tokens are proposed to a model, and who proposes them. Draft models: which can guess for a model, what memory
they take, and how one is made.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.infer import backend_of
from hibachi.backend.layout import State
from hibachi.engine.batchengine import Facts
from hibachi.engine.build import Built, Share, codebooks_of, limit_of
from hibachi.engine.forms import own_vocabulary
from hibachi.engine.guide.protocol import Vocabulary
from hibachi.engine.kinds import kind_of, level_told
from hibachi.engine.ladder import ModelKind
from hibachi.engine.runners.memory import position_bytes
from hibachi.engine.speculation.config import METHODS, SpeculativeConfig
from hibachi.engine.speculation.draft_runner import DraftModel
from hibachi.engine.speculation.drafter_thread import DrafterThread
from hibachi.engine.speculation.drafting import Apart, ByNgrams, Drafting, Proposer, WithModel
from hibachi.engine.speculation.find import drafter_of
from hibachi.engine.speculation.howmany import Depth, HowMany
from hibachi.engine.speculation.ngram import NgramDrafter
from hibachi.errors import ConfigError, UnsupportedOperation, shown

log: logging.Logger = logging.getLogger("hibachi.engine")


def checked(config: SpeculativeConfig, model: Any, longest: int) -> SpeculativeConfig:
    """The config with the dtype of its draft model, if that can guess for this model. longest: tokens of a request.

    Raises ConfigError.
    """
    draft = config.model
    if isinstance(draft, str) or not hasattr(draft, "step"):
        raise ConfigError(
            f"speculative_config: this engine takes a draft model as an object with `step` and `cache_spec`; got "
            f"{shown(draft)}. Load it first, or use hibachi.LLM, which takes names and paths."
        )
    name = type(draft).__name__
    if (kind := kind_of(draft)) is not ModelKind.PAGED:
        raise ConfigError(
            f"speculative_config: a draft model must have `step(params, cache, x)` and `cache_spec()` (level 2); "
            f"{name} is {level_told(kind)}."
        )
    if any(isinstance(layer, State) for layer in draft.cache_spec()):
        raise ConfigError(
            f"speculative_config: the draft model {name} has layers with a state, which cannot go back behind a wrong "
            f"guess; expected layers with keys and values only. Take another one."
        )
    if codebooks_of(draft) is not None:
        raise ConfigError(
            f"speculative_config: a draft model must return logits of single ids; {name} has tokens of several "
            f"codebooks. Take another one."
        )
    if not config.same:
        check_same(own_vocabulary(model), own_vocabulary(draft), name)
    own = limit_of(draft)
    if own is not None and own < longest:
        log.info(
            "the draft model %s guesses within the first %d tokens of a request, which may have %d", name, own, longest
        )
    dtype = config.dtype or (draft.dtype if isinstance(getattr(draft, "dtype", None), str) else "float32")
    return replace(config, dtype=dtype)


def check_same(main: Vocabulary, draft: Vocabulary, name: str) -> None:
    """Check that the tokens of two models are the same bytes, id by id, and where one has no texts, as many.

    Ids at the end that stand for nothing may be missing. name: of the draft model. Raises ConfigError.
    """
    if not (main.texts and draft.texts):
        if len(main.tokens) != len(draft.tokens):
            raise ConfigError(
                f"speculative_config: the draft model must have the same vocabulary, {len(main.tokens)} tokens; {name} "
                f"has {len(draft.tokens)}. Take one with the same tokenizer."
            )
        return
    for i, (want, got) in enumerate(zip_longest(main.tokens, draft.tokens, fillvalue=b"")):
        if want != got:
            raise ConfigError(
                f"speculative_config: the draft model must have the same tokens, id by id; token {i} is {want!r}, and "
                f"{got!r} for {name}. Take one with the same tokenizer."
            )


def share(config: SpeculativeConfig | None) -> Share | None:
    """The memory of a draft model's pools; None means there is none."""
    if config is None or config.model is None:
        return None
    assert config.dtype is not None
    return Share(position_bytes(config.model.cache_spec(), config.dtype), config.num_speculative_tokens)


def draft_model(config: SpeculativeConfig, facts: Facts, backend: ArrayBackend, depth: Depth | None) -> DraftModel:
    """The draft model of an engine. backend: of the main model. Raises UnsupportedOperation, and ConfigError."""
    assert config.dtype is not None
    found = backend_of(config.backend, config.model) or backend
    if not isinstance(found, ArrayBackend) or found.shapes.compiled:
        raise UnsupportedOperation(
            f"speculative_config: a draft model cannot run on {found!r}, which compiles each shape of a call, or has "
            f"the nine operations only. Load it on another backend, such as numpy or torch."
        )
    k = config.num_speculative_tokens
    costs = None if depth is None else depth.costs
    return DraftModel(config.model, found, config.dtype, facts.limits, k, costs=costs)


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


def _asker(config: SpeculativeConfig, built: Built, how: HowMany | None) -> Proposer:
    vocab = built.facts.vocab_size
    assert vocab is not None
    if config.method == "ngram":
        return ByNgrams(NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max), vocab, how)
    if config.method in METHODS:
        depth = None if how is None else Depth(how)
        model = draft_model(config, built.facts, built.runner.backend, depth)
        return WithModel(model, vocab, how, depth)
    name = config.method if isinstance(config.method, str) else type(config.method).__name__
    return Apart(DrafterThread(drafter_of(config.method, vocab), vocab, name), how, name)
