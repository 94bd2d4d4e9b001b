"""The server as a process: how it starts, serves, loses its engine and ends."""

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest

COMMAND = [sys.executable, "-m", "hibachi", "serve"]
PROMPT = "It is a truth universally acknowledged"
LONG = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
SHORT = {"prompt": PROMPT, "max_tokens": 3}


class Process:
    """A server. `tidings`: the line that says where it listens; `log`: the lines on standard error until now.

    deaf: with the next line nobody reads them any more.
    """

    deaf = over = False

    def __init__(self, *args):
        kept = ("NATIVE", "AUTOTUNE", "DEFAULT_BACKEND")
        env = {k: v for k, v in os.environ.items() if not k.startswith("HIBACHI_") or k.endswith(kept)}
        self.popen = subprocess.Popen(
            [*COMMAND, *args], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=env
        )
        self.log, self._more, self._connections = [], threading.Condition(), []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        while (line := self.popen.stderr.readline()) and not self.deaf:
            with self._more:
                self.log.append(line)
                self._more.notify_all()
        if self.deaf:
            self.popen.stderr.close()
        with self._more:
            self.over = True
            self._more.notify_all()

    def wait_for(self, text, seconds=30):
        """The first line with this text."""
        found = lambda: next((line for line in self.log if text in line), None)  # noqa: E731
        with self._more:
            assert self._more.wait_for(lambda: found() or self.over, seconds), self.log
            assert found() is not None, self.log
            return found()

    def ready(self):
        self.tidings = self.wait_for(" on http")
        self.host, self.port = re.search(r"on https?://(.+):(\d+) ", self.tidings).groups()
        return self

    @property
    def engine(self):
        return int(re.search(r"engine in process (\d+)", self.tidings)[1])

    def ask(self, method, path, body=None, key=None, **headers):
        """(status, headers, body)"""
        answer = _send(self._connect(), method, path, body, key, headers)
        return answer.status, answer.headers, answer.read().decode()

    def stream(self, body, key=None):
        """The answer, as it comes."""
        return _send(self._connect(), "POST", "/v1/completions", body, key, {})

    def _connect(self):
        self._connections.append(http.client.HTTPConnection("127.0.0.1", int(self.port), timeout=20))
        return self._connections[-1]

    def end(self, number=signal.SIGTERM):
        """The exit status."""
        self.popen.send_signal(number)
        status = self.popen.wait(20)
        self.reader.join()  # until the last line
        return status

    def clear(self):
        self.popen.kill()
        self.popen.wait()
        self.reader.join()
        self.popen.stderr.close()
        for connection in self._connections:
            connection.close()


def _send(connection, method, path, body, key, headers):
    headers = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    return connection.getresponse()


def first(answer):
    """Some events of a stream, so that it is under way."""
    return b"".join(answer.readline() for _ in range(6)).decode()


def events(text):
    return [line.removeprefix("data: ") for line in text.splitlines() if line]


def gone(pid, seconds=10):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def start():
    """start(*args): a server that listens."""
    made = []

    def call(*args, model="tiny", port="0"):
        made.append(Process(model, "--port", port, *args))
        return made[-1]

    yield call
    for process in made:
        process.clear()


@pytest.mark.parametrize("engine", ["child", "own"])
def test_a_server_serves_and_drains(start, engine):
    server = start("--engine", engine, "--api-key", "sesame", "--served-model-name", "a", "b").ready()
    assert "serving a, b on http://127.0.0.1:" in server.tidings
    assert "numpy" in server.tidings and "float32" in server.tidings
    assert ("engine in this process" in server.tidings) == (engine == "own")
    assert server.ask("GET", "/ready")[0] == server.ask("GET", "/health")[0] == 200
    assert server.ask("GET", "/metrics")[0] == 200
    assert server.ask("POST", "/v1/completions", SHORT)[0] == 401
    assert server.ask("POST", "/v1/completions", SHORT, key="open")[0] == 401
    status, headers, body = server.ask("POST", "/v1/completions", SHORT, key="sesame", X_Request_Id="mine")
    assert status == 200 and headers["X-Request-Id"] == "mine" and json.loads(body)["model"] == "a"

    answer = server.stream(LONG, key="sesame")
    text = first(answer)
    server.popen.send_signal(signal.SIGTERM)
    server.wait_for("draining")
    status, headers, body = server.ask("POST", "/v1/completions", SHORT, key="sesame")
    assert status == 503 and headers["Retry-After"] and json.loads(body)["error"]["code"] == "shutting_down"
    status, _, body = server.ask("GET", "/ready")
    assert status == 503 and "shutting down" in body
    assert server.ask("GET", "/health")[0] == 200
    *_, last, done = events(text + answer.read().decode())
    assert json.loads(last)["choices"][0]["finish_reason"] == "length" and done == "[DONE]"
    assert server.popen.wait(20) == 0
    server.reader.join()
    log = "".join(server.log)
    line = server.wait_for("id=mine")
    figures = r"prompt=\d+ new=3 ttft=\d+\.\d+s total=\d+\.\d+s"
    assert re.search(rf"POST /v1/completions 200 {figures} id=mine tenant=key1 client=127.0.0.1:\d+", line)
    assert "new=400" in log and " 401 code=invalid_api_key total=" in log and " 503 code=shutting_down total=" in log
    assert "GET /ready" not in log and "Traceback" not in log
    assert "truth" not in log and "sesame" not in log


HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n"
)


@contextmanager
def connected(server, data=b""):
    with socket.create_connection(("127.0.0.1", int(server.port)), timeout=20) as sock:
        sock.sendall(data)
        yield sock


def rest(sock):
    """What comes until the server closes the connection."""
    said = b""
    with suppress(ConnectionResetError):
        while data := sock.recv(4096):
            said += data
    return said.decode()


def _until(sock, end):
    said = ""
    while not said.endswith(end):
        said += (data := sock.recv(4096)).decode()
        assert data, said
    return said


def test_what_has_not_come_whole_does_not_hold_up_the_end(start):
    """Neither half a body nor half the headers; what runs goes on to its end."""
    server = start().ready()
    with connected(server, HEAD + b'{"prompt": ') as body, connected(server, HEAD[:30]) as head:
        answer = server.stream(LONG)
        text = first(answer)
        began = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        said = rest(body)
        assert said.startswith("HTTP/1.1 503 ") and '"code":"shutting_down"' in said and "retry-after" in said.lower()
        assert rest(head) == ""
        assert '"finish_reason":"length"' in text + answer.read().decode()
        assert server.popen.wait(20) == 0
        assert time.monotonic() - began < 10  # of the 25 that a request has
    assert "Traceback" not in "".join(server.log)


def test_a_request_that_does_not_come_in_time(start, slow_model):
    server = start("--arrival-timeout", "0.5", "--engine", "own", model=slow_model).ready()
    ready = b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(server) as silent, connected(server, HEAD[:30]) as half, connected(server, HEAD) as body:
        assert rest(silent) == rest(half) == ""
        said = rest(body)
        assert said.startswith("HTTP/1.1 408 ") and '"code":"arrival_timeout"' in said and "0.5 seconds" in said
    with connected(server, ready[:-1]) as sock, pytest.raises(OSError):
        for _ in range(100):  # byte by byte is no faster
            time.sleep(0.05)
            sock.sendall(b"a")
    with connected(server) as sock:
        for _ in range(2):
            sock.sendall(ready)
            assert "HTTP/1.1 200 " in _until(sock, "}")
            time.sleep(0.8)  # idle: that is allowed
        sock.sendall(ready[:10])
        assert rest(sock) == ""
    answer = server.stream({"prompt": "a", "max_tokens": 30, "stream": True})  # at most twenty a second
    began, text = time.monotonic(), answer.read().decode()
    assert time.monotonic() - began > 0.6 and '"finish_reason":"length"' in text
    assert server.end() == 0 and "Traceback" not in "".join(server.log)


def test_what_is_not_done_in_time_is_cut_off(start):
    server = start("--drain-timeout", "0.1", "--host", "0.0.0.0").ready()
    assert "any client that reaches http://0.0.0.0:" in server.wait_for("no --api-key")
    answer = server.stream(LONG | {"max_tokens": 480})
    text = first(answer)
    assert server.end(signal.SIGINT) == 0
    *_, last, done = events(text + answer.read().decode())
    assert json.loads(last)["error"]["code"] == "shutting_down" and done == "[DONE]"
    assert "1 requests were not done after 0.1 s" in server.wait_for("cut off")
    assert "Traceback" not in "".join(server.log) and gone(server.engine)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(start):
    server = start("--host", "0.0.0.0", "--api-key", "k").ready()
    assert not any("--api-key" in line for line in server.log)
    first(server.stream(LONG, key="k"))
    server.popen.send_signal(signal.SIGTERM)
    server.wait_for("draining")
    assert server.end() == 128 + signal.SIGTERM
    assert gone(server.engine)


def test_an_engine_that_dies_is_told_of_and_the_server_stays(start):
    server = start().ready()
    answer = server.stream(LONG)
    text = first(answer)
    os.kill(server.engine, signal.SIGKILL)
    *_, last, done = events(text + answer.read().decode())
    error = json.loads(last)["error"]
    assert error["code"] == "engine_failed" and "log says why" in error["message"] and done == "[DONE]"
    server.wait_for("by signal 9")
    for path in ("/health", "/ready"):
        status, headers, body = server.ask("GET", path)
        assert status == 503 and "by signal 9" in json.loads(body)["reason"] and headers["Retry-After"]
    status, _, body = server.ask("POST", "/v1/completions", SHORT)
    assert status == 503 and json.loads(body)["error"]["code"] == "engine_failed"
    assert server.end() == 0


