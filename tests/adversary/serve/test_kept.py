"""What is kept of responses, while others write it, forget it and go on from it."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpx
import pytest

from hibachi.llm.dialects.responses import handler
from hibachi.llm.dialects.responses.items import Message, OutputText
from hibachi.llm.dialects.responses.store import KnownItems, Store, as_items

from ...engine.models import until
from ...serve.conftest import CHATML, ENGINES, Gate, site

URL = "/v1/responses"
ASKED = {"temperature": 0, "max_output_tokens": 4}


@pytest.fixture(scope="module")
def here():
    with ENGINES["child"]("tiny", max_num_seqs=8) as texts, site(texts, chat_template=CHATML) as found:
        yield found


def respond(here, input, **fields):
    answer = here.post(URL, {"input": input, **ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def statuses(here, id):
    """Of reading it, of its input, and of going on from it."""
    path = f"{URL}/{id}"
    yield here.client.get(path).status_code
    yield here.client.get(f"{path}/input_items").status_code
    yield here.post(URL, {"input": "b", "previous_response_id": id, **ASKED}).status_code


class Streamed:
    """A response that is streamed in a thread. id: once it has begun."""

    def __init__(self, here, **body):
        self.id, self.events, self.began, self._leaves = "", [], threading.Event(), threading.Event()
        self._url, self._body = here.url + URL, {"input": "a", "stream": True, **ASKED, **body}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
            came = b""
            for piece in answer.iter_bytes():
                *events, came = (came + piece).split(b"\n\n")
                self.events += [json.loads(event.partition(b"data: ")[2]) for event in events]
                if self.events and not self.id:
                    self.id = self.events[0]["response"]["id"]
                    self.began.set()
                if self._leaves.is_set():
                    return

    def leave(self):
        self._leaves.set()

    def end(self):
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.events[-1]


@pytest.fixture
def gated(tmp_path):
    gate = Gate(tmp_path)
    with ENGINES["own"](gate.model, max_num_seqs=4) as texts, site(texts, chat_template=CHATML) as here:
        yield gate, here
        gate.open()
    gate.close()


def begun(gate, here, **body):
    """A stream that has begun and goes on when the gate lets it."""
    streamed = Streamed(here, **body)
    until(lambda: gate.let() or streamed.began.wait(0.05))
    return streamed


def test_a_response_that_is_still_streamed_is_not_there_yet(gated):
    gate, here = gated
    streamed = begun(gate, here, max_output_tokens=100)
    assert [*statuses(here, streamed.id)] == [404] * 3
    assert here.client.delete(f"{URL}/{streamed.id}").status_code == 404
    gate.open()
    assert streamed.end()["type"] == "response.incomplete"
    assert [*statuses(here, streamed.id)] == [200] * 3, "one that was cut at its limit can be gone on from"


def test_a_response_that_failed_or_whose_client_left_is_not_kept(gated):
    gate, here = gated
    left = begun(gate, here, max_output_tokens=100)
    failed = begun(gate, here, max_output_tokens=100, timeout=2.0)
    left.leave()
    time.sleep(2.0)
    until(lambda: gate.let() or not here.served.open_requests)
    left.end()
    assert failed.end()["response"]["status"] == "failed"
    gate.open()
    assert [*statuses(here, failed.id)] == [*statuses(here, left.id)] == [404] * 3


def test_a_response_that_is_forgotten_meanwhile_is_in_what_goes_on_from_it(gated):
    gate, here = gated
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(respond, here, "One?")
        until(lambda: gate.let() or first.done())
    id = first.result()["id"]
    streamed = begun(gate, here, previous_response_id=id, max_output_tokens=100)
    assert here.client.delete(f"{URL}/{id}").status_code == 200
    gate.open()
    streamed.end()
    items = here.client.get(f"{URL}/{streamed.id}/input_items?order=asc").json()["data"]
    assert [item["content"][0]["text"] for item in items[::2]] == ["One?", "a"]
    assert [*statuses(here, id)] == [404] * 3 and [*statuses(here, streamed.id)] == [200] * 3


def test_many_go_on_from_one_at_once(here):
    first = respond(here, "One?")
    before = len(here.served.responses.of(""))
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda _: respond(here, "Two?", previous_response_id=first["id"]), range(16))]
    assert len({one["id"] for one in found}) == 16 == len(here.served.responses.of("")) - before
    assert len({json.dumps(one["output"][0]["content"]) for one in found}) == 1
    with ThreadPoolExecutor(8) as pool:
        gone = [*pool.map(lambda one: here.client.delete(f"{URL}/{one['id']}").status_code, [first, *found[:-1]])]
    assert gone == [200] * 16
    assert [*statuses(here, found[-1]["id"])] == [200] * 3


ODD = [
    "\0",
    "..",
    "../..",
    "%00",
    "resp_",
    "resp_abcdefgh_",
    "é",
    "\U0001f600",
    "a b",
    "a\nb",
    "'; --",
    "{}",
    "a" * 9000,
]


@pytest.mark.parametrize("id", ODD, ids=[f"{i}" for i in range(len(ODD))])
def test_ids_that_nobody_made(here, id):
    sent = quote(id, safe="")
    for method, path in (("GET", sent), ("DELETE", sent), ("GET", f"{sent}/input_items")):
        assert here.client.request(method, f"{URL}/{path}").status_code in (404, 405), (method, path[:90])
    for body in ({"input": "b", "previous_response_id": id}, {"input": [{"type": "item_reference", "id": id}]}):
        data = json.dumps(body).encode()
        answer = here.client.post(URL, content=data, headers={"Content-Type": "application/json"})
        assert answer.status_code == 404 and len(answer.content) < 1000


def test_a_store_that_is_full_of_long_conversations_makes_room_soon():
    """Whatever a request brings: a store is written on the event loop."""
    store = Store("abcdefgh")
    store.keep("0", b"{}", KnownItems(), [Message(role="user", content="a") for _ in range(1000)], [])
    before = store.conversation(store.find("0"))
    for i in range(1, 1000):
        store.keep(str(i), b"{}", before, [], [Message(id=f"msg_{i}", role="assistant", content=[OutputText("b")])])
    large = [Message(role="user", content="z" * 15_000) for _ in range(1000)]
    began = time.thread_time()
    assert store.keep("large", b"{}", KnownItems(), large, [])
    assert time.thread_time() - began < 0.3 and store.find("large")  # 0.05 s on two busy cores


def test_what_is_large_is_not_kept_unless_a_model_is_shown_it_and_is_read_beside_the_event_loop(here, monkeypatch):
    """Many small requests would fill a store with lists that one small request then has read at once."""
    part = {"type": "output_text", "text": "a", "annotations": [], "logprobs": [[]] * 50_000}
    store = here.served.responses.of("")
    before = store.size
    respond(here, [{"role": "assistant", "content": [part]}, {"role": "user", "content": "b"}])
    assert store.size - before < 10_000
    kept = respond(here, [{"type": "reasoning", "summary": [{"type": "summary_text", "text": ""}] * 2000}, *users("b")])
    [item] = here.client.get(f"{URL}/{kept['id']}/input_items?order=asc&limit=1").json()["data"]
    threads = []

    def noted(items):
        threads.append(threading.current_thread().name)
        return as_items(items)

    monkeypatch.setattr(handler, "as_items", noted)
    respond(here, [{"type": "item_reference", "id": item["id"]}, *users("c")])
    respond(here, users("c"), previous_response_id=kept["id"])
    respond(here, users("c"))
    large, again, small = threads
    assert large.rpartition("_")[0] == again.rpartition("_")[0] != small


def users(text):
    return [{"role": "user", "content": text}]
