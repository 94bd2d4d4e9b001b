"""deploy/: the chart, the manifests and the Dockerfile.

Helm renders the chart, as a library; Kubernetes' schemas judge what comes out; the router reads the configuration in
it. There may be no Docker where this runs, so a linter reads the Dockerfile, and its commands run as they are, in
folders of their own.
"""

import base64
import contextlib
import copy
import fnmatch
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import zipfile

import pytest

from hibachi.router.addresses import places_of
from hibachi.router.settings import settle

from ..router.mocks import Mock
from .venvs import ROOT, run

pytestmark = [pytest.mark.install, pytest.mark.xdist_group("deploy")]

DEPLOY, CRDS = ROOT / "deploy", ROOT / "tests/data/crds"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
TARGETS = {"route": "[route]", "serve": "[serve,hf,text]"}  # of the Dockerfile; the extras of each

TIB = {"replicas": 1, "service": {"port": 8000}}
KEYS = ("sk-of-an-upstream", "sk-of-all", "sk-of-a-client", "sk-of-a-tenant")
TABLES = {
    "upstreams": [
        {"url": "http://llama:8000", "limit": 32, "weight": 0.5},
        {"url": "http://models.example.com", "key": KEYS[0], "models": ['a "quoted" <name>', "größer"]},
    ],
    "settings": {
        "policy": "prefix-affine",
        "max-num-queued-reqs": 1000000,
        "origin_header": False,
        "upstream-key": KEYS[1],
        "api-key": [KEYS[2]],
        "api-keys": "/etc/hibachi/tenants.toml",
    },
    "files": {"tenants.toml": f'[somebody]\nkey = "{KEYS[3]}"\n'},
}
EVERYTHING = TABLES | {
    "replicas": 3,
    "deployment": {
        "image": "registry.example.com/route:1",
        "imagePullPolicy": "Always",
        "imagePullSecrets": [{"name": "registry"}],
        "env": {"UPSTREAMS": "http://falcon:8000", "TIMEOUT": 1000000, "DEBUG": True},
        "envFrom": [{"secretRef": {"name": "upstream-keys"}}],
        "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
        "podLabels": {"team": "models"},
        "podAnnotations": {"note": "one"},
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "priorityClassName": "high",
    },
    "drainSeconds": 120,
    "preStopSeconds": 15,
    "service": {"type": "LoadBalancer", "port": 80, "annotations": {"note": "one"}},
    "serviceAccount": {"name": "router", "annotations": {"note": "one"}},
    "prometheus": {"annotations": True},
    "podDisruptionBudget": {"enabled": True, "maxUnavailable": "34%"},
    "networkPolicy": {
        "enabled": True,
        "from": [{"namespaceSelector": {}}],
        "egress": [{"to": [{"podSelector": {}}], "ports": [{"port": 8000}]}],
    },
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "annotations": {"note": "one"},
        "hosts": [{"host": "models.example.com"}],
        "tls": [{"secretName": "tls", "hosts": ["models.example.com"]}],
    },
}
CASES = {
    "defaults": {},
    "tib": TIB | {"deployment": {"env": {"UPSTREAMS": "http://a:1, http://b:2", "MAX_CONNECT_PER_UPSTREAM": 1}}},
    "tib, more": TIB | {"deployment": {"env": {"UPSTREAMS": ["http://a:1", "http://b:2"], "WAIT_FOR": 30000,
                                               "MAX_CONNECT_PER_UPSTREAM": "666"}}},
    "tables": TABLES,
    "another key": TABLES | {"files": {"tenants.toml": '[somebody]\nkey = "sk-another"\n'}},
    "more replicas": TABLES | {"replicas": 2},
    "a Secret of one's own": {"existingSecret": "mine"},
    "an open policy": {"networkPolicy": {"enabled": True}, "serviceAccount": {"create": False}, "preStopSeconds": 0},
    "OpenShift": {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}},
    "everything": EVERYTHING,
}  # fmt: skip
REFUSED = {
    "a misspelt value": ({"replica": 1}, "'replica'"),
    "replicas in words": ({"replicas": "two"}, "/replicas"),
    "a port that is none": ({"service": {"port": 80000}}, "/service/port"),
    "an upstream without a URL": ({"upstreams": [{"limit": 1}]}, "'url'"),
    "a URL with a path": ({"upstreams": [{"url": "http://a:1/v1"}]}, "/upstreams/0/url"),
    "a URL with a user": ({"upstreams": [{"url": "http://me:secret@a"}]}, "/upstreams/0/url"),
    "a limit of 0": ({"upstreams": [{"url": "http://a", "limit": 0}]}, "/upstreams/0/limit"),
    "a field that is none": ({"upstreams": [{"url": "http://a", "limits": 1}]}, "'limits'"),
    "no connections": ({"deployment": {"env": {"MAX_CONNECT_PER_UPSTREAM": 0}}}, "/deployment/env"),
    "the port in the settings": ({"settings": {"port": 8001}}, "'port'"),
    "upstreams in the settings": ({"settings": {"upstream": ["http://a"]}}, "'upstream'"),
    "the port in the environment": ({"deployment": {"env": {"HIBACHI_PORT": 8001}}}, "the chart sets this itself"),
    "a key in the environment": ({"deployment": {"env": {"HIBACHI_API_KEY": "sk-1"}}}, "could read it"),
    "two configurations": ({"existingSecret": "mine", "upstreams": [{"url": "http://a"}]}, "in place of"),
    "a file in the configuration's place": ({"files": {"router.toml": ""}}, "'router.toml'"),
    "an ingress for nobody": ({"ingress": {"enabled": True}}, "/ingress/hosts"),
}

