"""A causal language model of `transformers` that keeps its own cache, for those that the paged engine cannot run.

See `hibachi.OwnCache`: the engine finds out where rows and positions lie in the cache, and tries what may share a call.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.layout import OwnCache
from hibachi.backend.nested import arrays_in
from hibachi.errors import text_of
from hibachi_torch.transformers_attention import CannotRun
from hibachi_torch.transformers_check import TOLERANCE, difference, some_tokens

CACHES = "cache", "past_key_values", "cache_params", "state"  # names that libraries' versions and models give it


class OwnModel:
    """A module of transformers with its own cache, whose rows stand right-aligned behind padding.

    Attributes as of `TransformersModel`. vocab_size: of the logits.
    """

    past: OwnCache = OwnCache()
    vocab_size: int

    def __init__(
        self,
        module: Any,
        backend: ArrayBackend,
        *,
        dtype: str,
        max_model_len: int,
        eos_ids: tuple[int, ...],
        bos_ids: tuple[int, ...],
    ) -> None:
        self.module, self.backend, self.dtype, self.max_model_len = module, backend, dtype, max_model_len
        self.config = module.config  # whose windows the engine looks for
        self.arch_name = type(module).__name__
        self.eos_ids, self.bos_ids = eos_ids, bos_ids
        self.params = dict(module.named_parameters())
        self._accepted = inspect.signature(module.forward).parameters
        self._cache = next((name for name in CACHES if name in self._accepted), "")
        if not self._cache:
            raise CannotRun("it keeps no cache")
        module.config.use_cache = True
        self.vocab_size = module.config.get_text_config().vocab_size
        self.vocab_size = int(self._called(self._some(1), None, 1)[0].shape[-1])

    def step(self, tokens: Any, lengths: Any, past: Any, logits_to_keep: int = 1) -> tuple[Any, Any]:
        """Logits after the last tokens of each row, float32, and (the cache, its positions)."""
        cache, width = past or (None, 0)
        width += tokens.shape[1]
        place = torch.arange(width, device=tokens.device) - (width - lengths[:, None])
        found = self._called(
            tokens, cache, logits_to_keep, attention_mask=(place >= 0).int(), position_ids=place[:, -tokens.shape[1] :]
        )
        return found[0], (found[1], width)

    def _called(self, tokens: Any, cache: Any, keep: int, **others: Any) -> tuple[Any, Any]:
        named = {self._cache: cache, "use_cache": True, "logits_to_keep": keep, "return_dict": True, **others}
        out = self.module(tokens.long(), **{k: v for k, v in named.items() if k in self._accepted})
        after = getattr(out, self._cache, None)
        if after is None:
            raise CannotRun("it returns no cache")
        return out.logits[:, -keep:].float(), after

    def example_prompts(self) -> list[Any]:
        return [self._some(99, seed=seed)[0].cpu().numpy().astype(np.int32) for seed in range(1, 9)]

    def check(self) -> None:
        """Raises CannotRun if two short prompts at once, the last tokens of which come one by one, do not give what the
        module computes of each at once, without a cache."""
        once = {"use_cache": False} if "use_cache" in self._accepted else {}
        n = min(12, self.max_model_len)
        tokens = torch.cat([self._some(n), self._some(n, seed=1)])
        want = torch.stack([self.module(row.long()[None], **once).logits[0].float() for row in tokens])
        past, begin = None, 0
        for end in range(max(1, n - 2), n + 1):
            logits, past = self._after(tokens[:, begin:end], end, past)
            worst = float(difference(logits[:, -1], want[:, end - 1]).max())
            if not worst <= TOLERANCE[self.dtype]:  # NaN is refused as well
                raise CannotRun(
                    f"with its cache the logits of two rows at once differ by {worst:.1e} of their size from those of "
                    f"each alone, without"
                )
            begin = end

    def _some(self, n: int, seed: int = 0) -> Any:
        ids = some_tokens(n, self.vocab_size, seed=seed)
        padding = getattr(self.config.get_text_config(), "pad_token_id", None)  # which some do not count as a position
        return self.backend.put(np.where(ids == padding, ids + 1, ids))[None]

    def _after(self, tokens: Any, length: int, past: Any) -> tuple[Any, Any]:
        return self.step(tokens, torch.full((len(tokens),), length, device=tokens.device), past)


class EvenModel(OwnModel):
    """One that counts its positions by itself, or has none, as a state: rows of one length share a call, or any."""

    @override
    def step(self, tokens: Any, past: Any, logits_to_keep: int = 1) -> tuple[Any, Any]:  # type: ignore[override]  # fewer
        """As of `OwnModel`, without padding; the past is the cache."""
        return self._called(tokens, past, logits_to_keep)

    @override
    def _after(self, tokens: Any, length: int, past: Any) -> tuple[Any, Any]:
        return self.step(tokens, past)

    def is_state(self) -> bool:
        """Whether nothing in its cache grows with the tokens."""
        tokens = self._some(4)
        three, four = (arrays_in(self.step(tokens[:, :n], None)[1], self.backend.owns) for n in (3, 4))
        return [array.shape for _, array in three] == [array.shape for _, array in four]


def own(module: Any, backend: ArrayBackend, **facts: Any) -> OwnModel:
    """The module as a model with its own cache. Raises CannotRun with what stands in the way."""
    for how in ("sdpa", "eager"):
        try:
            module.set_attn_implementation(how)
            break
        except (ValueError, ImportError):  # that it lacks
            continue
    named, why = type(module).__name__, ""  # as which the engine's messages are to name it
    try:
        even: EvenModel = type(named, (EvenModel,), {})(module, backend, **facts)
        padded: list[OwnModel] = [] if even.is_state() else [type(named, (OwnModel,), {})(module, backend, **facts)]
        for model in (*padded, even):
            try:
                model.check()
                return model
            except CannotRun as e:
                why = str(e)
    except CannotRun as e:
        why = str(e)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:  # the library raises what it likes
        why = f"it failed with its own cache ({text_of(e)})"
    raise CannotRun(why)