def test_an_engine_that_dies_comes_back_with_restart(start):
    server = start("--restart").ready()
    answer = server.stream(LONG)
    text = first(answer)
    os.kill(server.engine, signal.SIGKILL)
    assert '"code":"engine_failed"' in text + answer.read().decode()
    until = time.monotonic() + 20
    while server.ask("GET", "/ready")[0] != 200:
        assert time.monotonic() < until, server.log
        time.sleep(0.05)
    assert server.ask("POST", "/v1/completions", SHORT)[0] == 200
    assert server.end() == 0


def test_signals_to_the_whole_service_are_the_servers_alone(start):
    """As of a terminal, or of a service manager that tells every process."""
    server = start().ready()
    answer = server.stream(LONG)
    text = first(answer)
    os.kill(server.engine, signal.SIGTERM)
    os.kill(server.engine, signal.SIGINT)
    assert server.end() == 0
    assert '"finish_reason":"length"' in text + answer.read().decode()


def test_a_port_that_is_taken_is_told_of_before_the_model_is_loaded(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start(model="no/such/model", port=str(port))
        assert server.popen.wait(20) == 1
    line = server.wait_for("Cannot listen")
    assert line.startswith(f"hibachi: Cannot listen on 127.0.0.1:{port}: address already in use.")


SLOW = """
import os, pathlib, time

pathlib.Path("pid").write_text(str(os.getpid()))
time.sleep(60)
"""


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_loading_leaves_nothing(start, tmp_path, monkeypatch, number, status):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    server = start(model="slow.py:Model")
    until = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < until, server.log
        time.sleep(0.02)
    assert server.end(number) == status
    assert "Traceback" not in "".join(server.log)
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_a_unix_socket(start, tmp_path):
    path = tmp_path / "s"
    for _ in range(2):  # once more over what a killed server has left
        server = start("--uds", str(path), "--engine", "own")
        server.wait_for(f" on unix:{path} ")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        server.popen.kill()
        server.popen.wait()
        assert path.exists()
    server = start("--uds", str(path), "--engine", "own")
    server.wait_for(" on unix:")
    assert server.end() == 0 and not path.exists()


def test_https_and_a_log_that_nobody_reads(start, tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    how = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=x -addext"
    files = ["subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", "req", *how.split(), *files], check=True, capture_output=True)
    server = start("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--engine", "own").ready()
    assert " on https://127.0.0.1:" in server.tidings
    server.deaf = True
    context = ssl.create_default_context(cafile=str(cert))
    for _ in range(3):
        connection = http.client.HTTPSConnection("127.0.0.1", int(server.port), timeout=20, context=context)
        answer = _send(connection, "POST", "/v1/completions", SHORT, None, {})
        assert answer.status == 200 and answer.read()
        connection.close()
    assert server.end() == 0


def test_settings_from_a_file_and_the_environment_reach_the_server(start, tmp_path):
    (tmp_path / "serve.toml").write_text(
        'served-model-name = ["from-file"]\nmax-n = 2\nengine = "own"\nport = 0\n'
        'root-path = "/llm"\nallowed-origins = ["https://page.example"]\n'
    )
    server = start("--config", str(tmp_path / "serve.toml"), "--max-body-size", "300").ready()
    assert "from-file" in server.tidings and "engine in this process" in server.tidings
    assert server.ask("POST", "/v1/completions", SHORT | {"n": 3})[0] == 400
    assert server.ask("POST", "/v1/completions", SHORT | {"prompt": "x" * 400})[0] == 413
    assert server.ask("GET", "/v1/models/from-file")[0] == server.ask("GET", "/llm/v1/models/from-file")[0] == 200
    for host, status in (("evil.example", 403), ("page.example", 200), ("localhost:1", 200)):
        assert server.ask("GET", "/version", Host=host)[0] == status
    for origin, found in (("https://page.example", "https://page.example"), ("https://evil.example", None)):
        assert server.ask("GET", "/version", Origin=origin)[1]["Access-Control-Allow-Origin"] == found
    assert server.end() == 0
    assert " - - 403 code=host_not_allowed " in "".join(server.log)


@pytest.mark.slow
def test_certificates_of_clients_and_one_that_is_renewed(start, tmp_path):
    """The command itself; the ways a pair can be bad are in test_certificates.py."""
    how = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=x -addext"
    cert, key, anne, annes = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "anne.pem", "annes.pem"))

    def sign(cert, key):
        files = ["subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
        subprocess.run(["openssl", "req", *how.split(), *files], check=True, capture_output=True)

    sign(cert, key)
    sign(anne, annes)
    server = start("--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", anne, "--engine", "own").ready()

    def ask(*shown):
        context = ssl.create_default_context(cafile=cert)
        if shown:
            context.load_cert_chain(*shown)
        connection = http.client.HTTPSConnection("127.0.0.1", int(server.port), timeout=20, context=context)
        try:
            answer = _send(connection, "POST", "/v1/completions", SHORT, None, {})
            return answer.read() and answer.status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    assert ask() is None and ask(anne, annes) == 200 and ask(cert, key) is None
    sign(cert, key)
    assert ask(anne, annes) is None  # not yet
    server.wait_for("the certificate was read again: ")
    assert ask(anne, annes) == 200 and ask() is None
    assert server.end() == 0
