"""The model and the beginning of the text, out of bodies of every kind."""

import gzip
import json
import time
import zlib

import pytest

from hibachi.llm.dialects.errors import Refused
from hibachi.router import inspect_body as peek
from hibachi.router.inspect_body import Named, goes_on_from, look, model_of_path, server_of
from hibachi.router.routes import response_of_path

JSON = b"application/json"


@pytest.mark.parametrize(
    "body, model",
    [
        (b'{"model": "m"}', "m"),
        (b'{"messages": [{"model": "inner", "content": "\\"model\\": \\"text\\""}], "n": 1e3, "model": "m"}', "m"),
        (b'{"model": "a", "model": "b"}', "b"),
        (b'{"mod\\u0065l": "\\u00fc"}', "ü"),
        (b'{"prompt": "x"}', None),
        (b'{"model": null}', None),
        (b"  {}\n", None),
    ],
)
def test_the_top_level_model_of_json(body, model):
    assert look(body, JSON, b"") == (model, b"")
    assert look(body, b"", b"")[0] == look(body, b"application/vnd.api+json; charset=utf-8", b"")[0] == model


@pytest.mark.parametrize("body", [b"{", b"[]", b'"m"', b"\xff{}", b'{"model": "m"} x', b"[" * 100_000])
def test_what_is_no_json_object_is_refused_where_it_says_that_it_is(body):
    with pytest.raises(Refused, match="no valid JSON object") as e:
        look(body, JSON, b"")
    assert e.value.status == 400
    assert look(body, JSON, b"", strict=False) == (None, b"")
    assert look(body, b"text/plain", b"") == (None, b"")


@pytest.mark.parametrize("model", ["5", "[]", "{}", "true"])
def test_a_model_is_a_text(model):
    with pytest.raises(Refused, match="model: expected a text"):
        look(b'{"model": %s}' % model.encode(), JSON, b"")


MANY = b"[" + b"[]," * 1_000_000 + b"[]]"  # seconds, were it read
PACKED = b"\xdd\x00\x40\x00\x00" + b"\x90" * 2**22


@pytest.mark.parametrize(
    "kind, many", [(JSON, MANY), (b"application/msgpack", b"\xdd\x00\x40\x00\x00" + b"\x90" * 2**22)]
)
def test_a_model_of_very_many_values_is_not_read(kind, many):
    body = b'{"model":' + many + b"}" if kind == JSON else b"\x81\xa5model" + many
    began = time.thread_time()
    with pytest.raises(Refused, match="model: expected a name of at most 65536 bytes; got"):
        look(body, kind, b"")
    assert time.thread_time() - began < 0.2


@pytest.mark.parametrize(
    "body",
    [
        b'{"previous_response_id":' + MANY + b"}",
        b'{"input":[' + MANY + b',{"type":"item_reference","id":"msg_abcdefgh_1"}]}',
        b'{"input":[{"type":"item_reference","id":' + MANY + b"}]}",
        b'{"input":[{"id":"msg_abcdefgh_1"},{"role":' + MANY + b"}]}",
        b'{"input":["' + b'\\"id\\"' * 1_000_000 + b'",{"id":7}]}',
        b'{"input":[{"id"' + b" " * 8_000_000 + b':"msg_abcdefgh"}]}',
    ],
    ids=["a response", "an item", "an id", "a role", "a text", "spaces"],
)
def test_very_many_values_name_no_server(body):
    began = time.thread_time()
    assert goes_on_from(body, b"") is None
    assert time.thread_time() - began < 0.3


@pytest.mark.parametrize("packed", [gzip.compress, zlib.compress])
def test_packed_bodies_are_looked_at_and_bounded(packed, monkeypatch):
    encoding = b"gzip" if packed is gzip.compress else b"deflate"
    body = packed(json.dumps({"prompt": "x" * 5000, "model": "m"}).encode())
    assert look(body, JSON, encoding)[0] == "m"
    assert look(body[:-9], JSON, b"br") == look(b"nothing", JSON, encoding) == (None, b"")
    monkeypatch.setattr(peek, "MOST_UNPACKED", 1000)
    with pytest.raises(Refused) as e:
        look(body, JSON, encoding)
    assert e.value.status == 413


def parts(*fields, boundary=b"xyz"):
    lines = []
    for head, value in fields:
        lines += [b"--" + boundary, b"Content-Disposition: form-data; " + head, b"", value]
    return b"\r\n".join([*lines, b"--" + boundary + b"--", b""])


@pytest.mark.parametrize("quoted", [b"xyz", b'"xyz"'])
def test_a_field_of_a_form_in_parts(quoted):
    sound = (b'name="file"; filename="a.wav"\r\nContent-Type: audio/wav', b'\x00\xff name="model"\r\n\r\nno')
    model = (b'name="model"', b"whisper")
    kind = b"Multipart/Form-Data; boundary=" + quoted
    assert look(parts(sound, model), kind, b"")[0] == look(parts(model, sound), kind, b"")[0] == "whisper"
    assert look(parts(sound), kind, b"")[0] is None
    assert look(parts(sound)[:60], kind, b"")[0] is None
    assert look(b"", kind, b"")[0] is look(parts(model), b"multipart/form-data", b"")[0] is None


