"""A page in a browser that asks a server of another origin (SERVER.md 2.4): what it may, and what a stranger may not.

The browser is Chromium, without a window. The page (clients/page.html) sends what it was answered to the server that it
came from. With pytest's -s it is shown.
"""

import json
import queue
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hibachi import LLM, SamplingParams

from .conftest import serving
from .venvs import CLIENTS

pytestmark = [pytest.mark.install, pytest.mark.xdist_group("browser")]

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
KEYED = {"Authorization": "Bearer k", "Content-Type": "application/json"}
PROMPT, LENGTH = "It is a truth universally acknowledged", 400  # tokens, so that they come bit by bit
TEXT = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0}


class Pages:
    """A server of the page, by an origin of its own, and a browser that looks at it."""

    def __init__(self, home):
        pages = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200 if self.path.startswith("/?") else 404)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.end_headers()
                self.wfile.write((CLIENTS / "page.html").read_bytes())

            def do_POST(self):
                pages.said.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.said, self._home = queue.Queue(), home
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self.server.server_port}"

    def ask(self, url, calls):
        """What the page was answered to each of calls: {name: {"path", "init": of fetch}}."""
        query = urllib.parse.urlencode({"asked": json.dumps({"url": url, "calls": calls})})
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
        command = [BROWSER, *options, f"--user-data-dir={self._home / 'profile'}", f"{self.origin}/?{query}"]
        log = self._home / "chromium.txt"
        with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as browser:
            try:
                found = self.said.get(timeout=60)
            except queue.Empty:
                pytest.fail(f"the page said nothing: {log.read_text()[-2000:]}")
            finally:
                browser.terminate()
        print(f"\n{self.origin} asks {url}:")
        for name, came in found.items():
            pieces = came.get("pieces", ())
            shown = {**came, "pieces": len(pieces), "text": "".join(pieces)[:300]} if pieces else came
            print(f"{name}: {json.dumps(shown)}")
        return found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    if BROWSER is None:
        pytest.skip("needs Chromium: apt install chromium")
    found = Pages(tmp_path_factory.mktemp("pages"))
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@contextmanager
def server(folder, *arguments):
    """Its address, and counted(): the computed tokens, and for each HTTP status how many answers had it."""
    with serving(folder / "log", *arguments) as url:

        def counted():
            with urllib.request.urlopen(f"{url}/metrics") as answer:
                told = answer.read().decode()
            statuses = Counter()
            posts = r'^hibachi_http_requests_total\{method="POST",.*status="(\d+)"\} (\d+)'
            for status, n in re.findall(posts, told, re.M):
                statuses[int(status)] += int(n)
            return int(re.search(r"^hibachi_prompt_tokens_total (\d+)", told, re.M)[1]), statuses

        yield url, counted


def post(body, **headers):
    """As fetch takes it."""
    return {"method": "POST", "headers": {**KEYED, **headers}, "body": json.dumps(body)}


def test_a_page_of_an_allowed_origin_streams(pages, tmp_path):
    calls = {
        "stream": {"path": "/v1/completions", "init": post({**TEXT, "stream": True}, **{"X-Request-Id": "mine"})},
        "whole": {"path": "/v1/completions", "init": post(TEXT)},
        "tokens": {
            "path": "/v1/generate",
            "init": post({"prompt": [1, 2, 3], "max_tokens": 3, "stream": True}, Accept="application/x-ndjson"),
        },
        "tgi": {"path": "/generate_stream", "init": post({"inputs": PROMPT, "parameters": {"max_new_tokens": 3}})},
        "wrong": {"path": "/v1/completions", "init": post({"prompt": PROMPT, "max_tokens": -1})},
        "no key": {"path": "/v1/completions", "init": post(TEXT, Authorization="Bearer other")},
    }
    with server(tmp_path, "--api-key", "k", "--allowed-origins", pages.origin) as (url, _):
        said = pages.ask(url, calls)
    with LLM("tiny") as llm:
        (expected,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=LENGTH))
    assert said["stream"]["id"] == "mine" and {s["type"] for s in said.values()} == {"cors"}
    *events, end = "".join(said["stream"]["pieces"]).strip().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert end == "data: [DONE]" and len(said["stream"]["pieces"]) > 1
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected.text
    (whole,) = json.loads("".join(said["whole"]["pieces"]))["choices"]
    assert whole["text"] == expected.text
    opening, *tokens, ending = map(json.loads, "".join(said["tokens"]["pieces"]).splitlines())
    assert opening["dtype"] == "int32" and sum(len(part["tokens"]) for part in tokens) == 3
    assert ending["finish_reason"] == "length"
    assert "".join(said["tgi"]["pieces"]).count("data: {") == 3
    for name, status in (("wrong", 400), ("no key", 401)):  # a page may read what was wrong
        assert said[name]["status"] == status and re.fullmatch("[0-9a-f]{24}", said[name]["id"])
        assert json.loads("".join(said[name]["pieces"]))["error"]["message"]


def test_a_page_of_a_stranger_gets_nothing(pages, tmp_path):
    """Neither answers, nor that something is computed: what its browser sends without asking is refused by its type."""
    asking = {"method": "POST", "headers": {"Content-Type": "application/json"}}
    calls, blind = {}, ("text", "untyped", "form")
    for path, body in (
        ("/v1/completions", TEXT),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/generate", {"prompt": [1, 2, 3], "max_tokens": 2}),
        ("/generate", {"inputs": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/reset_prefix_cache", {}),
    ):
        sent = {"method": "POST", "mode": "no-cors", "body": json.dumps(body)}
        form = {**sent, "headers": {"Content-Type": "application/x-www-form-urlencoded"}}
        calls[f"read {path}"] = {"path": path, "init": {**asking, "body": json.dumps(body)}}
        calls[f"text {path}"] = {"path": path, "init": sent}
        calls[f"untyped {path}"] = {"path": path, "init": sent, "untyped": True}
        calls[f"form {path}"] = {"path": path, "init": form}
    calls["read /v1/models"] = {"path": "/v1/models", "init": {}}
    for name, origins in (("none", ()), ("others", ("--allowed-origins", "http://page.example"))):
        (tmp_path / name).mkdir()
        with server(tmp_path / name, *origins) as (url, counted):
            said = pages.ask(url, calls)
            computed, statuses = counted()
        for call, found in said.items():
            if call.startswith("read"):
                assert found == {"error": "TypeError: Failed to fetch"}, call
            else:  # sent, and the page does not learn what became of it
                assert (found["type"], found["status"], found["id"]) == ("opaque", 0, None), call
        assert computed == 0 and statuses == {403: len(blind), 415: len(blind) * 5}, statuses
