"""What a request for tokens may say: as JSON or msgpack, or as an array or bytes with all else in the query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw

from hibachi.backend.array_backend import HostArray
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.forms import Structured
from hibachi.llm.dialects.openai.bodies import Sampling, read, refused_by
from hibachi.llm.dialects.tokens.arrays import MAGIC, of_json, of_msgpack, of_npy

Pairs = Sequence[tuple[str, str]]
_NOTHING = Raw()
JSON, MSGPACK, NPY, BYTES = "application/json", "application/msgpack", "application/x-npy", "application/octet-stream"
MSGPACKS = (MSGPACK, "application/x-msgpack", "application/vnd.msgpack")
TYPES = (JSON, MSGPACK, NPY, BYTES)
PAGE = "docs/serving-tokens.md"
OfCodebook = dict[str, int | float | list[int] | dict[str, float]]


class Parameters(Sampling, kw_only=True, forbid_unknown_fields=True):
    """What stands in a query, or beside the prompt."""

    stream: bool = False
    encoding: Literal["list", "base64"] = "list"
    stop: Raw = _NOTHING
    atol: float | None = None
    include_stop: bool | None = None
    logprobs: int | None = None
    structured_outputs: Structured | None = None
    n: int | None = None  # samples, or the best beams; in one answer
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    # Where its tokens have several codebooks; where the model declares inputs.
    codebooks: list[OfCodebook] | None = None
    inputs: dict[str, Raw] | None = None


class TokensBody(Parameters, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/generate. prompt, or input by another name: see `hibachi.llm.dialects.tokens.arrays`."""

    prompt: Raw = _NOTHING
    input: Raw = _NOTHING


def is_json(kind: str) -> bool:
    """Whether a media type is JSON."""
    return kind == JSON or kind.endswith("+json")


class Given:
    """A body and what it asks. kind: its media type; what is not one of TYPES is read by the model's own `read`.

    Raises Refused.
    """

    said: Parameters
    own: bool

    def __init__(self, raw: bytes, kind: str, query: Pairs = ()) -> None:
        self._raw, self._kind = raw, kind
        self.own = False
        if is_json(kind):
            self.said = read(TokensBody, raw, PAGE)
        elif kind in MSGPACKS:
            self.said = _of_msgpack(raw)
        else:
            self.said = of_query(query)
            self.own = kind not in (NPY, BYTES) or (kind == BYTES and not raw.startswith(MAGIC))
        if isinstance(self.said, TokensBody) and query:
            raise Refused(
                "Parameters stand in a body of this type, and none in the query, which has some.",
                param="query",
                code="unknown_parameter",
            )

    def prompt(self, dtype: str | None) -> HostArray:
        """dtype: that is wanted of lists. Raises Refused."""
        said = self.said
        if not isinstance(said, TokensBody):
            return of_npy(self._raw)
        given = [(name, raw) for name, raw in (("prompt", said.prompt), ("input", said.input)) if _is_given(raw)]
        if len(given) != 1:
            raise Refused(
                "The field prompt is missing." if not given else "prompt and input mean the same. Send one of them.",
                param="prompt",
                code="invalid_value" if given else "missing_required_parameter",
            )
        [(name, raw)] = given
        return self._array(raw, name, dtype)

    def stop(self, dtype: str | None) -> HostArray | None:
        """Stop tokens [n, *token]; None means none were sent. Raises Refused."""
        given = self.said.stop
        return self._array(given, "stop", dtype) if _is_given(given) else None

    def inputs(self, dtypes: Mapping[str, str]) -> dict[str, HostArray | None] | None:
        """Arrays by their names. dtypes: that are wanted of lists; what has another name is not read, and None. Raises
        Refused.
        """
        given = self.said.inputs
        if given is None:
            return None
        return {
            name: self._array(raw, f"inputs.{name}", dtypes[name]) if name in dtypes else None
            for name, raw in given.items()
        }

    def _array(self, raw: Raw, name: str, dtype: str | None) -> HostArray:
        return (of_msgpack if self._kind in MSGPACKS else of_json)(raw, name, dtype)


_from_msgpack = msgspec.msgpack.Decoder(TokensBody)


def _is_given(raw: Raw) -> bool:
    return bytes(raw) not in (b"", b"null", b"\xc0")


def _of_msgpack(raw: bytes) -> TokensBody:
    try:
        return _from_msgpack.decode(raw)
    except msgspec.ValidationError as e:
        raise refused_by(e, TokensBody, PAGE) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise Refused(f"The body must be a map in msgpack: {e}.", code="invalid_msgpack") from None
    except RecursionError:
        raise Refused("The body is nested too deep.", code="invalid_msgpack") from None


_OF_JSON: Mapping[str, Any] = {
    "logit_bias": dict[str, float],
    "allowed_token_ids": list[int],
    "codebooks": list[OfCodebook],
    "inputs": dict[str, Raw],
    "structured_outputs": Structured,
}


def of_query(pairs: Pairs) -> Parameters:
    """Names and values of a query. What is a list elsewhere is written as in JSON. Raises Refused."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise Refused(f"{name[:200]} stands in the query twice.", param=name[:200], code="invalid_value")
        fields[name] = value
        if name == "stop":
            fields[name] = Raw(value.encode())
        elif name in _OF_JSON:
            try:
                fields[name] = msgspec.json.decode(value, type=_OF_JSON[name])
            except (msgspec.DecodeError, RecursionError) as e:
                raise Refused.at(name, f": {e}.", code="invalid_type") from None
    stop, inputs = fields.pop("stop", _NOTHING), fields.pop("inputs", None)
    try:
        said = msgspec.convert(fields, Parameters, strict=False)
    except msgspec.ValidationError as e:
        raise refused_by(e, Parameters, PAGE) from None
    said.stop, said.inputs = stop, inputs
    return said
