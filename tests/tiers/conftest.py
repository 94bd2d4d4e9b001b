"""Places for entries: Redis as a copy in Python and as the program, memory and a folder by fsspec."""

import shutil
import socket
import subprocess
from contextlib import suppress

import fakeredis
import pytest
import redis

from tests.lib.waits import until


@pytest.fixture(params=["redis", "memory", "file"])
def address(request, tmp_path, monkeypatch):
    found = fakeredis.FakeServer()
    monkeypatch.setattr(redis.Redis, "from_url", lambda url, **options: fakeredis.FakeRedis(server=found))
    return {"redis": "redis://host/0", "memory": f"memory:/{tmp_path}", "file": f"file://{tmp_path}/new"}[request.param]


@pytest.fixture
def redis_program(tmp_path):
    """The process and the address of redis-server on a free port."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("the program redis-server is not installed (on Debian: apt install redis-server)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            until(lambda: answers(port))
            yield process, f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()


def answers(port):
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
