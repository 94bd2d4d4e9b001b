"""How tokenizers cut a text into words: the regular expressions of their tokenizer.json files.

Written so that each takes one pass over a text: what would look at the rest of a run from each of its characters looks
from the first only.
"""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"|\s+(?!\S)|\s+"
_END = r"|\s*[\r\n]+" + _SPACES
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _SPACES
LLAMA3 = _CONTRACTIONS + "|" + _WORDS + r"|\p{N}{1,3}" + _OTHERS + _END
QWEN2 = _CONTRACTIONS + "|" + _WORDS + r"|\p{N}" + _OTHERS + _END
QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _END
UFAKZEKA = _WORDS + r"|\p{N}" + _OTHERS + _END
SEED_CODER = _CONTRACTIONS + "|" + _WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+" + _END
_PHRASES = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
EXAONE_MOE = _CONTRACTIONS + "|" + _PHRASES + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?" + _END
_INDENTS = "".join(rf"|\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")) + r"|\s"
JAIS2 = _CONTRACTIONS + "|" + _WORDS + r"|\p{N}{1,3}" + _OTHERS + r"|(?<![^\S\r\n])\s*[\r\n]+" + _INDENTS


def _cased(upper: str, lower: str, after: str = "") -> str:
    """Words that begin with capitals, or are of capitals; `after` them what belongs to them."""
    front = r"[^\r\n\p{L}\p{N}]?"
    return f"{front}{upper}*{lower}+{after}|{front}{upper}+{lower}*{after}"


_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_ANY_CASE = _cased(f"[{_UPPER}]", f"[{_LOWER}]", _CONTRACTIONS + "?")
TEKKEN = _cased(f"[{_UPPER}]", f"[{_LOWER}]") + r"|\p{N}" + _SIGNS + _END
GPT4O = _ANY_CASE + r"|\p{N}{1,3}" + _SIGNS + _END
YOUTU = _ANY_CASE + r"|\p{N}" + _SIGNS + _END
_NO_HAN = _cased(rf"[{_UPPER}&&[^\p{{Han}}]]", rf"[{_LOWER}&&[^\p{{Han}}]]", _CONTRACTIONS + "?")
KIMI_K2 = r"\p{Han}+|" + _NO_HAN + r"|\p{N}{1,3}" + _OTHERS + _END

_MARKED = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
DEEPSEEK3 = _MARKED + r"[\r\n]*" + _END
SPARK = _MARKED + r"|[\r\n]" + _SPACES
# Letters and signs by ranges, as published; "ࠀ-一" holds most scripts of Asia.
HAN_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
HAN_HANGUL = "[一-龥ࠀ-一가-\ud7ff]+"
YOUTU_ASIAN = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + HAN_KANA
ASIAN = "[一-鿿㐀-䶿\uf900-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
EUROPEAN = (
    r"\s?["
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝ"
    "ℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻"
    "𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
    "]+"
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
WIDE_SIGNS = r"\s?" "[!-/:-~！-／：-～‘-‟\u3000-。]+"
PUNCTUATION = r"[\p{P}$+<=>^`|~]+"


def threes(digit: str, end: str) -> str:
    """Runs of `digit` in threes from their end, at which `end` must match."""
    return rf"(?<!{digit}){digit}{{1,3}}(?=(?:{digit}{{3}})*{end})|(?<={digit})\G{digit}{{3}}"


EVERY = frozenset({GPT2, LLAMA3, QWEN2, QWEN35, TEKKEN, GPT4O, DEEPSEEK3})
"""Those that tokenizer.json files often have: they need not be tried first."""