RENDER = """
import json, sys
import helm_python, jsonschema, kubernetes_validate
sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
import render
folder = render.HELM / sys.argv[2]
said = {"lint": helm_python.lint(str(folder), strict=True), "versions": [], "cases": {}, "errors": {}}
known = kubernetes_validate.utils.all_versions()
said["versions"] = [known[0], known[-1]]
with helm_python.Chart.load(str(folder)) as chart:
    said["chart"], said["values"] = chart.metadata, chart.values
def validate(document, version):
    if document["apiVersion"].partition(".")[2] not in ("", "k8s.io/v1"):  # not Kubernetes' own; its pods are
        with open(f"{sys.argv[3]}/{document['kind']}.json") as file:
            found = jsonschema.Draft7Validator(json.load(file)).iter_errors(document)
        if found := [f"{document['kind']}: {list(e.path)}: {e.message}" for e in found]:
            return found
        pods = [{"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
                for template in templates(document["spec"])]
        return [wrong for pod in pods for wrong in validate(pod, version)]
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as e:
        return [f"{version}: {document['kind']}: {list(e.path)}: {e.message}"]
    return []
def templates(value):
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        else:
            for each in value.values():
                yield from templates(each)
    elif isinstance(value, list):
        for each in value:
            yield from templates(each)
for name, values in json.load(sys.stdin).items():
    try:
        documents = render.rendered(values, "tib", "llm", sys.argv[2])
    except helm_python.HelmError as e:
        said["errors"][name] = str(e)
        continue
    wrong = [w for d in documents for v in said["versions"] for w in validate(d, v)]
    said["cases"][name] = {"documents": documents, "wrong": wrong}
last = {d["kind"]: d for case in said["cases"].values() for d in case["documents"] if "spec" in d}
said["damaged"] = [validate({**d, "spec": {**d["spec"], "replica": 1}}, v) for d in last.values()
                   for v in said["versions"]]
said["manifests"] = render.manifests()
print(json.dumps(said))
"""
PARSE = """
import json, sys
from dockerfile_parse import DockerfileParser
with open(sys.argv[1], "rb") as file:
    print(json.dumps(DockerfileParser(fileobj=file).structure))
"""


@pytest.fixture(scope="module")
def said(with_helm):
    """What Helm and Kubernetes' schemas say of all cases."""
    cases = CASES | {name: values for name, (values, _) in REFUSED.items()}
    return rendered(with_helm, "hibachi-router", cases)


def rendered(with_helm, chart, cases):
    command = [with_helm / "python", "-c", RENDER, DEPLOY, chart, CRDS]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout)


@pytest.fixture
def documents(said):
    """documents(case): {kind: document}, each kind at most once."""

    def of(case):
        found = {d["kind"]: d for d in copy.deepcopy(said["cases"][case]["documents"])}
        assert len(found) == len(said["cases"][case]["documents"])
        return found

    return of


