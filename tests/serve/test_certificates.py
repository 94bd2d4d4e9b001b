"""Certificates of servers and clients, and files that change under a server that runs."""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn")

from hibachi.errors import ConfigError
from hibachi.server.web import certificate as certificates
from hibachi.server.web import server as servers
from hibachi.server.web.access import tell_of_none
from hibachi.server.web.certificate import Certificate, Files, certificate_of
from hibachi.server.web.ending import Drainable


@pytest.fixture(scope="session")
def pems(tmp_path_factory):
    """pems(name): (certificate, key) of 127.0.0.1 by this name, signed by itself."""
    folder, made = tmp_path_factory.mktemp("pems"), {}

    def make(name):
        if name not in made:
            cert, key = folder / f"{name}.pem", folder / f"{name}-key.pem"
            how = f"-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN={name} -addext"
            files = ["subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
            subprocess.run(["openssl", "req", *how.split(), *files], check=True, capture_output=True)
            made[name] = cert, key
        return made[name]

    return make


class Place:
    """The files of a server in a folder of their own, for `put` to change."""

    def __init__(self, folder, pems):
        self.cert, self.key, self.authorities = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
        self._pems = pems

    def put(self, name):
        cert, key = self._pems(name)
        replace(self.cert, cert.read_bytes())
        replace(self.key, key.read_bytes())

    def trust(self, *names):
        replace(self.authorities, b"".join(self._pems(name)[0].read_bytes() for name in names))

    def files(self, *, clients=False):
        return Files(str(self.cert), str(self.key), str(self.authorities) if clients else None)


def replace(file, data):
    """As those do that renew certificates: another file of the same name."""
    new = file.with_suffix(".new")
    new.write_bytes(data)
    os.replace(new, file)


@pytest.fixture
def place(tmp_path, pems):
    made = Place(tmp_path, pems)
    made.put("one")
    made.trust("anne")
    return made


class Plain(servers.HttpServer):
    """A server of an application without requests that run on."""

    def capture_signals(self):
        return nullcontext()

    async def main_loop(self):
        while not self.should_exit:  # uvicorn looks ten times a second
            await asyncio.sleep(0.01)


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def serving(certificate, loop="auto"):
    """The port of a server that looks at its files again and again."""
    server = Plain(servers.config_of(app, 10.0, tell_of_none, certificate, loop=loop), Drainable(), 1.0, 10.0)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
        listener.close()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(certificates, "EVERY", 0.0)
    monkeypatch.setattr(servers, "LOOK", 0.01)


def client(pems, shown=None, versions=None):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if shown is not None:
        context.load_cert_chain(*pems(shown))
    if versions is not None:
        context.minimum_version = context.maximum_version = versions
    return context


def connected(port, context):
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=context)
    connection.connect()
    return connection


def asked(connection):
    connection.request("GET", "/")
    return connection.getresponse().read()


def shown(port, context):
    """Who the server says it is, to a new connection that is answered."""
    connection = connected(port, context)
    try:
        assert asked(connection) == b"ok"
        return _name(connection)
    finally:
        connection.close()


def _name(connection):
    # CERT_NONE keeps no fields, so look for the name in the bytes.
    der = connection.sock.getpeercert(binary_form=True)
    return next(name for name in ("one", "two", "six") if b"\x03" + name.encode() in der)


def eventually(true):
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.005)


def refused(port, context):
    try:
        connection = connected(port, context)
        try:
            asked(connection)
        finally:
            connection.close()
    except (ssl.SSLError, OSError, http.client.HTTPException):
        return True
    return False


# ---- a pair that changes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
def test_a_new_pair_is_shown_to_new_connections_and_open_ones_go_on(place, pems, quick, caplog, loop):
    """In each of the loops that uvicorn may choose: `auto` is uvloop where it is installed."""
    caplog.set_level(logging.INFO, "hibachi.serve")
    with serving(Certificate(place.files()), loop) as port:
        context = client(pems)
        before = connected(port, context)
        assert asked(before) == b"ok" and shown(port, context) == "one"
        place.put("two")
        eventually(lambda: shown(port, context) == "two")
        assert asked(before) == b"ok" and _name(before) == "one"
        before.close()
    assert [r.message for r in caplog.records if "read again" in r.message] == [
        f"the certificate was read again: {place.cert}"
    ]


