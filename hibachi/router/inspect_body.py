"""What a request asks for, read without changing a byte of it: its model, and the beginning of its text."""

from __future__ import annotations

import mmap
import re
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec

from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.json_limits import at_once, check_weight
from hibachi.server.web.content_encoding import BITS, inflate

MOST_UNPACKED = 1 << 25  # bytes of a compressed body that are looked at
LONGEST_HEAD = 1 << 13  # bytes of the head of a part of a form
MOST_FIELDS = 1000
LONGEST_FORM = 1 << 20  # bytes of a field of a form
LONGEST_NAME = 1 << 16  # bytes of a model's name or an id, as they are written
_ENGINES = re.compile(r"/v1/engines/(.+)/(?:completions|embeddings)")
_MODELS = re.compile(r"/v1/models/(.+)")
# Claude Code writes it in front of its system prompt, different in each request; our servers leave it out.
_BILLING = re.compile(rb"x-anthropic-billing-header:[^\"\\]*")
_BOUNDARY = re.compile(rb'boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
_MODEL_FIELD = re.compile(
    rb"""\r\ncontent-disposition:[^\r\n]*;[ \t]*name=(?:"model"|model)(?=[\s;]|$)""", re.IGNORECASE
)
_NOTHING = msgspec.Raw()
Data = bytes | mmap.mmap


class _Named(msgspec.Struct):
    model: msgspec.Raw = _NOTHING


class _BodyTexts(_Named):
    messages: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    inputs: msgspec.Raw = _NOTHING
    text: msgspec.Raw = _NOTHING
    system: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING


class _Keeps(msgspec.Struct):
    previous_response_id: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING


class _Item(msgspec.Struct):
    type: Any = None
    id: Any = None
    role: msgspec.Raw = _NOTHING

    @property
    def refers(self) -> bool:
        """As servers read it: what has neither a type nor a role is a reference, too."""
        return bool(self.type == "item_reference") or (self.type is None and self.role is _NOTHING)


class Named(NamedTuple):
    """A response or an item that a request goes on from. server: that keeps it. param: the field that names it; None
    means the path does.
    """

    server: str
    id: str
    param: str | None = None


_keeps, _items = msgspec.json.Decoder(_Keeps), msgspec.json.Decoder(list[_Item])
_OURS = re.compile(r"(?:resp|msg|rs|fc|fco)_([a-z]{8})_\w+")
_ID_OF_OURS = re.compile(rb'"id"\s*:\s*"(?:resp|msg|rs|fc|fco)_[a-z]{8}_')  # without it there is no reference to us
_named, _texts = msgspec.json.Decoder(_Named), msgspec.json.Decoder(_BodyTexts)
_packed = msgspec.msgpack.Decoder(_Named)
_MSGPACK = frozenset((b"application/msgpack", b"application/x-msgpack", b"application/vnd.msgpack"))


def model_of_path(path: str) -> str | None:
    """The model that a path (decoded) names, as text-inference-batcher's `/v1/engines/MODEL/completions` does."""
    found = _ENGINES.fullmatch(path) or _MODELS.fullmatch(path)
    return found[1] if found else None


def model_of_query(query: bytes) -> str | None:
    """The model that a query names, where a body is an array or bytes."""
    try:
        fields = parse_qs(query.decode("ascii"), max_num_fields=MOST_FIELDS)
    except ValueError:
        return None
    return fields["model"][-1] if "model" in fields else None


def server_of(id: Any) -> str:
    """What the id of a response, or of an item, says of the server that keeps it; "" means it is none of ours."""
    found = _OURS.fullmatch(id) if isinstance(id, str) else None
    return found[1] if found else ""


def goes_on_from(body: Data, encoding: bytes) -> Named | None:
    """The response that the body of a request names, or else the first item that it refers to, where an id of ours
    says who keeps it.
    """
    plain = body if not encoding or encoding == b"identity" else _unpacked(body, encoding)
    if plain is None:
        return None
    try:
        found = _keeps.decode(plain)
        previous = _named_by(found.previous_response_id, msgspec.json.decode)
        if server := server_of(previous):
            return Named(server, previous, "previous_response_id")
        if not _ID_OF_OURS.search(memoryview(found.input)):
            return None
        check_weight(given := bytes(found.input))
        with at_once(len(given)):
            items = _items.decode(given)
        each = (Named(server_of(item.id), item.id, f"input[{i}].id") for i, item in enumerate(items) if item.refers)
        return next((named for named in each if named.server), None)
    except (Refused, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # its server says what is wrong


def look(body: Data, kind: bytes, encoding: bytes, *, text: int = 0, strict: bool = True) -> tuple[str | None, bytes]:
    """(the model that a body names, the beginning of its text: at most `text` bytes).

    kind, encoding: of the headers. strict: raises Refused for what says that it is JSON, and is none.
    """
    if encoding and encoding != b"identity":
        unpacked = _unpacked(body, encoding)
        if unpacked is None:
            return None, b""
        body = unpacked
    kind, _, more = kind.partition(b";")
    kind = kind.strip().lower()
    if kind == b"multipart/form-data":
        return _of_parts(body, more), b""
    if kind == b"application/x-www-form-urlencoded" and not bytes(memoryview(body)[:64]).lstrip().startswith(b"{"):
        return _of_form(body), b""
    packed = kind in _MSGPACK
    says_json = not kind or kind == b"application/json" or kind.endswith(b"+json")
    try:
        if packed:
            return _model(_named_by(_packed.decode(body).model, msgspec.msgpack.decode)), b""
        return _of_json(body, text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        if not ((says_json or packed) and strict):
            return None, b""
        what, code = ("map in msgpack", "invalid_msgpack") if packed else ("JSON object", "invalid_json")
        raise Refused(f"The body is no valid {what}: {e}.", code=code) from None


def _of_json(body: Data, text: int) -> tuple[str | None, bytes]:
    found = _texts.decode(body) if text else _named.decode(body)
    model = _model(_named_by(found.model, msgspec.json.decode))
    if not text:
        return model, b""
    assert isinstance(found, _BodyTexts)
    said, left = [], text
    for part in (found.system, found.instructions, found.messages, found.prompt, found.input, found.inputs, found.text):
        if left > 0 and part is not _NOTHING:
            beginning = bytes(memoryview(part)[:left])
            said.append(_BILLING.sub(b"", beginning, 1) if part is found.system else beginning)
            left -= len(said[-1])
    return model, b"".join(said)


def _named_by(raw: msgspec.Raw, decode: Callable[[msgspec.Raw], Any]) -> Any:
    """The value of a field that is a name; None means there is none. What is too long for one is not read: it may be
    millions of values. Raises Refused.
    """
    if raw is _NOTHING:
        return None
    if (size := len(memoryview(raw))) > LONGEST_NAME:
        raise Refused(f"model: expected a name of at most {LONGEST_NAME} bytes; got {size}.", param="model")
    return decode(raw)


def _model(named: Any) -> str | None:
    if named is not None and not isinstance(named, str):
        raise Refused(f"model: expected a text; got {type(named).__name__}.", param="model")
    return named or None


def _of_form(body: Data) -> str | None:
    text = bytes(memoryview(body)[:LONGEST_FORM]).decode("utf-8", "replace")
    try:
        fields = parse_qs(text, max_num_fields=MOST_FIELDS)
    except ValueError:
        return None
    return fields["model"][-1] if "model" in fields else None


def _of_parts(body: Data, more: bytes) -> str | None:
    """The field `model` of a form in parts (RFC 7578). Anything else than a short text is none."""
    boundary = _BOUNDARY.search(more)
    if boundary is None:
        return None
    mark = b"--" + (boundary[1] or boundary[2])
    data = body
    at = data.find(mark)
    while at >= 0:
        head = data.find(b"\r\n\r\n", at, at + LONGEST_HEAD)
        if head < 0:
            return None
        end = data.find(b"\r\n" + mark, head + 2)
        if end < 0:
            return None
        if _MODEL_FIELD.search(data[at:head]):
            value = data[head + 4 : min(end, head + 4 + LONGEST_FORM)]
            return str(value.decode("utf-8", "replace").strip())
        at = end + 2
    return None


def _unpacked(body: Data, encoding: bytes) -> bytes | None:
    """None means not a packing that is read here, or damaged; the upstream will say. Raises Refused for one too
    large.
    """
    bits = BITS.get(encoding.strip().lower())
    if bits is None:
        return None
    try:
        return inflate(body, bits, MOST_UNPACKED)[0]
    except zlib.error:
        return None
