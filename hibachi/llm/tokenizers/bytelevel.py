"""GPT-2's two files, a vocabulary and a list of merges, as a tokenizer of the library tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hibachi.common.installed import need
from hibachi.errors import InvalidModelFiles, panicked
from hibachi.llm.model.fields import MOST_VOCABULARY, read_text
from hibachi.llm.tokenizers.ids import check_ids, read_unique
from hibachi.llm.tokenizers.patterns import QWEN2

NAMES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # the second as OpenAI published them
_END = "<|endoftext|>"


class _Style(NamedTuple):
    """How a kind of tokenizer differs from others with the same two files.

    special: names of tokens that are <|endoftext|> unless tokenizer_config.json says otherwise. words: how a text is
    cut into words before bytes are merged; None means as GPT-2 does. nfc: the text is brought into Unicode's form C
    first.
    """

    special: tuple[str, ...] = ("bos_token", "eos_token", "unk_token")
    words: str | None = None
    nfc: bool = False


_STYLES = {
    "GPT2Tokenizer": _Style(),
    "CodeGenTokenizer": _Style(),
    "Qwen2Tokenizer": _Style(
        special=("eos_token", "unk_token", "pad_token"),
        words=QWEN2,
        nfc=True,
    ),
}
_ANY = ("PreTrainedTokenizer", "TokenizersBackend")  # says nothing; then it is GPT-2's


def read_byte_level(vocab_file: Path, merges_file: Path, config: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """The `tokenizers.Tokenizer` of the two files, and its special tokens.

    config: the contents of tokenizer_config.json. Raises InvalidModelFiles, MissingExtra.
    """
    kind = str(config.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")
    style = _STYLES.get("GPT2Tokenizer" if kind in _ANY else kind)
    if style is None:
        raise InvalidModelFiles(
            f"{vocab_file.parent / 'tokenizer_config.json'}: expected a tokenizer_class out of {', '.join(_STYLES)} "
            f"with {vocab_file.name} and {merges_file.name}; got {kind!r:.80}. Make a tokenizer.json of it with "
            f"transformers: AutoTokenizer.from_pretrained(path).save_pretrained(path)."
        )
    library, vocab, merges = need("tokenizers", "Text"), read_unique(vocab_file), _merges(merges_file)
    check_ids(vocab_file, vocab)
    try:
        raw = library.Tokenizer(library.models.BPE(vocab, merges))
    except BaseException as e:
        if not (panicked(e) or isinstance(e, Exception)):  # the library raises Exception itself
            raise
        raise InvalidModelFiles(f"{merges_file} does not belong to {vocab_file.name}: {e}. Take both again.") from e
    before, prefix = library.pre_tokenizers, config.get("add_prefix_space") is True
    letters = before.ByteLevel(add_prefix_space=prefix, use_regex=style.words is None)
    if style.words is not None:
        letters = before.Sequence([before.Split(library.Regex(style.words), behavior="isolated"), letters])
    raw.pre_tokenizer = letters
    raw.normalizer = library.normalizers.NFC() if style.nfc else None
    raw.decoder = library.decoders.ByteLevel()
    return raw, dict.fromkeys(style.special, _END) if _END in vocab else {}


def _merges(file: Path) -> list[tuple[str, str]]:
    """A pair of tokens a line; the first line may name a version."""
    try:
        lines = read_text(file, MOST_VOCABULARY).split("\n")
    except (OSError, ValueError) as e:
        raise InvalidModelFiles(f"{file} cannot be read: {e}. Copy or download the file again.") from e
    merges = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#version"):
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise InvalidModelFiles(
                f"{file}: expected two tokens in line {number}; got {line!r:.80}. Download it again."
            )
        merges.append((pair[0], pair[1]))
    return merges
