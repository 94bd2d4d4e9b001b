"""Ray Data and Ray Serve in an environment of their own, as `make` installs no Ray."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from .venvs import CLIENTS, OFFLINE, checkout, run, strangers

pytestmark = [pytest.mark.install, pytest.mark.xdist_group("ray")]
PROGRAM = CLIENTS / "on_ray.py"
ENV = {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
LONG = {"prompt": "She was", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    home = tmp_path_factory.mktemp("ray")
    found = strangers(home, "ray[data,serve]") / "python"
    run(found, "-m", "pip", "install", "--quiet", f"{checkout(home / 'checkout')}[ray,serve,text]", cwd=home)
    return found


def said(output):
    """What the program said, and not Ray."""
    return [json.loads(line) for line in output.splitlines() if line.startswith(("[[[", '"'))]


def test_rows_by_two_actors_one_of_which_is_killed_are_those_of_one_engine(python, tmp_path):
    [[by_two, alone]] = said(run(python, PROGRAM, "data", 2000, cwd=tmp_path, **ENV))
    assert by_two == alone and len(alone) == 2000
    assert [i for i, row in enumerate(alone) if row[-1] is not None] == [*range(0, 2000, 50)]


def test_a_model_that_cannot_be_loaded_is_named_and_not_tried_for_ever(python, tmp_path):
    served, mapped = said(run(python, PROGRAM, "broken", cwd=tmp_path, **ENV))
    assert "There is no folder /no/such" in served and "There is no folder /no/such" in mapped


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def process(*command, ready, **more):
    """A process that has said so."""
    told = subprocess.Popen(
        list(map(str, command)), stdin=subprocess.PIPE, text=True, env=os.environ | OFFLINE | ENV, **more
    )
    said = told.stdout or told.stderr
    try:
        for line in said:
            if ready in line:
                break
        assert told.poll() is None
        reading = threading.Thread(target=said.read)  # a pipe that nobody reads would fill up
        reading.start()
        yield
    finally:
        told.stdin.close()
        if more.get("stderr"):
            told.terminate()
        told.wait(120)
        reading.join(20)
        said.close()


@pytest.fixture(scope="module")
def port(python, tmp_path_factory):
    port = free_port()
    place = tmp_path_factory.mktemp("serve")
    with process(python, PROGRAM, "serve", port, ready="ready", cwd=place, stdout=subprocess.PIPE):
        yield port


def running(client):
    """Rows that are busy, in whichever replicas are asked."""
    texts = [client.get("/metrics").text for _ in range(8)]
    return sum(
        float(line.split()[-1]) for t in texts for line in t.splitlines() if line.startswith("hibachi_requests_running")
    )


def test_serve_answers_streams_refuses_and_frees_the_row_of_a_client_that_left(port):
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        assert client.post("/v1/completions", json=LONG).json()["usage"]["completion_tokens"] == 200
        unknown = client.post("/v1/completions", json=LONG | {"model": "other"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
            times = [time.monotonic() for line in answer.iter_lines() if line.startswith("data:")]
        assert len(times) > 20 and times[-1] - times[0] > 0.1, "not all at once"
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True, "max_tokens": 500}) as answer:
            next(answer.iter_lines())
            assert running(client)
        left = time.monotonic()
        while running(client):
            assert time.monotonic() - left < 10
        print(f"the row of a client that left was free after {time.monotonic() - left:.2f} s")


def ticks(pid):
    """Processor time of a process."""
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().rsplit(")", 1)[1].split()[11:13]))


def busiest_replica():
    told = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout.splitlines()[1:]
    rows = [line.split(None, 2) for line in told]
    engines = {
        p: [q for q, parent, _ in rows if parent == p] for p, _, args in rows if args.startswith("ray::ServeRep")
    }
    before = {p: sum(map(ticks, own)) for p, own in engines.items()}
    time.sleep(0.3)
    return int(max(engines, key=lambda p: sum(map(ticks, engines[p])) - before[p]))


def test_behind_the_router_a_replica_that_is_killed_fails_no_request_that_had_not_begun(port):
    places = [f"http://127.0.0.1:{port}", f"http://localhost:{port}"]  # one proxy by two names: it is tried once more
    own, ends = free_port(), [None] * 24
    command = [sys.executable, "-m", "hibachi", "route", *places, "--port", own, "--log-level", "warning"]

    def ask(i):
        begun = False
        body = LONG | {"prompt": f"Chapter {i}.", "stream": i % 2 == 0}
        try:
            with httpx.stream("POST", f"http://127.0.0.1:{own}/v1/completions", json=body, timeout=120) as answer:
                text = ""
                for piece in answer.iter_text():
                    begun, text = True, text + piece
            whole = answer.status_code == 200 and '"error"' not in text
            ends[i] = "whole" if whole else f"cut {text[-200:]}" if answer.status_code == 200 and begun else text
        except httpx.HTTPError as e:
            ends[i] = f"cut {e!r}" if begun else repr(e)

    with process(*command, ready="routing to 2", stderr=subprocess.PIPE):
        asking = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
        for thread in asking:
            thread.start()
        os.kill(busiest_replica(), signal.SIGKILL)
        for thread in asking:
            thread.join()
    print(sum(end == "whole" for end in ends), "of 24 whole;", [end for end in ends if end != "whole"])
    assert all(end == "whole" or end.startswith("cut") for end in ends), ends
