"""How byte-level tokenizers cut a text into words: the regular expressions of their tokenizer.json files."""

_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 = _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _OTHERS + _END
QWEN2 = _CONTRACTIONS + _WORDS + r"|\p{N}" + _OTHERS + _END
_FRONT, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (_FRONT + _UPPER + "*" + _LOWER + "+", _FRONT + _UPPER + "+" + _LOWER + "*")
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
TEKKEN = "|".join(_CASED) + r"|\p{N}" + _SIGNS + _END
GPT4O = "|".join(c + _CONTRACTIONS + "?" for c in _CASED) + r"|\p{N}{1,3}" + _SIGNS + _END
EVERY = frozenset({LLAMA3, QWEN2, TEKKEN, GPT4O})
"""Each takes one pass over a text."""
