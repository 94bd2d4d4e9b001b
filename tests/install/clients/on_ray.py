"""On a Ray of its own. data N: N rows by two actors, one of which is killed, and by one engine, as JSON. serve PORT:
two replicas, until standard input ends. broken: what is said of a model that is not there.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import ray
from ray import serve

import hibachi.ray
from hibachi.offline import Columns

SETTINGS = {"model": "tiny", "backend": "numpy", "max_num_seqs": 32}
ACTORS = ray.data.ActorPoolStrategy(size=2)


def kill_one():
    """An actor that computes, once both do."""
    while len(pids := workers()) < 2:
        time.sleep(0.2)
    time.sleep(3)
    os.kill(pids[0], signal.SIGKILL)
    print("killed", pids[0], "of", pids, file=sys.stderr)


def workers():
    told = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout.splitlines()
    ours = [int(line.split()[0]) for line in told if "ray::MapWorker(MapBatches(Generate)).submit" in line]
    return [pid for pid in ours if str(os.getpid()) in ancestors(pid)]


def ancestors(pid):
    found = []
    while pid not in ("0", "1", ""):
        pid = subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        found.append(pid)
    return found


def data(n):
    columns = {"id": np.arange(n), "limit": 4 + np.arange(n) * 7 % 60, "t": np.arange(n) % 2.0}
    columns["prompt"] = np.array([f"Chapter {i}." if i % 50 else None for i in range(n)], object)
    how = Columns(params={"ignore_eos": True}, param_columns={"max_tokens": "limit", "temperature": "t"})
    more = {"columns": how, "settings": SETTINGS}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    given = ray.data.from_items(rows, override_num_blocks=16)
    killing = threading.Thread(target=kill_one)
    killing.start()
    done = given.map_batches(
        hibachi.ray.Generate, fn_constructor_kwargs=more, batch_size=32, num_cpus=1, compute=ACTORS
    )
    by_two = sorted(done.take_all(), key=lambda row: row["id"])
    killing.join()
    generate = hibachi.ray.Generate(**more)
    alone = asyncio.run(generate(columns))
    generate.close()
    shown = ("output", "finish_reason", "prompt_tokens", "completion_tokens", "error")
    print(
        json.dumps([[[row[name] for name in shown] for row in by_two], [*zip(*[alone[s] for s in shown], strict=True)]])
    )


def serving(port):
    serve.start(http_options={"port": port})
    more = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}, "health_check_period_s": 1}
    serve.run(hibachi.ray.app(SETTINGS | more))
    print("ready", flush=True)
    sys.stdin.read()
    serve.shutdown()


def broken():
    for make in (
        lambda: serve.run(hibachi.ray.app({"model": "/no/such", "ray_actor_options": {"num_cpus": 0.1}})),
        lambda: ray.data.range(4).map_batches(hibachi.ray.Generate, fn_constructor_args=["/no/such"]).take_all(),
    ):
        try:
            make()
        except Exception as e:
            said = f"{e} {e.__cause__}"
        else:
            said = "nothing"
        states = [d for a in serve.status().applications.values() for d in a.deployments.values()]
        print(json.dumps(said + " ".join(state.message for state in states)))


ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
{"data": lambda: data(int(sys.argv[2])), "serve": lambda: serving(int(sys.argv[2])), "broken": broken}[sys.argv[1]]()
ray.shutdown()
