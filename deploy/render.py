"""Writes kubernetes/router.yaml: what the chart renders with the values below, without what is of Helm.

It takes no arguments, and needs the packages helm-python-sdk and pyyaml.
"""

import base64
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
HELM, MANIFESTS = FOLDER / "helm", FOLDER / "kubernetes" / "router.yaml"
NAME = "hibachi-router"
VALUES = {"upstreams": [{"url": "http://llama:8000", "limit": 32}, {"url": "http://falcon:8000", "limit": 32}]}
HEAD = """\
# A router before two servers, for `kubectl apply -f`. Written by deploy/render.py from the chart in deploy/helm, so a
# change of more than names, addresses and numbers belongs there. Before you apply it, name your image (see
# deploy/Dockerfile) and your upstreams. After a change of the Secret: kubectl rollout restart deployment hibachi-router
"""
OF_HELM = ("app.kubernetes.io/managed-by", "helm.sh/chart", "checksum/configuration")


def rendered(values, name=NAME, namespace="default", chart="hibachi-router", **options):
    """The documents in the order of their files, NOTES.txt left out. chart: a folder of `helm`."""
    import helm_python
    import yaml

    with helm_python.Chart.load(HELM / chart) as loaded:
        files = loaded.render(values, name=name, namespace=namespace, **options)
    texts = [text for path, text in sorted(files.items()) if path.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def plain(document):
    """Without what is of Helm, and with secrets in plain text, to be edited."""
    found = {key: _without(value) for key, value in document.items()}
    if found["kind"] == "Secret":
        found["stringData"] = {name: base64.b64decode(data).decode() for name, data in found.pop("data").items()}
    return found


def _without(value):
    if isinstance(value, list):
        return [_without(v) for v in value]
    if not isinstance(value, dict):
        return value
    found = {k: _without(v) for k, v in value.items() if k not in OF_HELM}
    return {k: v for k, v in found.items() if v or k != "annotations"}


def manifests():
    import yaml

    class Dumper(yaml.SafeDumper):
        def increase_indent(self, flow=False, indentless=False):
            return super().increase_indent(flow, False)

    def text(dumper, value):
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    documents = [plain(document) for document in rendered(VALUES)]
    return HEAD + "".join("---\n" + yaml.dump(d, Dumper=Dumper, sort_keys=False, width=120) for d in documents)


if __name__ == "__main__":
    MANIFESTS.write_text(manifests())
    print(MANIFESTS, file=sys.stderr)