@pytest.mark.parametrize("bad", ["half", "other key", "gone", "empty", "text"])
def test_a_bad_pair_keeps_the_old_one_and_is_told_of_once(place, pems, quick, caplog, bad):
    caplog.set_level(logging.INFO, "hibachi.serve")
    cert, _ = pems("six")
    data = cert.read_bytes()
    new = {"half": data[: len(data) // 2], "other key": data, "gone": None, "empty": b"", "text": b"certificate"}[bad]
    told = lambda: [r.message for r in caplog.records if "kept" in r.message]  # noqa: E731
    with serving(Certificate(place.files())) as port:
        context = client(pems)
        if new is None:
            place.cert.unlink()
        else:
            replace(place.cert, new)
        eventually(told)
        assert shown(port, context) == "one"
        if new is not None:  # touched: bad in the same way
            os.utime(place.cert, ns=(1, 1))
            time.sleep(0.1)
        (only,) = told()
        assert only.startswith("the certificate was not read again, and the one before is kept: --ssl-certfile ")
        assert shown(port, context) == "one"
        place.put("two")  # which is whole now
        eventually(lambda: shown(port, context) == "two")
        assert len(told()) == 1
        place.cert.unlink()
        if new is not None:  # and once more
            place.cert.write_bytes(new)
        eventually(lambda: len(told()) == 2)


def test_files_are_read_only_when_they_have_stood_still(place, monkeypatch):
    """The certificate is here and its key is not yet: that is no error to tell of."""
    monkeypatch.setattr(certificates, "EVERY", 0.0)
    made, read = Certificate(place.files()), []
    monkeypatch.setattr(Files, "context", lambda files: read.append(1) or ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    made.look()
    assert not read
    for size in (1, 2, 3):
        replace(place.cert, b"." * size)
        made.look()
        assert not read
    made.look()
    made.look()
    assert len(read) == 1
    for times in (2, 3):  # the key alone, in the same place and of the same size
        os.utime(place.key, ns=(times, times))
        made.look()
        made.look()
        assert len(read) == times


def test_files_are_looked_at_once_a_second(place, monkeypatch):
    now, looked = [100.0], []
    monkeypatch.setattr(certificates, "time", SimpleNamespace(monotonic=lambda: now[0]))
    state = Files.state
    monkeypatch.setattr(Files, "state", lambda files: looked.append(1) or state(files))
    made = Certificate(place.files())
    for _ in range(12):
        now[0] += 0.25
        made.look()
    assert len(looked) == 1 + 3


def test_what_the_files_lack_is_said(pems, tmp_path):
    (text := tmp_path / "text").write_text("hello")
    cert, key = pems("one")
    for files, told in (((cert, None), "private key"), ((text, key), "certificate"), ((cert, text), "private key")):
        with pytest.raises(ConfigError, match=f"expected a {told} in PEM; .* holds none"):
            Files(*(file and str(file) for file in files), None).context()


def test_a_link_that_leads_elsewhere_is_a_change(place, pems, quick, tmp_path):
    """As Kubernetes renews what it mounts: a folder's name leads to another folder."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file, to in zip(pems(name), ("cert.pem", "key.pem"), strict=True):
            shutil.copy(file, tmp_path / name / to)
    data = tmp_path / "data"
    data.symlink_to("one")
    with serving(Certificate(Files(str(data / "cert.pem"), str(data / "key.pem"), None))) as port:
        (tmp_path / "new").symlink_to("two")
        os.replace(tmp_path / "new", data)
        eventually(lambda: shown(port, client(pems)) == "two")


# ---- clients' certificates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_who_shows_no_certificate_or_a_strangers_is_not_let_in(place, pems, version):
    with serving(Certificate(place.files(clients=True))) as port:
        for name in (None, "eve"):
            assert refused(port, client(pems, name, version))
        assert refused(port, None) and shown(port, client(pems, "anne", version)) == "one"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_authorities_change_too_and_a_ticket_of_before_is_worth_nothing(place, pems, quick, version):
    with serving(Certificate(place.files(clients=True))) as port:
        anne, emma = (client(pems, name, version) for name in ("anne", "emma"))
        assert shown(port, anne) == "one" and refused(port, emma)
        ticket = resumed(port, anne, None)
        assert ticket is not None
        place.trust("emma")
        eventually(lambda: not refused(port, emma))
        assert refused(port, anne)
        with pytest.raises(OSError):
            resumed(port, anne, ticket)
        replace(place.authorities, b"nobody")
        time.sleep(0.1)
        assert shown(port, emma) == "one" and refused(port, anne)


def resumed(port, context, ticket):
    """A request that begins with this session; the session it leaves."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as sock,
        context.wrap_socket(sock, session=ticket) as safe,
    ):
        safe.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        if not safe.recv(1000).startswith(b"HTTP/1.1 200 "):
            raise ConnectionError  # TLS 1.3 refuses a client after that has begun
        return safe.session


# ---- the settings --------------------------------------------------------------------------------------------------


def settings(**given):
    return SimpleNamespace(**{"ssl_certfile": None, "ssl_keyfile": None, "ssl_ca_certs": None} | given)


def test_what_cannot_be_used_is_said_before_the_server_begins(place, pems, tmp_path):
    cert, key = str(place.cert), str(place.key)
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    other = str(pems("two")[1])
    for given, message in (
        ({"ssl_keyfile": key}, r"^--ssl-keyfile is the key of --ssl-certfile, which is missing"),
        (
            {"ssl_ca_certs": cert},
            r"^--ssl-ca-certs checks the certificates of clients over TLS, so it needs --ssl-certfile",
        ),
        ({"ssl_certfile": cert}, r"^--ssl-certfile .*cert\.pem"),
        ({"ssl_certfile": cert, "ssl_keyfile": other}, r"^--ssl-certfile .*mismatch"),
        (
            {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": "no/such"},
            r"^--ssl-ca-certs no/such: .*No such file",
        ),
        ({"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": str(empty)}, r"^--ssl-ca-certs .*empty\.pem: "),
    ):
        with pytest.raises(ConfigError, match=message):
            certificate_of(settings(**given))
    assert certificate_of(settings()) is None


def test_certificate_and_key_in_one_file(place, pems):
    place.cert.write_bytes(place.cert.read_bytes() + place.key.read_bytes())
    with serving(certificate_of(settings(ssl_certfile=str(place.cert)))) as port:
        assert shown(port, client(pems)) == "one"
