"""What the operator set holds: limits, restarts, an end in time, files that stay, a log that says what happened."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from datetime import datetime
from types import SimpleNamespace

import httpx
import pytest

from hibachi.errors import ConfigError
from hibachi.request import Terms
from hibachi.server.web.address import bound

from ...engine.models import until
from ...serve.conftest import ENGINES, SLOW, site
from ...serve.test_run import LONG, SHORT, events, first


def ask(server, prompt, **more):
    """(status, body); whatever happens, something."""
    with suppress(OSError):
        status, _, text = server.ask("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 2, **more})
        return status, json.loads(text)
    return None, None


@pytest.fixture
def send():
    """send(server, prompt): a socket on which the answer comes, without waiting for it."""
    with ExitStack() as stack:

        def go(server, prompt):
            body = json.dumps({"prompt": prompt, "max_tokens": 2}).encode()
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", int(server.port)), timeout=20))
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            return sock

        yield go


# ---- limits (finding 16; S3) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "own, asked, holds", [(None, None, None), (3.0, None, 3.0), (None, 5.0, 5.0), (3.0, 5.0, 3.0), (5.0, 3.0, 3.0)]
)
def test_16_the_smaller_limit_counts(own, asked, holds):
    with ENGINES["own"]("tiny") as texts, site(texts, request_timeout=own or 0.0, queue_timeout=own or 0.0) as here:
        found = here.served.terms(Terms(timeout=asked, queue_timeout=asked), "")
        assert (found.timeout, found.queue_timeout) == (holds, holds)


def test_16_a_body_does_not_lift_the_servers_timeout(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    with ENGINES["own"](f"{file}:Slow") as texts, site(texts, request_timeout=0.3) as here:
        answer = here.post("/v1/completions", {"prompt": "a", "max_tokens": 100, "timeout": 100})
        assert answer.status_code == 408


# ---- an engine that is lost (finding 14) ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["exit", *(pytest.param(how, marks=pytest.mark.slow) for how in ("sleep", "hog", "stopped"))]
)
def test_14_with_restart_another_engine_begins(start, model, how, send):
    """Its process dies, its forward hangs, with the interpreter or without, or it is stopped from outside."""
    server = start("--model", model, "--restart", "--stall-after", "1").ready()
    assert ask(server, "a")[0] == 200
    if how == "stopped":
        os.kill(server.engine, signal.SIGSTOP)
    sock = send(server, "a" if how == "stopped" else how)
    until(lambda: ask(server, "a")[0] != 200)
    until(lambda: ask(server, "a")[0] == 200)
    assert sock.recv(65536).startswith(b"HTTP/1.1 503 ")
    if how != "exit":
        assert "is ended" in server.wait_for("is ended")
    assert server.end() == 0


@pytest.mark.parametrize("how", ["exit", *(pytest.param(how, marks=pytest.mark.slow) for how in ("sleep", "stopped"))])
def test_14_the_server_ends_if_it_is_to_end_with_its_engine(start, model, how, send):
    server = start("--model", model, "--exit-on-failure", "--stall-after", "1").ready()
    assert ask(server, "a")[0] == 200
    if how == "stopped":
        os.kill(server.engine, signal.SIGSTOP)
    send(server, "a" if how == "stopped" else how)
    assert server.popen.wait(20) == 1
    server.wait_for("the engine is lost, and the server ends")


@pytest.mark.slow
def test_14_not_while_another_engine_may_begin(start, model, send):
    server = start("--model", model, "--exit-on-failure", "--restart").ready()

    def ready():
        with suppress(OSError):
            return server.ask("GET", "/ready")[0] == 200

    for _ in range(4):  # one after the other, without a token in between: the last is not replaced
        with suppress(ConnectionResetError):
            send(server, "exit").recv(65536)
        until(lambda: server.popen.poll() is not None or ready())
        if server.popen.poll() is not None:
            break
    assert server.popen.wait(20) == 1
    assert sum("being started again" in line for line in server.log) == 3


def test_14_an_engine_here_that_fails_for_good_ends_the_server_too(start, model, send):
    server = start("--model", model, "--engine", "own", "--exit-on-failure", "--stall-after", "1").ready()
    send(server, "sleep")
    assert server.popen.wait(20) == 1


# ---- an end in time (finding 15) ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["own", "child"])
@pytest.mark.parametrize("how", ["sleep", pytest.param("hog", marks=pytest.mark.slow)])
def test_15_whatever_hangs_the_end_comes_in_time(start, model, engine, how, send):
    if (engine, how) == ("own", "hog"):
        pytest.skip("the interpreter that would hear the signal is held")
    server = start("--model", model, "--engine", engine, "--drain-timeout", "1").ready()
    send(server, how)
    time.sleep(0.5)
    began = time.monotonic()
    server.popen.send_signal(signal.SIGTERM)
    server.popen.wait(20)
    assert 0.9 < time.monotonic() - began < 4.5
    if engine == "child":
        with pytest.raises(ProcessLookupError):
            until(lambda: os.kill(server.engine, 0))


def test_15_a_second_signal_ends_at_once_though_the_loop_hangs(start, model, send):
    server = start("--model", model, "--drain-timeout", "20").ready()
    send(server, "sleep")
    time.sleep(0.3)
    server.popen.send_signal(signal.SIGTERM)
    server.wait_for("draining")
    began = time.monotonic()
    server.popen.send_signal(signal.SIGTERM)
    assert server.popen.wait(20) == 128 + signal.SIGTERM and time.monotonic() - began < 1


@pytest.fixture
def hearing():
    """Under nohup this process ignores the signal, and so would those that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_26_a_terminal_that_closes_is_an_end_in_good_order(start, hearing):
    server = start().ready()
    answer = server.stream(LONG)
    text = first(answer)
    server.popen.send_signal(signal.SIGHUP)
    *_, last, done = events(text + answer.read().decode())
    assert json.loads(last)["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
    assert server.popen.wait(20) == 0


# ---- files and addresses (findings 4, 27, 28) -----------------------------------------------------------------------


def settings(**more):
    return SimpleNamespace(**{"uds": None, "host": "127.0.0.1", "port": 0, "ssl_certfile": None} | more)


@pytest.mark.parametrize("kind", ["file", "folder", "link", "pipe"])
def test_4_what_is_no_socket_is_left_alone(tmp_path, kind):
    path, other = tmp_path / "precious", tmp_path / "other"
    other.write_text("gold")
    {
        "file": lambda: path.write_text("gold"),
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(other),
        "pipe": lambda: os.mkfifo(path),
    }[kind]()
    listening = bound(settings(uds=str(path)))
    with pytest.raises(ConfigError, match=r"--uds .*precious: there is a file of this name, which is no socket"):
        listening.__enter__()
    assert os.path.lexists(path) and other.read_text() == "gold"
    assert kind != "file" or path.read_text() == "gold"


def test_4_a_socket_that_was_left_over_is_replaced(tmp_path):
    path = str(tmp_path / "s.sock")
    left = socket.socket(socket.AF_UNIX)
    left.bind(path)
    left.close()
    with bound(settings(uds=path)) as ([listener], name, public):
        assert listener.getsockname() == path and name == f"unix:{path}" and not public
    assert not os.path.exists(path)


def test_27_a_name_with_two_addresses_is_listened_on_at_both():
    with bound(settings(host="localhost")) as (listeners, name, public):
        ports = {listener.getsockname()[1] for listener in listeners}
        families = [listener.family for listener in listeners]
        assert len(ports) == 1 and name == f"http://127.0.0.1:{ports.pop()}" and not public
        known = {family for family, *_ in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
        assert families[0] == socket.AF_INET and set(families) <= known and len(families) == len(set(families))


# ---- the log (findings 8, 17, 18) -----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["own", "child"])
@pytest.mark.parametrize("stream", [False, True])
def test_8_18_what_the_model_said_is_for_the_log(start, model, engine, stream):
    server = start("--model", model, "--engine", engine).ready()
    status, _, text = server.ask("POST", "/v1/completions", {"prompt": "raise", "max_tokens": 2, "stream": stream})
    assert status == 500 and "secret" not in text and "RuntimeError" not in text
    assert json.loads(text)["error"]["code"] == "model_fault"
    for words in ("the weights of /secret/path are gone", "It was raised at:", "model.py", "in logits"):
        server.wait_for(words)
    assert server.end() == 0


def test_8_what_ends_an_engine_is_in_the_log(start, tmp_path, model):
    """Its loop, by a policy that fails."""
    (tmp_path / "bad.py").write_text(
        "from hibachi.engine.engine import Engine\n"
        "def broken(self): raise ZeroDivisionError('the loop is broken')\n"
        f"exec(open({model.rpartition(':')[0]!r}).read())\n"
        "class Bad(Model):\n"
        "    deterministic = False\n"
        "    def logits(self, tokens, lengths):\n"
        "        if (tokens == 33).any(): Engine.step = broken\n"
        "        return super().logits(tokens, lengths)\n"
    )
    server = start("--model", f"{tmp_path}/bad.py:Bad").ready()
    assert ask(server, "!")[0] in (200, 503)
    for words in ("the engine's loop failed", "ZeroDivisionError: the loop is broken", "in broken"):
        server.wait_for(words)
    status, told = ask(server, "a")
    assert status == 503 and "broken" not in json.dumps(told)
    assert server.ask("GET", "/health")[0] == 503


def test_17_a_log_of_json(start, model):
    server = start("--model", model, "--log-format", "json", "--api-key", "k").ready()
    server.ask("POST", "/v1/completions", SHORT, key="k", X_Request_Id="mine")
    server.ask("POST", "/v1/completions", SHORT)
    server.ask("POST", "/v1/completions", {"prompt": "raise"}, key="k")
    server.ask("GET", "/nope/" + "x" * 1000)
    with socket.create_connection(("127.0.0.1", int(server.port)), timeout=20) as sock:
        sock.sendall(b"nonsense\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 400 ")
    figures = server.ask("GET", "/metrics")[2]
    assert server.end() == 0
    lines = [json.loads(line) for line in server.log if not line.startswith("hibachi: ")]
    for line in lines:
        assert datetime.fromisoformat(line["time"]).utcoffset().total_seconds() == 0
        assert line["level"] in ("info", "warning", "error") and line["logger"].startswith("hibachi")
    requests = [line for line in lines if line["logger"] == "hibachi.request"]
    assert [r["status"] for r in requests] == [200, 401, 500, 404, 400]
    good, denied, failed, nowhere, malformed = requests
    assert good["id"] == "mine" and good["tenant"] == "key1" and good["new"] == 3 and good["ttft"] >= 0
    assert denied["code"] == "invalid_api_key" and failed["code"] == "model_fault" and len(nowhere["path"]) <= 200
    assert malformed["code"] == "invalid_http"
    assert all(r["client"].startswith("127.0.0.1:") for r in requests)
    assert any("It was raised at:" in line["message"] + line.get("traceback", "") for line in lines)
    assert 'hibachi_http_requests_total{method="-",route="-",status="400"} 1' in figures
    assert 'hibachi_http_requests_total{method="-",route="-",status="404"} 1' in figures


def test_17_a_log_that_nobody_can_write_ends_nothing(model):
    """Standard error is a disk that is full."""
    command = [sys.executable, "-m", "hibachi", "serve", "--model", model, "--port", "0", "--uds"]
    path = model.rpartition("/")[0] + "/s.sock"
    with open("/dev/full", "w") as full:
        popen = subprocess.Popen([*command, path], stderr=full, stdin=subprocess.DEVNULL)
    try:

        def up():
            with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
                probe.connect(path)
                return True

        until(up)
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x", timeout=20) as client:
            assert client.post("/v1/completions", json={"prompt": "raise"}).status_code == 500
            assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(20) in (0, 120)
    finally:
        popen.kill()
        popen.wait()


def test_28_a_handshake_must_come_in_time(start, tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    how = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout"]
    subprocess.run(["openssl", "req", *how, str(key), "-out", str(cert)], check=True, capture_output=True)
    server = start("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--engine", "own", "--arrival-timeout", "1")
    server.ready()
    with socket.create_connection(("127.0.0.1", int(server.port)), timeout=20) as sock:
        began = time.monotonic()
        with suppress(ConnectionResetError):
            assert sock.recv(100) == b""
        assert time.monotonic() - began < 5


@pytest.mark.slow
def test_15_a_log_that_nobody_reads_does_not_hold_up_the_end(model):
    """Standard error is a pipe that is full."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    command = [sys.executable, "-m", "hibachi", "serve", "--model", model, "--port", "0", "--drain-timeout", "1"]
    popen = subprocess.Popen([*command, "--log-level", "debug"], stderr=writing, stdin=subprocess.DEVNULL)
    said = b""
    try:
        while b" on http" not in said or not said.endswith(b"\n"):
            said += os.read(reading, 4096)
        port = int(said.rpartition(b" on http://127.0.0.1:")[2].split(b" ")[0])
        with suppress(BlockingIOError):
            while True:
                os.write(writing, b"." * 4096)
        os.set_blocking(writing, True)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
            time.sleep(0.5)
            began = time.monotonic()
            popen.send_signal(signal.SIGTERM)
            popen.wait(20)
            assert time.monotonic() - began < 5
    finally:
        popen.kill()
        popen.wait()
        os.close(reading)
        os.close(writing)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--restart", "--exit-on-failure"])
def test_14_a_server_that_was_stopped_itself_finds_its_engine_well(start, flag):
    server = start(flag, "--stall-after", "1").ready()
    server.popen.send_signal(signal.SIGSTOP)
    time.sleep(3)
    server.popen.send_signal(signal.SIGCONT)
    time.sleep(2)
    assert ask(server, "a")[0] == 200 and not any("ended" in line or "is lost" in line for line in server.log)
    assert server.end() == 0
