"""Bodies that clients compress: what is read, with which bound, and how others are refused."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest

from .test_openai import refused

BODY = json.dumps({"prompt": "Emma", "max_tokens": 2, "temperature": 0}).encode()


def ask(server, body, coding, path="/v1/completions"):
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    return server.client.post(path, content=body, headers=headers)


def zstd(data):
    pa = pytest.importorskip("pyarrow")
    return pa.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    "coding, packed",
    [
        ("gzip", gzip.compress),
        ("GZip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("gzip", lambda data: gzip.compress(data[:5]) + gzip.compress(b"") + gzip.compress(data[5:])),  # of members
        ("deflate", zlib.compress),
        ("zstd", zstd),
        ("identity", bytes),
        ("", bytes),
    ],
)
def test_a_body_means_the_same_in_every_coding(server, coding, packed):
    plain = server.complete("Emma", max_tokens=2)["choices"]
    answer = ask(server, packed(BODY), coding)
    assert answer.status_code == 200 and answer.json()["choices"] == plain
    chat = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": "x"}).encode()
    assert refused(ask(server, packed(chat), coding, "/v1/chat/completions"))["param"] == "max_tokens"


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "compress", "zstd-2", "\xe9" * 999])
def test_other_codings_are_refused_by_name(server, coding):
    answer = ask(server, BODY, coding.encode("latin-1"))
    assert answer.status_code == 415 and answer.headers["accept-encoding"].startswith("gzip, deflate")
    assert len(answer.content) < 1000 and "Content-Encoding" in answer.json()["error"]["message"]


@pytest.mark.parametrize("coding, packed", [("gzip", gzip.compress), ("deflate", zlib.compress), ("zstd", zstd)])
def test_damaged_and_endless_bodies(server, coding, packed):
    """A thousand bytes of each that comes in is no more than the bound on what comes out."""
    whole = packed(BODY * 9)
    changed = [] if coding == "zstd" else [whole[:20] + b"\0" * 9 + whole[29:]]  # zstd need not have a checksum
    changed += [whole + b"more", packed(b"") * 99 + whole] if coding == "gzip" else []
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", BODY, *changed):
        assert "whole" in refused(ask(server, damaged, coding))["message"]
    bomb = packed(b'{"prompt": "' + b" " * (server.served.settings.max_body_size + 1) + b'"}')
    assert len(bomb) < server.served.settings.max_body_size / 500
    answer = ask(server, bomb, coding)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
    assert ask(server, packed(BODY), coding).status_code == 200
