"""Models by their name on the Hugging Face Hub: out of the local cache, or downloaded into it.

The cache is read without any library. Its layout: `models--ORG--NAME/refs/REVISION` holds the id of a commit, and
`models--ORG--NAME/snapshots/COMMIT/` its files.
"""

from __future__ import annotations

import importlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from hibachi.common.installed import need
from hibachi.common.phases import ending_at_once, in_command, phase, phases_shown
from hibachi.errors import InvalidModelFiles, MissingExtra
from hibachi.llm.model.fields import read_json
from hibachi.llm.model.gguf.file import parts

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.\-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(rf"({_PART}/{_PART})((?:/[A-Za-z0-9_.\-]+)+\.gguf)?(?:@([A-Za-z0-9_][A-Za-z0-9_.\-/]*))?")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_WANTED = [  # `model*`: some repositories hold their weights a second time, under other names
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *(*_TOKENIZERS, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("modules.json", "1_Pooling/config.json"),
]


@dataclass(frozen=True, slots=True)
class HubName:
    """ "org/name", "org/name@revision" or "org/name/file.gguf", in its parts. gguf: "" for a model in safetensors."""

    repository: str
    gguf: str = ""
    revision: str = "main"

    @property
    def files(self) -> list[str]:
        """The GGUF file, or all files of a model that is split; [] for a model in safetensors."""
        return [file.as_posix() for file in parts(Path(self.gguf))] if self.gguf else []


def parse_name(text: str) -> HubName | None:
    """The parts of a name on the Hub, or None if `text` is none, such as a path."""
    m = _NAME.fullmatch(text)
    if m is None or "--" in m[1] or ".." in text or "//" in text or text.endswith("/") or m[1].endswith(".gguf"):
        return None
    return HubName(m[1], (m[2] or "")[1:], m[3] or "main")


def cache_folder() -> Path:
    """Where the Hub's own library keeps its downloads: HF_HUB_CACHE, HF_HOME/hub or ~/.cache/huggingface/hub."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(hub)))


def local_snapshot(name: str) -> Path:
    """The folder of a model by its name on the Hub: "org/name", or "org/name@revision" (a branch, tag or commit).

    "org/name/file.gguf", which may lie in a folder of the repository, gives the path of that file; any part of a model
    that is split stands for all. What the cache holds is used as it is, without the network; what it lacks is
    downloaded, if huggingface_hub is installed and HF_HUB_OFFLINE is not set.

    Raises InvalidModelFiles if `name` is no name on the Hub, or the files are neither there nor to be had.
    """
    wanted = parse_name(name)
    if wanted is None:
        raise InvalidModelFiles(
            f"{name!r} is not the name of a model on the Hugging Face Hub: expected org/name, org/name@revision or "
            f"org/name/file.gguf, in letters, digits, '-', '_' and '.'. Give such a name, or a folder."
        )
    found = _cached(wanted)
    lacking = [] if found is None else _lacking(found, wanted)
    if found is not None and not lacking and (wanted.gguf or any((found / f).is_file() for f in _TOKENIZERS)):
        return found / wanted.gguf
    why = _download(name, wanted)
    if why is None:
        found = _cached(wanted)
        lacking = [] if found is None else _lacking(found, wanted)
        why = "It has been downloaded, so the repository does not hold what is looked for"
    if found is not None and not lacking:
        return found / wanted.gguf
    state = (
        f"not complete in {found}, which lacks {', '.join(lacking[:40])}" if found else f"not in {_repository(wanted)}"
    )
    raise InvalidModelFiles(
        f"There is no folder {name}; as a name on the Hugging Face Hub, {wanted.repository} (revision "
        f"{wanted.revision}) is {state}. {why}. Give a folder with the model in Hugging Face layout, or name one GGUF "
        f"file of the repository: {wanted.repository}/FILE.gguf."
    )


def _repository(wanted: HubName) -> Path:
    return cache_folder() / ("models--" + wanted.repository.replace("/", "--"))


def _cached(wanted: HubName) -> Path | None:
    """The snapshot of this revision, if the cache has one."""
    repository, commit = _repository(wanted), wanted.revision
    ref = repository / "refs" / wanted.revision
    if ref.is_file():
        commit = ref.read_text(encoding="utf-8", errors="replace").strip()
    if not _COMMIT.fullmatch(commit):
        return None
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _lacking(snapshot: Path, wanted: HubName) -> list[str]:
    """Files that the model needs and that are not there; a link to a file that is gone does not count."""
    if wanted.gguf:
        return [file for file in wanted.files if not (snapshot / file).is_file()]
    if not (snapshot / "config.json").is_file():
        return [] if any(f.is_file() for f in snapshot.glob("*.gguf")) else ["config.json"]
    if (snapshot / "model.safetensors").is_file():
        return []
    index = snapshot / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    shards = read_json(index).get("weight_map")
    names = sorted({str(f) for f in shards.values()}) if isinstance(shards, dict) else []
    return [f for f in names if not (snapshot / f).is_file()]  # what else may be wrong, the reader of weights says


def _download(name: str, wanted: HubName) -> str | None:
    """Fetch the model's files into the cache. None if that went well, else why not: a sentence without a stop."""
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"Nothing was downloaded, because {variable} is set: unset it to download"
    try:
        hub = need("huggingface_hub", f"Downloading {name}", "hf")
    except MissingExtra as e:
        return str(e).removesuffix(".")
    patterns = wanted.files or _WANTED
    revision, blobs = wanted.revision, _repository(wanted) / "blobs"
    before, total = _megabytes(blobs), None
    try:
        if in_command():  # elsewhere it shows bars of its own
            importlib.import_module("huggingface_hub.utils").disable_progress_bars()
        if phases_shown():
            with phase(f"asking the Hub for {name}"), ending_at_once():
                files = hub.HfApi().model_info(wanted.repository, revision=revision, files_metadata=True).siblings
                total = sum(f.size or 0 for f in files if any(fnmatch(f.rfilename, p) for p in patterns)) // 10**6
        # Its threads go on until each has its file, so Ctrl-C would take minutes. A killed download harms nothing.
        with phase(f"downloading {name}", total, "MB", lambda: _megabytes(blobs) - before), ending_at_once():
            hub.snapshot_download(
                wanted.repository, revision=revision, cache_dir=cache_folder(), allow_patterns=patterns
            )
    except Exception as e:  # of the network, of the Hub, of the disk: the library has some twenty
        line = next(iter(str(e).strip().splitlines()), "")
        return f"Downloading it failed ({type(e).__name__}: {line})"
    return None


def _megabytes(folder: Path) -> int:
    """The size of what is in a folder, of unfinished files too."""
    total = 0
    with suppress(OSError):  # a file has got its name meanwhile
        for path in folder.iterdir():
            total += path.stat().st_size
    return total // 10**6
