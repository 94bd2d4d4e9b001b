"""Processes as ranks, on PyTorch with gloo: started by us and by torchrun, killed, stopped, and asked to end."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("torch")

from hibachi import LLM, ConfigError, EngineFailed, SamplingParams
from hibachi_torch import exchange

OPTIONS = {"backend": "torch", "max_num_seqs": 8, "max_model_len": 256, "tp_leaves": 4}
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True, logprobs=1)
TWO = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}
PROMPTS = [[5, 6, 7], list(range(5, 45)), [9], list(range(100, 170))]
PROGRAM = """
from hibachi import LLM, SamplingParams
from tests.group.test_processes import OPTIONS, answers
llm = LLM("tiny", {sizes}, **OPTIONS)
print(answers(llm))
llm.close()
"""


def answers(llm):
    return [(c.token_ids, c.logprobs) for out in llm.generate(PROMPTS, PARAMS) for c in out.choices]


def ranks():
    """The processes that this one has started as ranks."""
    found = subprocess.run(
        ["pgrep", "-f", "hibachi_torch.rank", "-P", str(os.getpid())], capture_output=True, text=True
    )
    return [int(pid) for pid in found.stdout.split()]


def gone(pids, seconds=10):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def want():
    with LLM("tiny", **OPTIONS) as llm:
        return answers(llm)


NOWHERE = "/proc"  # no file can be made there: so ranks exchange through sockets


@pytest.mark.parametrize(("sizes", "memory"), [(TWO, NOWHERE), (TWO | STAGES, exchange.MEMORY)])
def test_ranks_that_we_start_give_the_bits_of_one_and_leave_nothing_behind(want, sizes, memory, monkeypatch):
    monkeypatch.setattr(exchange, "MEMORY", memory)
    with LLM("tiny", **sizes, **OPTIONS) as llm:
        assert (llm.backend.group.exchange is None) == (memory == NOWHERE)
        assert llm.engine.facts.numerics.startswith("cpu-2/4 ") and llm.deterministic and llm.selfcheck() > 0
        assert answers(llm) == want
        with pytest.raises(ConfigError, match="a model over several processes already"):
            LLM("tiny", **TWO, **OPTIONS)
        pids = ranks()
        assert len(pids) == 2 * len(sizes) - 1
    assert gone(pids) and "RANK" not in os.environ
    with LLM("tiny", **OPTIONS) as llm:
        assert answers(llm) == want


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "stall_after, sizes, killed",
    [
        (None, TWO, 1),
        (1e300, STAGES, 1),
        pytest.param(None, {"pipeline_parallel_size": 3}, 1, marks=slow),
        pytest.param(None, {"pipeline_parallel_size": 3}, 2, marks=slow),
        *(pytest.param(None, TWO | STAGES, rank, marks=slow) for rank in (1, 2, 3)),
    ],
)
def test_a_rank_that_is_killed_ends_all_streams_at_once(stall_after, sizes, killed):
    with LLM("tiny", **sizes, stall_after=stall_after, **OPTIONS) as llm:
        streams = [llm.engine.run([5, i], PARAMS.with_(max_tokens=250)) for i in range(3)]
        for stream in streams:
            next(stream)
        os.kill(ranks()[killed - 1], signal.SIGKILL)
        began = time.monotonic()
        for stream in streams:
            with pytest.raises(EngineFailed, match=rf"Rank {killed} has ended\. The model needs all \d ranks"):
                list(stream)
        assert time.monotonic() - began < 5 and llm.engine.health().state == "failed"


@slow
@pytest.mark.parametrize("sizes", [TWO, STAGES])
def test_a_rank_that_hangs_is_named_before_the_engine_counts_as_lost(sizes):
    llm = LLM("tiny", **sizes, stall_after=5.0, **OPTIONS)
    stream = llm.engine.run([5], PARAMS.with_(max_tokens=250))
    next(stream)
    pids = ranks()
    os.kill(pids[0], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(EngineFailed, match="Rank 1 does not answer: it was last heard"):
        list(stream)
    assert time.monotonic() - began < 5.5
    llm.close()
    assert gone(pids)


@slow
@pytest.mark.parametrize("size, more", [(2, {}), (4, {}), (4, STAGES)])
def test_torchrun_starts_a_plain_script(want, size, more, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(sizes=f"tensor_parallel_size={size // (1 + len(more))}, **{more}"))
    how = {"capture_output": True, "text": True, "timeout": 120, "env": os.environ | {"PYTHONPATH": os.getcwd()}}
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), str(script)]
    done = subprocess.run(run, **how)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str(want)
    run[run.index(str(size))] = "3"
    done = subprocess.run(run, **how)
    assert "torchrun has started 3 processes, and tensor_parallel_size times pipeline_parallel_size" in done.stderr


@slow
@pytest.mark.parametrize("launcher", ["none", "torchrun"])
@pytest.mark.parametrize("how", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_a_server_of_two_ranks_comes_back_whole_and_ends_when_any_rank_is_asked_to(launcher, how):
    httpx = pytest.importorskip("httpx")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    start = torchrun if launcher == "torchrun" else [sys.executable, "-m"]
    command = [*start, "hibachi", "serve", "tiny", "--backend", "torch", how, "2", "--restart"]
    server = subprocess.Popen([*command, "--port", str(port)], start_new_session=True)

    def answers():
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            time.sleep(0.2)
        asked = {"prompt": "It is", "max_tokens": 4, "temperature": 0}
        found = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=30)
        return found.status_code, found.json().get("usage", {}).get("completion_tokens")

    def follower():
        found = below(server.pid)
        return next(pid for pid in found if b"\0RANK=1" in Path(f"/proc/{pid}/environ").read_bytes()), found

    try:
        assert answers() == (200, 4)
        if launcher == "none":  # torchrun has --max-restarts
            first, _ = follower()
            os.kill(first, signal.SIGKILL)
            time.sleep(1.0)
            assert answers() == (200, 4) and follower()[0] != first
        second, all_of_it = follower()
        asked = {"prompt": "It is", "max_tokens": 250, "temperature": 0, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            if launcher == "none":  # as a launcher asks all ranks at once; rank 0 hears of it a second time
                os.kill(server.pid, signal.SIGTERM)
            os.kill(second, signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        server.wait(40)
        assert gone(all_of_it)
    finally:
        for pid in below(server.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.wait()


def below(pid):
    """A process and all that it has started."""
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
    return [pid, *(each for child in children for each in below(int(child)))]
