"""deploy/helm/hibachi-serve: Helm renders it, Kubernetes' schemas judge what comes out, our own commands and torchrun
read the arguments in it, and a pod's command runs as the pod would.

LeaderWorkerSets, ServiceMonitors and RayServices are judged by their own schemas (tests/data/crds), and their pods by
Kubernetes'.
"""

import copy
import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from hibachi.cli.main import parser
from hibachi.common.cachefolder import cache_folder
from hibachi.router.settings import SETTINGS as ROUTE
from hibachi.router.settings import settle as route
from hibachi.server.settings import SETTINGS as SERVE
from hibachi.server.settings import settle as serve

from .test_deploy import VERSION, rendered

pytestmark = [pytest.mark.install, pytest.mark.xdist_group("deploy")]

ONE, TWO = {"name": "llama", "model": "org/llama"}, {"name": "falcon", "model": "/models/falcon"}
GROUP = ONE | {"tensorParallelSize": 4, "pipelineParallelSize": 2, "pods": 2, "surge": 0}
RAY = TWO | {"ray": True, "image": "registry/ray:1", "replicas": 3, "resources": {"limits": {"nvidia.com/gpu": 1}}}
SETTINGS = {"max-num-seqs": 1000000, "gguf-unpack": False, "restart": True, "kv-disk-bytes": "5G"}
OPTIONS = {"num_replicas", "max_replicas_per_node", "ray_actor_options"}  # of Serve's deployments
CASES = {
    "defaults": {},
    "two": {
        "models": [
            ONE | {"replicas": 2, "settings": SETTINGS},
            TWO | {"tensorParallelSize": 2, "cache": {"claim": "files"}, "settings": {"served-model-name": ["a", "b"]}},
        ],
        "defaults": {"settings": {"log-format": "json"}, "env": [{"name": "HF_TOKEN", "valueFrom": {}}]},
        "apiKey": {"secret": "keys", "key": "one"},
        "preStopSeconds": 15,
        "drainSeconds": 120,
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "a group": {"models": [GROUP, TWO], "podSecurityContext": {"runAsUser": None}},
    "Ray": {"models": [ONE, RAY], "podDisruptionBudget": {"enabled": False}, "preStopSeconds": 0},
}
REFUSED = {
    "no models": ({"models": []}, "minItems: got 0, want 1"),
    "a misspelt value": ({"model": [ONE]}, "'model'"),
    "a model without a name": ({"models": [{"model": "m"}]}, "missing property 'name'"),
    "a model that is none": ({"models": [{"name": "m"}]}, "missing property 'model'"),
    "a name that is no host": ({"models": [ONE | {"name": "My_Llama"}]}, "'/models/0/name'"),
    "the router's name": ({"models": [ONE | {"name": "router"}]}, "or the router, is called so"),
    "two of one name": ({"models": [ONE, ONE]}, "llama: another"),
    "a long name": ({"models": [ONE | {"name": "l" * 30}, TWO | {"name": "f" * 38}]}, "'/models/1/name'"),
    "replicas in words": ({"models": [ONE | {"replicas": "two"}]}, "'/models/0/replicas'"),
    "a flag that is none": ({"models": [ONE | {"settings": {"max-num-sequences": 8}}]}, "'max-num-sequences'"),
    "a switch in words": ({"models": [ONE | {"settings": {"restart": "yes"}}]}, "got string, want boolean"),
    "a key in the settings": ({"defaults": {"settings": {"api-key": ["sk-1"]}}}, "'api-key'"),
    "the grace in the settings": ({"router": {"settings": {"drain-timeout": 60}}}, "'drain-timeout'"),
    "a key in the environment": ({"defaults": {"env": [{"name": "HF_TOKEN", "value": "hf"}]}}, "could read it"),
    "pods that do not divide": ({"models": [GROUP | {"pods": 3}]}, "expected a divisor of tensorParallelSize"),
    "a group that is killed": ({"models": [GROUP], "drainSeconds": 60}, "torchrun kills"),
    "grace that is too short": ({"terminationGracePeriodSeconds": 30}, "which is 35, as running requests"),
    "root": ({"podSecurityContext": {"runAsNonRoot": False}}, "'/podSecurityContext/runAsNonRoot'"),
    "a port that is none": ({"router": {"service": {"port": 80000}}}, "'/router/service/port'"),
    "a size that is none": ({"defaults": {"cache": {"sizeLimit": "20 GB"}}}, "'/defaults/cache/sizeLimit'"),
    "Ray without an image": ({"models": [ONE | {"ray": True}]}, "expected an image that has hibachi[ray]"),
    "Ray with a key": ({"models": [RAY], "apiKey": {"secret": "keys"}}, "apiKey would not count"),
}


@pytest.fixture(scope="module")
def said(with_helm):
    return rendered(with_helm, "hibachi-serve", {name: values for name, (values, _) in REFUSED.items()} | CASES)


@pytest.fixture
def documents(said):
    """documents(case): {(kind, name without that of the release): document}"""

    def of(case):
        found = said["cases"][case]["documents"]
        named = {(d["kind"], d["metadata"]["name"].removeprefix("tib").lstrip("-")): d for d in copy.deepcopy(found)}
        assert len(named) == len(found)
        return named

    return of


def pods(found):
    """{name: template} of all that stand, but Ray's."""
    for (kind, name), document in found.items():
        if kind == "Deployment":
            yield name, document["spec"]["template"]
        elif kind == "LeaderWorkerSet":
            group = document["spec"]["leaderWorkerTemplate"]
            yield from ((f"{name}/{role}", group[f"{role}Template"]) for role in ("leader", "worker"))


def only(template):
    (container,) = template["spec"]["containers"]
    return container


def settled(container):
    """What our command makes of the arguments."""
    words = [*container["command"], *container["args"]]
    words = words[words.index("hibachi") + 1 :]
    args, rest = parser(words[0]).parse_known_args(words)
    assert not rest
    known, settle = (SERVE, serve) if words[0] == "serve" else (ROUTE, route)
    return settle({key: value for key in known if (value := getattr(args, key)) is not None}, {})


def test_helm_finds_nothing_wrong_and_kubernetes_takes_it(said):
    assert not said["lint"]["errors"] and not said["errors"].keys() & CASES.keys(), said["errors"]
    assert {m["error"] for m in said["lint"]["messages"] if m["severity"] > 1} == set()
    assert said["chart"]["version"] == said["chart"]["appVersion"] == VERSION
    assert [case["wrong"] for case in said["cases"].values()] == [[]] * len(CASES)
    assert len(said["damaged"]) > 10 and all("replica" in str(wrong) for wrong in said["damaged"])


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_values_are_refused(case, said):
    print("\n" + said["errors"][case])
    assert REFUSED[case][1] in said["errors"][case]


@pytest.mark.parametrize("case", CASES)
def test_the_router_finds_each_model_and_each_pod_ends_in_good_order(case, documents):
    found = documents(case)
    for name, template in pods(found):
        one, pod, settings = only(template), template["spec"], settled(only(template))
        assert (settings.host, settings.port) == ("0.0.0.0", 8000)
        sleep = int(one["lifecycle"]["preStop"]["exec"]["command"][1]) if "lifecycle" in one else 0
        assert pod["terminationGracePeriodSeconds"] >= sleep + settings.drain_timeout + 5
        assert one["securityContext"]["readOnlyRootFilesystem"] and pod["securityContext"]["runAsNonRoot"]
        if name.endswith("/worker"):
            assert "readinessProbe" not in one and sleep > settings.drain_timeout  # the leader ends first
        else:
            paths = {probe: one[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")}
            assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
        mounts = {m["mountPath"]: m["name"] for m in one["volumeMounts"]}
        assert set(mounts.values()) <= {v["name"] for v in pod["volumes"]} and "/tmp" in mounts
        if name:
            places = {v["name"]: v.get("value") for v in one["env"]}
            assert places["XDG_CACHE_HOME"] == places["HOME"] == "/cache" in mounts
    names = [f"http://tib-{m['name']}" + ("-serve-svc" if "ray" in m else "") for m in CASES[case].get("models", ())]
    upstreams = settled(only(found["Deployment", ""]["spec"]["template"])).upstream
    assert list(upstreams) == [f"{name}:8000" for name in names or ["http://tib-tiny"]]
    for (kind, name), service in found.items():
        if kind == "Service":
            selector = service["spec"]["selector"]
            rank = selector.pop("leaderworkerset.sigs.k8s.io/worker-index", None)
            chosen = [at for at, pod in pods(found) if selector.items() <= pod["metadata"]["labels"].items()]
            assert chosen == ([name] if rank is None else [f"{name}-group/leader", f"{name}-group/worker"])
            assert f"http://tib-{name}:8000" in upstreams or not name


def test_two_models_behind_one_router(documents):
    found = documents("two")
    llama, falcon = (only(found["Deployment", name]["spec"]["template"]) for name in ("llama", "falcon"))
    one, two = settled(llama), settled(falcon)
    assert (one.model, one.served_model_name, one.max_num_seqs) == ("org/llama", ("llama",), 1000000)
    assert one.restart and not one.gguf_unpack and one.kv_disk.startswith("/cache/") and one.log_format == "json"
    assert (two.served_model_name, two.tensor_parallel_size, two.kv_disk) == (("a", "b"), 2, None)
    assert found["Deployment", "llama"]["spec"]["replicas"] == 2 and one.drain_timeout == 120
    keys = {name: [v for v in only(pod)["env"] if "KEY" in v["name"]] for name, pod in pods(found)}
    reference = {"secretKeyRef": {"name": "keys", "key": "one"}}  # not optional: no Secret, no pod
    assert keys[""] == [{"name": "HIBACHI_UPSTREAM_KEY", "valueFrom": reference}]
    assert keys["llama"] == keys["falcon"] == [{"name": "HIBACHI_API_KEY", "valueFrom": reference}]
    monitor = found["ServiceMonitor", ""]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"].keys() == {"selector", "targetLabels", "endpoints"}
    services = [d["metadata"]["labels"] for (kind, _), d in found.items() if kind == "Service"]
    assert all(monitor["spec"]["selector"]["matchLabels"].items() <= labels.items() for labels in services)
    budgets = [d["spec"]["selector"]["matchLabels"] for (kind, _), d in found.items() if kind == "PodDisruptionBudget"]
    assert [b["app.kubernetes.io/component"] for b in budgets] == ["router", "llama", "falcon"]


def test_a_group_of_pods_is_what_torchrun_starts(documents):
    run = pytest.importorskip("torch.distributed.run")
    spec = documents("a group")["LeaderWorkerSet", "llama-group"]["spec"]
    assert spec.keys() == {"replicas", "rolloutStrategy", "leaderWorkerTemplate"}
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxUnavailable": 1, "maxSurge": 0}
    group = spec["leaderWorkerTemplate"]
    assert group.keys() == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert (group["size"], group["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    leader, worker = only(group["leaderTemplate"]), only(group["workerTemplate"])
    assert leader["command"] == worker["command"] and leader["args"] == worker["args"]
    assert {"/dev/shm", "/cache"} <= {m["mountPath"] for m in leader["volumeMounts"]}
    program, *words = (word.replace("$(LWS_WORKER_INDEX)", "1") for word in leader["command"] + leader["args"])
    args = run.get_args_parser().parse_args(words)
    assert (program, args.nnodes, args.nproc_per_node, args.node_rank) == ("torchrun", "2", "4", 1)
    assert (args.master_addr, args.module, args.training_script) == ("$(LWS_LEADER_ADDRESS)", True, "hibachi")
    assert (settled(leader).tensor_parallel_size, settled(leader).pipeline_parallel_size) == (4, 2)


def test_ray_serves_our_application(documents):
    found = documents("Ray")
    spec = found["RayService", "falcon"]["spec"]
    assert ("Deployment", "falcon") not in found and ("Service", "falcon") not in found
    assert spec.keys() == {"serveConfigV2", "rayClusterConfig"}
    (application,) = json.loads(spec["serveConfigV2"])["applications"]
    assert (application["import_path"], application["route_prefix"]) == ("hibachi.ray:app", "/")
    asked = application["args"]
    assert asked["num_replicas"] == 3 and asked["ray_actor_options"] == {"num_gpus": 1}
    settings = serve({name: value for name, value in asked.items() if name not in OPTIONS}, {})
    assert (settings.model, settings.served_model_name) == ("/models/falcon", ("falcon",))
    cluster = spec["rayClusterConfig"]
    assert cluster.keys() == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 3
    head, worker = only(cluster["headGroupSpec"]["template"]), only(workers["template"])
    assert "nvidia.com/gpu" in worker["resources"]["limits"] and "nvidia.com/gpu" not in head["resources"]["limits"]
    assert "command" not in worker and worker["image"] == "registry/ray:1"  # KubeRay says what runs


@pytest.mark.skipif(sys.platform != "linux", reason="images are for Linux")
def test_the_command_of_a_pod_serves_and_drains(documents, tmp_path):
    template = documents("defaults")["Deployment", "tiny"]["spec"]["template"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    one, cache = only(template), tmp_path / "cache"
    env = {v["name"]: v["value"].replace("/cache", str(cache)) for v in one["env"]} | {"PATH": os.environ["PATH"]}
    (cache / "hibachi").mkdir(parents=True)
    (cache / "hibachi" / "kernels").symlink_to(cache_folder() / "kernels")  # which take minutes to compile
    words = [sys.executable, "-m", *one["command"], *one["args"]]
    words[words.index("--port=8000")] = f"--port={port}"
    place = tmp_path / "root"  # nothing is written where it stands
    place.mkdir()
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(words, env=env | {"PYTHONPATH": os.getcwd()}, cwd=place, stderr=log)

    try:
        until = time.monotonic() + one["startupProbe"]["periodSeconds"] * one["startupProbe"]["failureThreshold"]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            while True:
                try:
                    assert client.get(one["readinessProbe"]["httpGet"]["path"]).status_code == 200
                    break
                except httpx.TransportError:
                    assert server.poll() is None and time.monotonic() < until
                    time.sleep(0.1)
            asked = {"model": "tiny", "prompt": "It", "max_tokens": 90, "n": 8, "stream": True}
            with client.stream("POST", "/v1/completions", json=asked) as answer:
                server.send_signal(signal.SIGTERM)
                assert answer.read().endswith(b"data: [DONE]\n\n")
        assert server.wait(template["spec"]["terminationGracePeriodSeconds"]) == 0
    finally:
        server.kill()
        server.wait()
    assert not list(place.iterdir())
