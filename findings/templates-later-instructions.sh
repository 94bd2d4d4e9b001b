#!/bin/sh
# Chat templates of published models, the 70 that llama-cpp-python 0.3.36 carries in its source, rendered by Jinja2 3.1.6
# as transformers renders them. A second message of the system, or one of the developer, which OpenAI's API takes and
# coding agents send, is dropped by many without a word. Seen: of "system, system, user" 12 drop a text and 6 refuse; of
# "user, assistant, system, user" 8 drop it and 6 refuse; of "system, user, assistant, developer, user" 37 drop one and 8
# refuse. (Four more need tools to render at all.)
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jinja2==3.1.6
"$folder/venv/bin/pip" download --quiet --no-deps --no-binary=:all: --dest "$folder" llama-cpp-python==0.3.36
tar -xzf "$folder"/llama_cpp_python-*.tar.gz -C "$folder" --wildcards '*/models/templates/*.jinja'
"$folder/venv/bin/python" - "$folder" <<'PY'
import datetime
import json
import sys
from pathlib import Path

from jinja2 import Environment, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True)).set_lineno(line)


def refuse(message):
    raise ValueError(message)


env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
env.filters["tojson"] = lambda x, **more: json.dumps(x, ensure_ascii=False, **more)
env.globals |= {"raise_exception": refuse, "strftime_now": lambda f: datetime.datetime(2026, 1, 1).strftime(f)}
files = sorted(Path(sys.argv[1]).rglob("models/templates/*.jinja"))
roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
found = {}
for order in ("ssu", "uasu", "suadu"):
    dropped = refused = 0
    for file in files:
        messages = [{"role": roles[letter], "content": f"WORD{i}X"} for i, letter in enumerate(order)]
        try:
            text = env.from_string(file.read_text()).render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
            )
        except ValueError:  # the template's own word
            refused += 1
        except Exception:  # it needs tools
            continue
        else:
            dropped += any(f"WORD{i}X" not in text for i, letter in enumerate(order) if letter in "sd")
    found[order] = dropped, refused
print(len(files), "templates; dropped, refused:", found)
assert len(files) == 70
assert found == {"ssu": (12, 6), "uasu": (8, 6), "suadu": (37, 8)}, found
PY
