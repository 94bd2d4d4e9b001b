"""Which tokens of a GGUF file end a text: those that it names, and those that llama.cpp's llama-vocab.cpp knows."""

from __future__ import annotations

from collections.abc import Sequence

from hibachi.llm.model.gguf.file import Metadata


def special_id(metadata: Metadata, name: str, size: int) -> int | None:
    """The id of bos, eos, unknown, ...; None if there is none below the size of the vocabulary, as in llama.cpp."""
    model = metadata.get("tokenizer.ggml.model")
    usual = {"unknown": 0, "bos": 1, "eos": 2} if isinstance(model, str) and model == "llama" else {}
    i = metadata.get(f"tokenizer.ggml.{name}_token_id", usual.get(name))
    return i if type(i) is int and 0 <= i < size else None


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ENDS = _names(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <turn|> "
    "<|tool_response> <|end_of_text|> <|endoftext|> </s> <eos> <EOT> _<EOT> [EOT] [EOS] <end_of_utterance> "
    "<｜end▁of▁sentence｜> [e~["
)
_CODE_ENDS = {  # a role among the parts of a file with a gap -> tokens that have it, unless the file names one
    "fim_pad": _names("<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
    "fim_rep": _names("<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    "fim_sep": _names("<|file_sep|>"),
}
MARKERS = _names(
    "<|end|> "
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> "
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> "
    "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>"
)
"""Tokens that are special by their name, whatever their type, and end no text."""


def end_ids(metadata: Metadata, size: int) -> list[int]:
    """The ids that end a text or a turn: those that the file names, and tokens that are known for it, as in llama.cpp.

    Chat models have several, which generation_config.json lists; a GGUF file has one entry, at most two.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokens = tokens[:size] if isinstance(tokens, list) else []
    found = [special_id(metadata, name, size) for name in ("eos", "eot", "eom", *_CODE_ENDS)]
    ends = known_ends(metadata, tokens)
    found += [i for i, token in enumerate(tokens) if token in ends]
    return [i for i in dict.fromkeys(found) if i is not None]


def known_ends(metadata: Metadata, tokens: Sequence[str]) -> set[str]:
    """Tokens that end a text by their name, whatever their type; files have wrong types."""
    names = _ENDS.union(*(t for role, t in _CODE_ENDS.items() if special_id(metadata, role, len(tokens)) is None))
    ends = set(names.intersection(tokens))
    if {"<|return|>", "<|call|>"} <= ends or ("<|flush|>" in ends and {"<|call|>", "<|calls|>"} & ends):
        ends.discard("<|end|>")  # of a message, where an answer has several
    if "<|tool_response>" in ends or "<|plamo:eos|>" in tokens:
        ends.discard("</s>")  # HTML there
    return ends