def container(found):
    (one,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    return one


def variables(found):
    """Of the container, those that are in plain text."""
    names = [v["name"] for v in container(found)["env"]]
    assert len(set(names)) == len(names)
    return {v["name"]: v["value"] for v in container(found)["env"]}


def decoded(secret):
    return {name: base64.b64decode(data).decode() for name, data in secret["data"].items()}


# ---- the chart -------------------------------------------------------------------------------------------------------


def test_helm_finds_nothing_wrong_with_the_chart(said):
    assert not said["lint"]["errors"] and not said["errors"].keys() & CASES.keys(), said["errors"]
    assert {m["error"] for m in said["lint"]["messages"] if m["severity"] > 1} == set()
    assert said["chart"]["version"] == said["chart"]["appVersion"] == VERSION
    print("\nschemas of Kubernetes", *said["versions"])


@pytest.mark.parametrize("case", CASES)
def test_what_it_renders_is_what_kubernetes_takes(case, said):
    assert said["cases"][case]["wrong"] == []


def test_and_a_field_that_kubernetes_does_not_know_would_be_found(said):
    assert said["damaged"] and all("replica" in str(wrong) for wrong in said["damaged"])


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_values_are_refused(case, said):
    assert REFUSED[case][1] in said["errors"][case]


@pytest.mark.parametrize("case", CASES)
def test_pods_may_do_little_and_end_in_good_order(case, documents):
    found = documents(case)
    pod, one = found["Deployment"]["spec"]["template"]["spec"], container(found)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["securityContext"].get("runAsUser") == (None if case == "OpenShift" else 10001)
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False
    assert one["resources"]["limits"]["memory"] and one["resources"]["requests"]
    volumes = {v["name"]: v for v in pod["volumes"]}
    mounts = {m["mountPath"]: m for m in one["volumeMounts"]}
    assert "emptyDir" in volumes[mounts["/tmp"]["name"]] and not mounts["/tmp"].get("readOnly")
    assert all(m["name"] in volumes for m in mounts.values())
    # It ends its requests before it is killed, and nothing else sets how long that may take.
    sleep = int(one["lifecycle"]["preStop"]["exec"]["command"][1]) if "lifecycle" in one else 0
    drain = settle({}, variables(found)).drain_timeout
    assert drain == (120 if case == "everything" else 25)
    assert pod["terminationGracePeriodSeconds"] >= sleep + drain + 5


@pytest.mark.parametrize("case", CASES)
def test_ports_paths_and_labels_fit_together(case, documents):
    found = documents(case)
    spec, one = found["Deployment"]["spec"], container(found)
    (port,) = one["ports"]
    settings = settle({}, variables(found) | {"TIB_PORT": "1"})
    assert (settings.host, settings.port) == ("0.0.0.0", port["containerPort"]) and port["containerPort"] == 8000
    paths = {probe: one[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    assert all(one[f"{probe}Probe"]["httpGet"]["port"] == port["name"] for probe in paths)
    (outside,) = found["Service"]["spec"]["ports"]
    assert outside["targetPort"] == port["name"]
    labels = spec["template"]["metadata"]["labels"].items()
    selectors = [spec["selector"]["matchLabels"], found["Service"]["spec"]["selector"]]
    if "PodDisruptionBudget" in found:
        selectors.append(found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"])
    if "NetworkPolicy" in found:
        selectors.append(found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"])
    for selector in selectors:
        assert selector == selectors[0] and selector and selector.items() <= labels
    assert not any(name.endswith(("version", "chart")) for name in selectors[0])  # it must stay as it is
    account = spec["template"]["spec"]["serviceAccountName"]
    if "ServiceAccount" in found:
        assert found["ServiceAccount"]["metadata"]["name"] == account
        assert found["ServiceAccount"]["automountServiceAccountToken"] is False
    else:
        assert account == "default"


@pytest.mark.parametrize("case", ["tables", "everything"])
def test_keys_are_in_the_secret_and_nowhere_else(case, documents):
    found = documents(case)
    secret = found.pop("Secret")
    assert "ConfigMap" not in found and all(key in str(decoded(secret)) for key in KEYS)
    for key in KEYS:
        for text in (key, base64.b64encode(key.encode()).decode()):
            assert text not in json.dumps(found)
    (volume,) = (v for v in found["Deployment"]["spec"]["template"]["spec"]["volumes"] if "secret" in v)
    assert volume["secret"] == {"secretName": secret["metadata"]["name"], "defaultMode": 0o440}


def test_the_router_reads_what_the_values_say(documents, tmp_path):
    found = documents("tables")
    for name, content in decoded(found["Secret"]).items():
        (tmp_path / name).write_text(content)
    flag, file = container(found)["args"]
    (mount,) = (m for m in container(found)["volumeMounts"] if m["name"] == "configuration")
    assert flag == "--config" and file == f"{mount['mountPath']}/router.toml"
    assert TABLES["settings"]["api-keys"] == f"{mount['mountPath']}/tenants.toml"
    settings = settle({}, variables(found), str(tmp_path / "router.toml"))
    for name, value in TABLES["settings"].items():
        read = getattr(settings, name.replace("-", "_"))
        assert read == (tuple(value) if isinstance(value, list) else value), name
    first, second = places_of(settings, variables(found))
    assert (first.url, first.limit, first.weight, first.key) == ("http://llama:8000", 32, 0.5, KEYS[1])
    assert (second.limit, second.key, second.models) == (64, KEYS[0], tuple(TABLES["upstreams"][1]["models"]))


@pytest.mark.parametrize("case, limit, wait", [("tib", 1, 5), ("tib, more", 666, 30)])
def test_the_values_of_text_inference_batcher_reach_the_router(case, limit, wait, documents):
    found = documents(case)
    assert "Secret" not in found and "args" not in container(found)
    assert found["Service"]["metadata"]["name"] == "tib" and found["Service"]["spec"]["ports"][0]["port"] == 8000
    settings = settle({}, variables(found))
    places = places_of(settings, variables(found))
    assert [p.url for p in places] == ["http://a:1", "http://b:2"] and {p.limit for p in places} == {limit}
    assert (settings.tib, settings.wait_for) == (True, wait)


def test_without_values_nothing_is_named_and_with_all_of_them_both_ways_work(documents, tmp_path):
    assert variables(documents("defaults")).keys() == {"HIBACHI_HOST", "HIBACHI_PORT", "HIBACHI_DRAIN_TIMEOUT"}
    assert documents("defaults").keys() == {"Deployment", "Service", "ServiceAccount"}
    found = documents("everything")
    (tmp_path / "router.toml").write_text(decoded(found["Secret"])["router.toml"])
    settings = settle({}, variables(found), str(tmp_path / "router.toml"))
    assert len(places_of(settings, variables(found))) == 3
    assert (settings.timeout, settings.log_level) == (1000.0, "debug")
    assert found.keys() == {"Deployment", "Service", "ServiceAccount", "Secret", "PodDisruptionBudget",
                            "NetworkPolicy", "Ingress"}  # fmt: skip
    assert found["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert {p["port"] for p in found["NetworkPolicy"]["spec"]["egress"][0]["ports"]} == {53}
    notes = found["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/path"] == "/metrics" and notes["prometheus.io/port"] == "8000"
    policy = documents("an open policy")["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"] and "from" not in policy["ingress"][0]


def test_a_changed_configuration_begins_new_pods_and_nothing_else_does(documents):
    def pods(case):
        return documents(case)["Deployment"]["spec"]["template"]

    assert pods("tables") == pods("more replicas")
    assert pods("tables") != pods("another key")
    assert "annotations" not in pods("tib")["metadata"]
    (volume,) = (v for v in pods("a Secret of one's own")["spec"]["volumes"] if "secret" in v)
    assert volume["secret"]["secretName"] == "mine" and "Secret" not in documents("a Secret of one's own")


def test_the_manifests_are_what_the_chart_renders(said):
    """Else: python deploy/render.py."""
    assert (DEPLOY / "kubernetes" / "router.yaml").read_text() == said["manifests"]


def test_the_readme_names_values_that_are_there(said):
    table = [line.split("|")[2] for line in (DEPLOY / "README.md").read_text().splitlines() if line.startswith("| `")]
    names = [name for cell in table for name in re.findall(r"`([a-zA-Z._]+)`", cell)]
    assert len(names) >= 5
    for name in names:
        value = said["values"]
        for part in name.split("."):
            value = value[part]


# ---- the Dockerfile --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stages(with_helm):
    """{name: (name of the stage it begins from, or image, [(instruction, value)])}"""
    found = {}
    for step in json.loads(run(with_helm / "python", "-c", PARSE, DEPLOY / "Dockerfile", cwd=ROOT)):
        if step["instruction"] == "FROM":
            origin, _, name = step["value"].split()
            found[name] = (origin, [])
        elif step["instruction"] != "COMMENT":
            found[name][1].append((step["instruction"], step["value"]))
    return found


def lineage(stages, name):
    """All instructions of a stage, with those of the stages before it."""
    origin, steps = stages[name]
    return lineage(stages, origin) + steps if origin in stages else steps


def environment_of(steps):
    return dict(
        word.split("=", 1) for instruction, value in steps if instruction == "ENV" for word in shlex.split(value)
    )


def test_a_linter_finds_nothing_wrong_with_the_dockerfile(with_helm, tmp_path):
    done = subprocess.run([with_helm / "hadolint", DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /src && pip install build\n")
    bad = subprocess.run([with_helm / "hadolint", tmp_path / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert bad.returncode == 1 and "DL3006" in bad.stdout  # it would have said something


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_holds_what_runs_and_no_more(target, stages):
    assert {origin for origin, _ in stages.values() if origin not in stages} == {"python:3.13-slim"}
    steps = lineage(stages, target)
    (user,) = (value for name, value in steps if name == "USER")
    assert user == "10001:10001"  # the number, as Kubernetes looks for it
    assert ("EXPOSE", "8000") in steps and ("ENTRYPOINT", f'["hibachi", "{target}"]') in steps
    (check,) = (value for name, value in steps if name == "HEALTHCHECK")
    assert "curl" not in check and "healthcheck.py" in check
    copied = [value for name, value in steps if name == "COPY"]
    assert copied == [
        "--chmod=0644 deploy/healthcheck.py /opt/healthcheck.py",
        f"--from=packages-of-{target} /opt/hibachi /opt/hibachi",
    ]
    commands = " ".join(value for name, value in steps if name == "RUN")
    assert "pip" not in commands and "apt" not in commands
    assert environment_of(steps)["HIBACHI_HOST"] == "0.0.0.0"
    assert f"{TARGETS[target]}" in str(stages[f"packages-of-{target}"])


def context(to):
    """What Docker sends to the build, by the rules of the .dockerignore that are used there."""
    rules = [r for r in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if r and not r.startswith("#")]
    assert rules[0] == "*"
    skip = [rule.removeprefix("**/") for rule in rules if rule.startswith("**/")]
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    assert len(skip) + len(kept) + 1 == len(rules)
    for name in kept:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns(*skip))
        else:
            shutil.copy(ROOT / name, to / name)
    assert not any(fnmatch.fnmatch(p.name, rule) for p in to.rglob("*") for rule in skip)


class Built:
    """What the stages make, in a folder in place of /."""

    def __init__(self, home, stages):
        self.home, self.stages = home, stages
        run(sys.executable, "-m", "venv", home / "python", cwd=home)
        (home / "src").mkdir()
        context(home / "src")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("HIBACHI_", "PYTHON", "VIRTUAL_ENV"))}
        self.env |= {"PATH": f"{home / 'python' / 'bin'}:{os.environ['PATH']}"}
        self.run_all("wheels")

    def moved(self, text):
        return re.sub(r"(?<![\w.}])/(src|wheels|opt)\b", rf"{self.home}/\1", text)

    def run_all(self, stage, **more):
        for command in (value for name, value in self.stages[stage][1] if name == "RUN"):
            self.sh(command, **more)

    def sh(self, command, **more):
        command = ["/bin/sh", "-c", self.moved(command)]
        done = subprocess.run(
            command, cwd=self.home / "src", env=self.env | more, capture_output=True, text=True, timeout=1500
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]

    def packages(self, target):
        """The folder of programs of an image."""
        shutil.rmtree(self.home / "opt", ignore_errors=True)
        self.run_all(f"packages-of-{target}", BACKENDS="")
        return self.home / "opt" / "hibachi" / "bin"


@pytest.fixture(scope="module")
def built(stages, tmp_path_factory):
    home = tmp_path_factory.mktemp("image")
    yield Built(home, stages)
    shutil.rmtree(home)


class Container:
    """A program of an image, with the image's variables and nothing of ours."""

    def __init__(self, built, target, **variables):
        programs, self.folder = built.packages(target), built.home / f"home of {target}"
        self.folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        steps = lineage(built.stages, target)
        found = {name: built.moved(value) for name, value in environment_of(steps).items()}
        found["PATH"] = found["PATH"].replace("$PATH", "/usr/bin:/bin")
        self.env = found | {"HOME": str(self.folder), "HIBACHI_PORT": str(self.port)} | variables
        (entry,) = (json.loads(value) for name, value in steps if name == "ENTRYPOINT")
        (check,) = (json.loads(value.partition("CMD")[2]) for name, value in steps if name == "HEALTHCHECK")
        self.check = [programs / check[0], DEPLOY / "healthcheck.py"]
        assert check[1:] == ["/opt/healthcheck.py"]
        self.log = built.home / f"log of {target}"
        with self.log.open("w") as file:
            self.process = subprocess.Popen([programs / entry[0], *entry[1:]], env=self.env, cwd=self.folder,
                                            stderr=file)  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def healthy(self):
        return subprocess.run(self.check, env=self.env, capture_output=True, timeout=30).returncode == 0

    def wait_for(self, condition):
        begun = time.monotonic()
        while not condition():
            assert self.process.poll() is None and time.monotonic() - begun < 120, self.log.read_text()
            time.sleep(0.1)

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        with contextlib.closing(connection):
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log.read_text()
        assert "Traceback" not in self.log.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="images are for Linux")
def test_the_commands_of_the_dockerfile_make_a_router(built):
    upstream = Mock("m").start()
    try:
        with Container(built, "route", UPSTREAMS=upstream.url) as router:
            router.wait_for(router.healthy)
            router.wait_for(lambda: router.ask("GET", "/ready")[0] == 200)
            assert [m["id"] for m in router.ask("GET", "/v1/models")[1]["data"]] == ["m"]
            router.stop()
            assert not router.healthy()
    finally:
        upstream.close()
    assert not list(router.folder.iterdir())  # it needs no file system that it can write to
    names = {p.name.partition("-")[0] for p in (built.home / "opt").rglob("*.dist-info")}
    assert "aiohttp" in names and not names & {"pip", "build", "hatchling", "ziglang", "transformers"}


@pytest.mark.skipif(sys.platform != "linux", reason="images are for Linux")
def test_the_commands_of_the_dockerfile_make_a_server(built):
    with Container(built, "serve") as server:
        server.wait_for(server.healthy)
        asked = {"model": "tiny", "prompt": "She was", "max_tokens": 4, "temperature": 0}
        status, answer = server.ask("POST", "/v1/completions", asked)
        assert status == 200 and answer["usage"]["completion_tokens"] == 4
        server.stop()
    (wheel,) = (built.home / "wheels").glob("hibachi-*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (metadata,) = (file.read(n).decode() for n in names if n.endswith(".dist-info/METADATA"))
    assert "file://" not in metadata
    if re.search("x86_64|aarch64", os.uname().machine):
        assert "hibachi/backend/kernels/lib/manifest.json" in names  # there is no compiler in the image
        assert not list(server.folder.rglob("*.so"))


@pytest.mark.skipif(sys.platform != "linux", reason="images are for Linux")
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_backend_that_is_asked_for_is_built_from_the_checkout(name, built):
    """Its libraries, which are large, are not fetched here."""
    first, second = (value for kind, value in built.stages["packages-of-serve"][1] if kind == "RUN")
    built.sh(first, BACKENDS=name)
    (wheel,) = (built.home / "wheels").glob(f"hibachi_{name}-*.whl")
    with zipfile.ZipFile(wheel) as file:
        (metadata,) = (file.read(n).decode() for n in file.namelist() if n.endswith(".dist-info/METADATA"))
    assert f"Version: {VERSION}" in metadata and f"Requires-Dist: {name}>=" in metadata
    assert "Requires-Dist: hibachi" not in metadata and "file://" not in metadata
    listed = second.replace("pip --python /opt/hibachi/bin/python install", "echo >/src/asked")
    built.sh(listed, BACKENDS=name)
    asked = (built.home / "src" / "asked").read_text().split()
    assert asked[-1] == str(wheel) and asked[-2].endswith(TARGETS["serve"])
