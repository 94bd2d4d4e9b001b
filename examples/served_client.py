"""Asks a server for tokens that are no text, in three ways. Beside `hibachi serve music_codebooks.py:Round`:

    python served_client.py http://127.0.0.1:8000

Each way gets the same piece of music: frames of four voices, which go on until all four are silent. The last way needs
msgspec, which the extra `serve` brings.
"""

import io
import json
import sys
from urllib.request import Request, urlopen

import msgspec
import numpy as np

BEGINNING = np.array([[1, 0, 0, 0]])  # one frame, the first note in the first voice


def ask(url, body, kind, accept):
    headers = {"Content-Type": kind, "Accept": accept}
    return urlopen(Request(f"{url}/v1/generate", body, headers), timeout=60)


def with_npy(url):
    """An array there and an array back, as numpy.save writes them."""
    body = io.BytesIO()
    np.save(body, BEGINNING)
    with ask(url, body.getvalue(), "application/x-npy", "application/x-npy") as answer:
        return np.load(io.BytesIO(answer.read()))


def with_json(url):
    """Lists of numbers, while they are made: a line for each step, or for several if they come faster than we read."""
    body = json.dumps({"prompt": BEGINNING.tolist(), "stream": True}).encode()
    with ask(url, body, "application/json", "application/x-ndjson") as answer:
        events = [json.loads(line) for line in answer if line.strip()]  # an empty line only says that it goes on
    if "error" in events[-1]:
        raise RuntimeError(events[-1]["error"]["message"])
    return np.array([frame for event in events for frame in event.get("tokens", [])])


def with_msgpack(url):
    """The bytes of an array there and back, with nothing to parse but what they are."""
    prompt = {"dtype": "int64", "shape": BEGINNING.shape, "data": BEGINNING.astype("<i8").tobytes()}
    body = msgspec.msgpack.encode({"prompt": prompt})
    with ask(url, body, "application/msgpack", "application/msgpack") as answer:
        found = msgspec.msgpack.decode(answer.read())
    return np.frombuffer(found["tokens"], found["dtype"]).reshape(-1, *found["shape"])


def main(url="http://127.0.0.1:8000"):
    pieces = [ask_with(url) for ask_with in (with_npy, with_json, with_msgpack)]
    print(f"{len(pieces[0])} frames of {pieces[0].shape[1]} voices, silent at the end: {not pieces[0][-1].any()}")
    print("three times the same:", all(np.array_equal(pieces[0], piece) for piece in pieces))


if __name__ == "__main__":
    main(*sys.argv[1:])
