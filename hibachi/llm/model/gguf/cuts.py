"""How text is cut before it is merged, by the names that GGUF files have for it (`tokenizer.ggml.pre`).

The names are those of llama.cpp's llama-vocab.cpp, the rules those of the tokenizer.json files that they stand for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hibachi.llm.tokenizers import patterns as p


class Cut(NamedTuple):
    """patterns: text is split at their matches, one after the other. letters: so are then the letters of its bytes.

    whole: a word that is a token is not merged from its parts. bos: texts begin with the bos token, unless the file
    says no; always: whatever it says. nfc: text is normalised first. marks: "▁" stands for a space, and bytes have no
    letters but tokens such as <0x41>.
    """

    patterns: tuple[str, ...] = (p.GPT2,)
    letters: tuple[str, ...] = ()
    whole: bool = False
    bos: bool = False
    always: bool = False
    nfc: bool = False
    marks: bool = False

    def steps(self, library: Any) -> Any:
        """As a pre-tokenizer of the library."""
        pre = library.pre_tokenizers
        first, last = ([pre.Split(library.Regex(r), "isolated") for r in rs] for rs in (self.patterns, self.letters))
        return pre.Sequence([*first, pre.ByteLevel(add_prefix_space=False, use_regex=False), *last])


_DIGITS, _THREES, _LINES = r"\p{N}", r"\p{N}{1,3}", "[\r\n]"
_GEMMA4 = Cut((), marks=True, always=True)

CUTS: Mapping[str, Cut] = {
    "default": Cut((r"[\p{P}$+<=>^|~]+", p.GPT2, r"\p{N}+", "[0-9]{3}")),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4"), Cut()),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code"), Cut()),
    **dict.fromkeys(("roberta-bpe", "jais", "trillion", "granite-docling"), Cut()),
    **dict.fromkeys(("mpt", "olmo"), Cut(nfc=True)),  # the tokenizer of GPT-NeoX
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), Cut((_DIGITS, p.GPT2))),
    **dict.fromkeys(("minerva-7b", "mellum2"), Cut((_DIGITS, p.GPT2))),
    "command-r": Cut((_DIGITS, p.GPT2), nfc=True),
    "falcon": Cut((p.PUNCTUATION, p.GPT2), letters=(r"\p{N}+", "[0-9]{3}")),
    "falcon3": Cut((p.PUNCTUATION, p.GPT2), letters=(_DIGITS,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon-h1"), Cut((p.LLAMA3,), whole=True, bos=True)),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2", "jina-v5-nano"), Cut((p.LLAMA3,), whole=True, bos=True)),
    **dict.fromkeys(("glm4", "glm5"), Cut((p.LLAMA3,), whole=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Cut((p.LLAMA3,))),
    "minicpm5": Cut((_THREES, p.LLAMA3), whole=True),
    "jais-2": Cut((p.JAIS2,)),
    "qwen2": Cut((p.QWEN2,), nfc=True),
    "qwen35": Cut((p.QWEN35,)),  # not normalised: so are the ids that llama.cpp publishes
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "kormo", "f2llmv2", "megrez"), Cut((p.QWEN2,))),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2", "bailingmoe", "bailingmoe2", "llada-moe"), Cut((p.QWEN2,))),
    "ufakzeka": Cut((p.UFAKZEKA,)),
    "laguna": Cut((r"\n+", p.QWEN2)),
    "seed-coder": Cut((p.SEED_CODER,)),
    "exaone-moe": Cut((p.EXAONE_MOE,)),
    "tekken": Cut((p.TEKKEN,), whole=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), Cut((p.GPT4O,))),
    "granite-embed-multi-97m": Cut((p.GPT4O,), whole=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Cut((p.threes(r"\d", r"\b"), p.GPT4O))),
    "youtu": Cut((p.YOUTU_ASIAN, p.YOUTU), whole=True),
    "kimi-k2": Cut((p.KIMI_K2,)),
    "deepseek-llm": Cut((_LINES, p.EUROPEAN, p.WIDE_SIGNS, r"(?<!\s)\s+$", p.HAN_HANGUL, r"\p{N}+")),
    "deepseek-coder": Cut((_LINES, r"\s?\p{L}+", r"\s?\p{P}+", p.HAN_HANGUL, _DIGITS)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), Cut((_THREES, p.HAN_KANA, p.DEEPSEEK3))),
    "spark2_5": Cut((_THREES, p.HAN_KANA, p.SPARK, _DIGITS)),
    "afmoe": Cut((p.threes(r"\p{N}", r"(?!\p{N})"), p.ASIAN, p.DEEPSEEK3)),
    "superbpe": Cut((r"\p{N}+", p.threes(r"\d", r"(?!\d)"))),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), Cut((p.BLOOM,))),
    "viking": Cut((p.BLOOM, _DIGITS)),
    "chameleon": Cut(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            "[\t\n]|    |  ",
            _DIGITS,
            r"[\p{P}!-/:-@\[-`{-~]",
            p.GPT2,
        ),
        bos=True,
    ),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), _GEMMA4),
    "sarvam-moe": Cut((), marks=True),
}
"""`tokenizer.ggml.pre` -> how text is cut."""

OLD = {"gpt2": "gpt-2", "gptneox": "mpt", "mamba": "mpt", "falcon": "falcon", "starcoder2": "starcoder"}
"""Architecture -> what its files mean that do not name it."""
