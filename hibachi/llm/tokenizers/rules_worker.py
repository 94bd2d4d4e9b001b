"""The process that tries the rules of a tokenizer.json. It is run as a script, sees nothing of hibachi, and is killed
at will.

Each line of its input is a JSON list: the parts of the file, and letters. Each line that it prints is an object: "why"
the rules cannot be used, or null. See hibachi/llm/tokenizers/sandbox.py and rules.py.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

_SLOW = 0.1  # seconds of a processor for one of the long texts, which take some milliseconds
_LONG = 10_000  # characters
_GROWTH = 32  # times as long, which rules of a kind that we know never come to
_KINDS = "a 1.\nA\u00e9\u4e2d"
_PROBE = "The quick fox, \u00e9t\u00e9 20: 1.5 \u4f60\u597d \U0001f600\ttab\r\n  \u0915\u094d\u0937 \ufb01 \uff21 <s>"
_MOST_LETTERS = 12


def texts(expressions: str) -> Iterator[str]:
    """A short one, and long ones that expressions are known to fail on: a letter or a word again and again."""
    yield ""
    yield _PROBE
    letters = [c for c in dict.fromkeys(expressions) if c not in "\\()[]{}?*+|^$"]
    end = "\x01" + "".join(letters)[:64]
    for letter in dict.fromkeys([*_KINDS, *letters[:_MOST_LETTERS]]):
        yield letter * 64 + end
        yield letter * _LONG + end
    for word in dict.fromkeys(re.findall(r"\w\w+", expressions)[:_MOST_LETTERS]):
        yield (word * _LONG)[:_LONG] + end


def why_not(tokenizers: Any, parts: dict[str, Any], expressions: str) -> str | None:
    # The words in the vocabulary do not matter, and reading them takes long.
    model = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
    empty: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None}
    empty |= {"added_tokens": [], "post_processor": None}
    raw = tokenizers.Tokenizer.from_str(json.dumps({**empty, **parts, "model": model}))
    for text in texts(expressions):
        began = time.process_time()
        normal = text if raw.normalizer is None else raw.normalizer.normalize_str(text)
        words = [normal] if raw.pre_tokenizer is None else [w for w, _ in raw.pre_tokenizer.pre_tokenize_str(normal)]
        back = "" if raw.decoder is None else raw.decoder.decode(words)
        took, size = time.process_time() - began, max(sum(map(len, words)), len(back))
        of = f"{len(text)} characters, {text[:10]!r} ..."
        if took > _SLOW:
            return f"they took {took:.1f} s for {of}"
        if size > _GROWTH * (len(text) + 10):
            return f"they made {size} characters of {of}"
    return None


def set_alarm(seconds: float) -> None:
    """The end of the process, unless it is set anew before; Windows has no such thing."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def main(place: str, seconds: float, memory: int) -> None:
    sys.path.append(place)
    import tokenizers

    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except ImportError:  # no such limits on Windows
        pass
    for line in sys.stdin.buffer:
        set_alarm(seconds)
        try:
            why = why_not(tokenizers, *json.loads(line))
        except BaseException as e:  # the library panics
            why = f"the library tokenizers failed: {str(e)[:200]}"
        set_alarm(0)
        sys.stdout.buffer.write(json.dumps({"why": why}).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
