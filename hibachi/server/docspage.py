"""The description of routes as a page: plain HTML, without scripts and without files from elsewhere."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; --dim: light-dark(#5a5a5a, #a8a8a8); --line: light-dark(#ddd, #3c3c3c);
  --block: light-dark(#f5f5f3, #262624); --ink: light-dark(#1d1d1b, #e8e8e4); --page: light-dark(#fff, #1a1a18);
  --link: light-dark(#a33b00, #ff9d66); }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 62rem;
  margin: 0 auto; padding: 1rem; }
a { color: var(--link); }
h1 { font-size: 1.5rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
h3 { font-size: 1rem; border-top: 1px solid var(--line); padding-top: 1.25rem; margin: 1.75rem 0 .25rem; }
h4 { font-size: .8rem; color: var(--dim); margin: 1rem 0 .25rem; }
code, pre, h3 { font-family: ui-monospace, monospace; } code, pre { font-size: .85rem; }
pre { background: var(--block); padding: .75rem; overflow-x: auto; border-radius: .25rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .2rem .75rem .2rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: normal; } p { margin: .25rem 0; } .dim { color: var(--dim); }
ul { columns: 18rem; padding-left: 1rem; } li { break-inside: avoid; }
""".strip()


def page(document: Mapping[str, Any]) -> str:
    """document: of `hibachi.server.openapi`."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    title, root = escape(document["info"]["title"]), document["servers"][0]["url"].rstrip("/")
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>"
    yield f'<p class="dim">hibachi {escape(document["info"]["version"])}, '
    yield f'<a href="{escape(root)}/openapi.json">as OpenAPI {document["openapi"]}</a>. '
    if "securitySchemes" in document["components"]:
        yield "A route with “key” wants the header <code>Authorization: Bearer KEY</code>."
    yield "</p>\n<ul>"
    routes = [(m.upper(), path, o) for path, methods in document["paths"].items() for m, o in methods.items()]
    for method, path, o in routes:
        yield f'<li><a href="#{o["operationId"]}"><code>{method} {escape(path)}</code></a></li>'
    yield "</ul>\n<h2>Routes</h2>"
    for method, path, o in routes:
        yield from _route(method, path, o, root)
    yield "<h2>Types</h2>"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f'<h3 id="type-{escape(name)}">{escape(name)}</h3>'
        if "description" in schema:
            yield f"<p>{escape(schema['description'])}</p>"
        required = schema.get("required", ())
        rows = [(n, s, n in required) for n, s in schema.get("properties", {}).items()]
        yield from _fields(rows) if rows else [f"<p><code>{kind(schema)}</code></p>"]
    yield "</body>\n</html>"


def _route(method: str, path: str, o: Mapping[str, Any], root: str) -> Iterator[str]:
    yield f'<h3 id="{o["operationId"]}">{method} {escape(path)}</h3>'
    key = ' <span class="dim">(key)</span>' if "security" in o else ""
    yield f"<p>{escape(o['summary'])}{key}</p>"
    if "description" in o:
        yield f"<p>{escape(o['description'])}</p>"
    for place in ("path", "query"):
        own = [p for p in o.get("parameters", ()) if p["in"] == place]
        if own:
            yield f"<h4>In the {place}</h4>"
            yield from _fields([(p["name"], _schema(p), p.get("required", False)) for p in own])
    contents = o.get("requestBody", {}).get("content", {})
    if contents:
        yield f"<h4>Body</h4><p>{_contents(contents)}</p>"
    yield f"<h4>Example</h4><pre>{escape(curl(method, path, o, root))}</pre>"
    yield '<h4>Answers</h4><div class="table"><table>'
    for status, answer in o["responses"].items():
        told = _contents(answer.get("content", {}))
        yield f"<tr><td><code>{status}</code></td><td>{escape(answer['description'])}</td><td>{told}</td></tr>"
    yield "</table></div>"


def curl(method: str, path: str, o: Mapping[str, Any], root: str) -> str:
    """A curl command for this route. $URL stands for the server's address; parameters of the path likewise."""
    place = re.sub(r"{(\w+)}", lambda found: f"${found[1].upper()}", root + path)
    words = ["curl", "-sS" if method == "GET" else f"-sSX {method}", f'"$URL{place}"']
    if "security" in o:
        words.append('-H "Authorization: Bearer $KEY"')
    for media, content in o.get("requestBody", {}).get("content", {}).items():
        if "example" in content:
            words.append(f"-H 'Content-Type: {media}' \\\n  -d {shlex.quote(json.dumps(content['example']))}")
    return " ".join(words)


def _contents(contents: Mapping[str, Any]) -> str:
    return "<br>".join(f"<code>{escape(media)}</code>: {kind(c['schema'])}" for media, c in contents.items())


def _schema(parameter: Mapping[str, Any]) -> Any:
    return parameter["schema"] if "schema" in parameter else parameter["content"]["application/json"]["schema"]


def _fields(rows: list[tuple[str, Any, bool]]) -> Iterator[str]:
    """A table of fields. rows: name, schema, and whether it is required."""
    yield '<div class="table"><table><tr><th>name</th><th>type</th><th>default</th></tr>'
    for name, schema, required in rows:
        default = "required" if required else json.dumps(schema["default"]) if "default" in schema else ""
        yield f"<tr><td><code>{escape(name)}</code></td><td>{kind(schema)}</td><td>{escape(default)}</td></tr>"
    yield "</table></div>"


def kind(schema: Any) -> str:
    """A schema in few words, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#type-{name}">{name}</a>'
    if "contentSchema" in schema:
        return kind(schema["contentSchema"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind(s) for s in schema["anyOf"]))
    if "data" in schema.get("properties", {}):
        return f"events, each with {kind(schema['properties']['data'])}"
    for name in ("enum", "const"):
        if name in schema:
            values = schema[name] if name == "enum" else [schema[name]]
            return " or ".join(f"<code>{escape(json.dumps(v))}</code>" for v in values)
    given = schema.get("type", "anything")
    if given == "array":
        return f"list of {kind(schema['items'])}" if schema.get("items") else "list"
    if given == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {kind(schema['additionalProperties']) if schema['additionalProperties'] else 'anything'}"
    return "bytes" if schema.get("format") == "binary" else escape(given)