def test_a_form_and_what_curl_sends_without_being_told():
    kind = b"application/x-www-form-urlencoded"
    assert look(b"prompt=x&model=m%20n", kind, b"")[0] == "m n"
    assert look(b' {"model": "m"}', kind, b"")[0] == "m"
    assert look(b"{broken", kind, b"")[0] is None


def test_the_beginning_of_a_text_is_raw_and_bounded():
    body = b'{"model": "m", "temperature": 1, "system": "be brief", "messages": [ {"role":"user"} ]}'
    assert look(body, JSON, b"", text=100)[1] == b'"be brief"[ {"role":"user"} ]'
    assert look(body, JSON, b"", text=12)[1] == b'"be brief"[ '
    blocks = b'[{"type": "text", "text": "be brief"}]'
    body = b'{"messages": [1], "system": %s, "model": "m"}' % blocks
    assert look(body, JSON, b"", text=100)[1] == blocks + b"[1]"
    for given in (b'"say"', b'[{"role": "user", "content": [{"type": "input_text", "text": "say"}]}]'):
        body = b'{"input": %s, "instructions": "be brief"}' % given
        assert look(body, JSON, b"", text=100)[1] == b'"be brief"' + given
    assert look(b'{"inputs": "abc"}', JSON, b"", text=100)[1] == b'"abc"'
    assert look(b'{"prompt": [1, 2]}', JSON, b"", text=100)[1] == b"[1, 2]"
    assert look(b"{}", JSON, b"", text=100)[1] == b""


def test_b27_the_model_of_a_path():
    assert model_of_path("/v1/engines/m/n/completions") == "m/n"
    assert model_of_path("/v1/models/org/name") == "org/name"
    assert model_of_path("/v1/completions") is model_of_path("/v1/models") is None


# ---- servers that keep responses -----------------------------------------------------------------------------------

OURS, ITEM = "resp_abcdefgh_0a1b2c", "msg_zzzzzzzz_1_0"
REFERENCE = {"type": "item_reference", "id": ITEM}


@pytest.mark.parametrize(
    "body, id, param",
    [
        ({"previous_response_id": OURS}, OURS, "previous_response_id"),
        ({"previous_response_id": None, "input": "a"}, None, None),
        ({"previous_response_id": 7}, None, None),
        ({"previous_response_id": "resp_67ccd2bed1ec8190b14f964abc054267"}, None, None),
        ({"input": f"previous_response_id {OURS}"}, None, None),
        ({"input": [{"previous_response_id": OURS}]}, None, None),
        ({"input": [{"content": "item_reference"}, {"type": "item_reference", "id": OURS}]}, OURS, "input[1].id"),
        ({"input": [{"type": "item_reference", "id": "x"}, {"type": "item_reference", "id": "msg_b_1"}]}, None, None),
        ({"input": [REFERENCE], "previous_response_id": None}, ITEM, "input[0].id"),
        ({"input": [REFERENCE], "previous_response_id": OURS}, OURS, "previous_response_id"),
        ({"input": [{"role": "user", "content": "a"}, {"id": ITEM}]}, ITEM, "input[1].id"),
        ({"input": [{"type": None, "id": ITEM}, {"id": OURS}]}, ITEM, "input[0].id"),
        ({"input": [{"role": "assistant", "id": ITEM, "content": "a"}]}, None, None),
        ({"input": [{"role": None, "id": ITEM}]}, None, None),
        ({"input": [{"type": "message", "id": "msg_abcdefgh_1"}, {"type": "item_reference"}]}, None, None),
        ({"input": ["item_reference", 7, {"id": ITEM}]}, None, None),
        ([], None, None),
    ],
)
def test_what_a_response_goes_on_from(body, id, param):
    """References need not say their type; what has a role is a message."""
    named = None if id is None else Named("zzzzzzzz" if id == ITEM else "abcdefgh", id, param)
    for data in (json.dumps(body).encode(), json.dumps(body, indent=1, separators=(" ,", " : ")).encode()):
        assert goes_on_from(data, b"") == goes_on_from(gzip.compress(data), b"gzip") == named
        assert goes_on_from(data[:-1], b"") is goes_on_from(data, b"br") is None


@pytest.mark.parametrize(
    "path, id",
    [
        (f"/v1/responses/{OURS}", OURS),
        (f"/v1/responses/{OURS}/input_items", OURS),
        ("/v1/responses", ""),
        ("/v1/responses/", ""),
        (f"/v1/files/{OURS}", ""),
    ],
)
def test_the_response_that_a_path_names(path, id):
    assert response_of_path(path) == id
    assert server_of(id) == ("abcdefgh" if id else "")
