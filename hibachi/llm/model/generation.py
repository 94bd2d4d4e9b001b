"""What a model's makers recommend for its answers, in generation_config.json or a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.errors import InvalidModelFiles, InvalidRequest
from hibachi.llm.model.fields import Config, is_int, read_json
from hibachi.request import DRAWN, SamplingParams

log: logging.Logger = logging.getLogger("hibachi.engine")

_FIELDS = {  # name in the file -> field of SamplingParams
    **{name: name for name in DRAWN},
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
}

_GGUF = {  # entry of a GGUF file -> name in generation_config.json
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
    "tokenizer.ggml.suppress_tokens": "suppress_tokens",
}

_BY_DEFAULT_0 = (
    *("diversity_penalty", "early_stopping", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"),
    *("min_length", "no_repeat_ngram_size", "penalty_alpha", "remove_invalid_values", "token_healing"),
    *("general.sampling.mirostat", "general.sampling.xtc_probability"),
)
_BY_DEFAULT_1 = (
    *("encoder_repetition_penalty", "guidance_scale", "length_penalty", "num_beam_groups", "num_beams"),
    "num_return_sequences",
)
_BY_DEFAULT_NONE = (
    *("constraints", "dola_layers", "exponential_decay_length_penalty", "force_words_ids", "forced_bos_token_id"),
    *("forced_eos_token_id", "max_time", "sequence_bias", "top_h", "watermarking_config", "general.sampling.sequence"),
)
NOT_OBEYED: Mapping[str, Any] = {
    **dict.fromkeys(_BY_DEFAULT_0, 0),
    **dict.fromkeys(_BY_DEFAULT_1, 1),
    **dict.fromkeys(_BY_DEFAULT_NONE),
    **{"max_length": 20, "general.sampling.penalty_last_n": -1},
}
"""What else of a file changes answers elsewhere and has no counterpart here -> the value that changes nothing."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What no answer of a model may do, unless its request says otherwise.

    bad_words: sequences of token ids that may not occur. banned_first: ids that may not come first. min_tokens: of an
    answer, before it may end.
    """

    bad_words: tuple[tuple[int, ...], ...] = ()
    banned_first: tuple[int, ...] = ()
    min_tokens: int = 0

    def applied(self, p: SamplingParams) -> tuple[SamplingParams, tuple[tuple[int, ...], ...], tuple[int, ...]]:
        """The parameters of a request, and its bad_words and banned_first: without single ids that it names in
        allowed_token_ids, or in logit_bias with 0 or more; its own min_tokens, unless that is 0, and its max_tokens go
        before min_tokens.
        """
        if self == NO_RULES:
            return p, (), ()
        if self.min_tokens and not p.min_tokens:
            p = p.with_(min_tokens=min(self.min_tokens, p.max_tokens or self.min_tokens))
        named = {*(p.allowed_token_ids or ()), *(i for i, added in dict(p.logit_bias).items() if added >= 0)}
        words = tuple(word for word in self.bad_words if len(word) > 1 or word[0] not in named)
        return p, words, tuple(i for i in self.banned_first if i not in named)


NO_RULES = TokenRules()


@dataclass(frozen=True)
class Generation:
    """What a file says, by the names of generation_config.json. where: the file, for errors."""

    said: Config
    where: str = "generation_config.json"

    @classmethod
    def read(cls, folder: str | Path) -> Generation:
        """Of a folder: its generation_config.json, or without one its config.json, where old files say it. Raises
        InvalidModelFiles.
        """
        own, older = Path(folder) / "generation_config.json", Path(folder) / "config.json"
        file = own if own.exists() else older
        return cls(read_json(file) if file.exists() else {}, str(file))

    @classmethod
    def of_gguf(cls, metadata: Mapping[str, Any], file: Path) -> Generation:
        """Of the entries of a GGUF file; the log names those that cannot be followed, as nobody mends such a file."""
        found: dict[str, Any] = {}
        for entry, value in metadata.items():
            name, said = _GGUF.get(entry, entry), value.tolist() if isinstance(value, np.ndarray) else value
            if entry not in _GGUF and entry not in NOT_OBEYED:
                continue
            try:
                one = cls({name: said}, str(file))
                one.params(), one.rules(0, ())
                found[name] = said
            except InvalidModelFiles:
                log.warning("%s: %s is %.80r, which cannot be followed", file, entry, said)
        return cls(found, str(file))

    def params(self) -> dict[str, Any]:
        """The fields of SamplingParams that the file sets.

        As in vLLM, what the file gives counts whether or not it says do_sample, and what it does not give keeps our own
        default (transformers would be greedy without do_sample). As in transformers, do_sample: false means greedy:
        that is temperature 0, and what else the file says of `DRAWN` is left out. null counts as not given.

        Raises InvalidModelFiles for a value of the wrong type or out of its range.
        """
        given = {name: self.said[name] for name in _FIELDS if self.said.get(name) is not None}
        sample = self.said.get("do_sample")
        if sample is not None and not isinstance(sample, bool):
            raise self._wrong("do_sample", "must be true, false or null", sample)
        if sample is False:
            given = {name: value for name, value in given.items() if name not in DRAWN}
            given["temperature"] = 0.0
        for name, value in given.items():
            try:
                SamplingParams(**{_FIELDS[name]: value})
            except InvalidRequest as e:
                raise InvalidModelFiles(f"{self.where}: {name} cannot be used: {e} Mend the file.") from e
        return {_FIELDS[name]: tuple(value) if isinstance(value, list) else value for name, value in given.items()}

    def rules(self, vocab_size: int, ends: Sequence[int]) -> TokenRules:
        """Which tokens may not come in any answer. ends: tokens that end one; as in transformers, they may although
        bad_words_ids lists them. Ids outside the vocabulary forbid nothing. Raises InvalidModelFiles as `params` does.
        """
        always, first = self._listed("suppress_tokens"), self._listed("begin_suppress_tokens")
        words = self._listed("bad_words_ids", lambda word: isinstance(word, list) and word and all(map(is_int, word)))
        there = range(vocab_size)
        least = self.said.get("min_new_tokens") or 0
        if not is_int(least) or least < 0:
            raise self._wrong("min_new_tokens", "must be an integer >= 0", least)
        sequences = [*((i,) for i in always), *(tuple(word) for word in words if len(word) > 1 or word[0] not in ends)]
        return TokenRules(
            bad_words=tuple(s for s in dict.fromkeys(sequences) if all(i in there for i in s)),
            banned_first=tuple(i for i in dict.fromkeys(first) if i in there),
            min_tokens=least,
        )

    def special(self, name: str) -> Any:
        """Its bos_token_id or eos_token_id: an id, ids, or None. Raises InvalidModelFiles for another value."""
        value = self.said.get(name)
        if value is not None and not all(map(is_int, value if isinstance(value, list) else [value])):
            raise self._wrong(name, "must be an integer, a list of integers, or null", value)
        return value

    def not_obeyed(self) -> dict[str, Any]:
        """What the file sets that answers elsewhere follow, and answers here do not."""
        said = {name: self.said[name] for name in NOT_OBEYED if name in self.said}
        return {name: value for name, value in said.items() if value not in (None, [], {}, NOT_OBEYED[name])}

    def _listed(self, name: str, fits: Callable[[Any], Any] = is_int) -> list[Any]:
        value, what = self.said.get(name), "token ids" if fits is is_int else "lists of token ids"
        if value is not None and not (isinstance(value, list) and all(map(fits, value))):
            raise self._wrong(name, f"must be a list of {what}", value)
        return value or []

    def _wrong(self, name: str, expected: str, got: Any) -> InvalidModelFiles:
        return InvalidModelFiles(f"{self.where}: {name} {expected}; got {got!r:.80}. Mend the file.")
