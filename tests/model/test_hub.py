"""Models by their Hub name: a made cache, laid out as huggingface_hub does; the network is never asked."""

import io
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from hibachi.common.phases import showing_phases
from hibachi.errors import InvalidModelFiles
from hibachi.llm.model import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
MODEL = {"config.json": "{}", "model.safetensors": "weights", "tokenizer.json": "{}"}
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.fixture
def store(cache):
    """store({name: text}): a repository in the cache; files are links to blobs, as on every system that has links."""

    def put(files, name="some-org/a_model.v2", commit=COMMIT, refs=("main",)):
        repository = cache / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / commit
        (repository / "blobs").mkdir(parents=True, exist_ok=True)
        snapshot.mkdir(parents=True, exist_ok=True)
        for i, (file, text) in enumerate(files.items()):
            blob = repository / "blobs" / f"{commit[:4]}{i}"
            blob.write_text(text)
            (snapshot / file).parent.mkdir(exist_ok=True)
            (snapshot / file).symlink_to(Path("../../blobs") / blob.name)
        for ref in refs:
            (repository / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
            (repository / "refs" / ref).write_text(commit)
        return snapshot

    return put


@pytest.fixture
def online(monkeypatch):
    """online(download): huggingface_hub.snapshot_download is `download` for this test, and may be called."""

    def allow(download):
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    return allow


# ---- from the cache ------------------------------------------------------------------------------------------------


def test_a_model_of_the_cache(store, cache):
    snapshot = store(MODEL)
    assert hub.local_snapshot("some-org/a_model.v2") == snapshot
    assert (snapshot / "config.json").read_text() == "{}"
    theirs = huggingface_hub.snapshot_download("some-org/a_model.v2", local_files_only=True, cache_dir=cache)
    assert Path(theirs) == snapshot


def test_revisions(store):
    main, old = store(MODEL), store(MODEL, commit=OTHER, refs=("v1.0", "refs/pr/7"))
    assert hub.local_snapshot("some-org/a_model.v2@main") == main
    for revision in ("v1.0", "refs/pr/7", OTHER):
        assert hub.local_snapshot(f"some-org/a_model.v2@{revision}") == old
    with pytest.raises(InvalidModelFiles, match=r"revision v2\.0\) is not in "):
        hub.local_snapshot("some-org/a_model.v2@v2.0")


def test_shards(store):
    shards = {"model.safetensors.index.json": INDEX, "model-1.safetensors": "", "model-2.safetensors": ""}
    snapshot = store({"config.json": "{}", "tokenizer.json": "{}"} | shards)
    assert hub.local_snapshot("some-org/a_model.v2") == snapshot
    (snapshot / "model-2.safetensors").resolve().unlink()  # the link stays
    with pytest.raises(InvalidModelFiles, match=r"not complete .* lacks model-2\.safetensors"):
        hub.local_snapshot("some-org/a_model.v2")


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_a_snapshot_that_is_not_complete(store, lost):
    store({k: v for k, v in MODEL.items() if k != lost})
    with pytest.raises(InvalidModelFiles, match=f"not complete in .* lacks {lost}.*HF_HUB_OFFLINE is set"):
        hub.local_snapshot("some-org/a_model.v2")


def test_one_gguf_file(store):
    snapshot = store({"a.Q4_K_M.gguf": "", "b.gguf": ""}, "org/files")
    assert hub.local_snapshot("org/files/b.gguf") == snapshot / "b.gguf"
    assert hub.local_snapshot("org/files/a.Q4_K_M.gguf@main") == snapshot / "a.Q4_K_M.gguf"
    assert hub.local_snapshot("org/files") == snapshot
    with pytest.raises(InvalidModelFiles, match=r"lacks c\.gguf"):
        hub.local_snapshot("org/files/c.gguf")


def test_any_part_of_a_split_file_brings_all(store, online):
    names = [f"Q4/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    snapshot, asked = store({}, "org/files"), []
    (snapshot / "Q4").mkdir()
    (snapshot / names[2]).touch()

    def download(*_, allow_patterns, **__):
        asked.append(allow_patterns)
        for name in allow_patterns:
            (snapshot / name).touch()

    with pytest.raises(InvalidModelFiles, match=r"lacks Q4/m-00001-of-00003\.gguf, Q4/m-00002-of-00003\.gguf\."):
        hub.local_snapshot(f"org/files/{names[2]}")
    online(download)
    assert hub.local_snapshot(f"org/files/{names[2]}@main") == snapshot / names[2]
    assert asked == [names]


def test_a_model_without_a_tokenizer_is_complete_where_nothing_can_be_downloaded(store):
    snapshot = store({k: v for k, v in MODEL.items() if k != "tokenizer.json"})
    assert hub.local_snapshot("some-org/a_model.v2") == snapshot


@pytest.mark.parametrize("text", ["", "main", "../../etc", "abc", "0123456789abcdef/..", COMMIT])
def test_a_ref_that_is_damaged(store, text):
    snapshot = store(MODEL, commit=OTHER)
    (snapshot.parents[1] / "refs" / "main").write_text(text)
    with pytest.raises(InvalidModelFiles, match="is not in "):
        hub.local_snapshot("some-org/a_model.v2")


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value, expected in (
        (None, None, "/home/someone/.cache/huggingface/hub"),
        ("XDG_CACHE_HOME", "/xdg", "/xdg/huggingface/hub"),
        ("HF_HOME", "~/hf", "/home/someone/hf/hub"),
        ("HUGGINGFACE_HUB_CACHE", "/old", "/old"),
        ("HF_HUB_CACHE", "$HOME/new", "/home/someone/new"),
    ):
        monkeypatch.delenv("HF_HUB_CACHE", raising=False)
        if name:
            monkeypatch.setenv(name, value)
        assert hub.cache_folder() == Path(expected)


# ---- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, parts",
    [
        ("org/name", ("org/name", "", "main")),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", ("HuggingFaceTB/SmolLM2-135M-Instruct", "", "main")),
        ("a/b.c_d@v1", ("a/b.c_d", "", "v1")),
        ("a/b@refs/pr/3", ("a/b", "", "refs/pr/3")),
        ("a/b/c-Q8_0.gguf@v1", ("a/b", "c-Q8_0.gguf", "v1")),
    ],
)
def test_names(name, parts):
    assert hub.parse_name(name) == hub.HubName(*parts)


NO_NAMES = [
    *(
        "",
        "tiny",
        "/org/name",
        "org/name/",
        "org//name",
        "a/b/c",
        "a\\b/c",
        "org\\name",
        "C:/x",
        "~/x",
        "a/b c",
        "a/b\n",
    ),
    *(
        "../name",
        "org/..",
        "org/../../x",
        "a/b/../c.gguf",
        "./org",
        "org/.",
        ".org/name",
        "org/name.",
        "a--b/c",
        "a/b--c",
    ),
    *("a/b@", "a/b@../x", "a/b@/etc", "a/b@x//y", "a/b@x/", "a/b@x\\y", "a/b@x\0", "é/b", "a/" + "x" * 97, "a/b.gguf"),
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_is_no_name(name):
    assert hub.parse_name(name) is None
    with pytest.raises(InvalidModelFiles, match="is not the name of a model"):
        hub.local_snapshot(name)


# ---- downloading ---------------------------------------------------------------------------------------------------


def test_what_the_cache_lacks_is_downloaded(store, online, cache):
    calls = []

    def download(repository, *, revision, cache_dir, allow_patterns):
        calls.append((repository, revision, cache_dir))
        files = {f for f in allow_patterns if "*" not in f}
        assert files > {"config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"}
        assert not any("gguf" in p or p.endswith((".bin", ".py", ".pt")) for p in allow_patterns)
        return str(store(MODEL, repository))

    online(download)
    snapshot = hub.local_snapshot("org/fresh")
    assert calls == [("org/fresh", "main", cache)]
    assert snapshot.name == COMMIT and (snapshot / "model.safetensors").is_file()
    assert hub.local_snapshot("org/fresh") == snapshot
    assert len(calls) == 1, "what is in the cache needs no network"


def test_a_gguf_file_is_downloaded_by_its_name_only(store, online):
    def download(repository, *, revision, cache_dir, allow_patterns):
        assert (allow_patterns, revision) == (["x.gguf"], "v1")
        store({"x.gguf": ""}, repository, refs=("v1",))

    online(download)
    assert hub.local_snapshot("org/fresh/x.gguf@v1").name == "x.gguf"


def test_an_incomplete_snapshot_is_completed(store, online):
    lacking = {k: v for k, v in MODEL.items() if k != "tokenizer.json"}
    snapshot = store(lacking)

    def download(repository, **_):
        (snapshot / "tokenizer.json").write_text("{}")

    online(download)
    assert (hub.local_snapshot("some-org/a_model.v2") / "tokenizer.json").is_file()


def test_a_failed_download_is_told_but_not_needed_for_a_tokenizer(store, online):
    def download(repository, **_):
        raise ConnectionError("no route to host\nand much more")

    online(download)
    with pytest.raises(InvalidModelFiles, match=r"failed \(ConnectionError: no route to host\)") as e:
        hub.local_snapshot("org/fresh")
    assert "much more" not in str(e.value)
    snapshot = store({k: v for k, v in MODEL.items() if k != "tokenizer.json"}, "org/fresh")
    assert hub.local_snapshot("org/fresh") == snapshot


def test_a_repository_without_what_we_read(store, online):
    online(lambda repository, **_: store({"config.json": "{}", "pytorch_model.bin": ""}, repository))
    with pytest.raises(InvalidModelFiles, match=r"lacks model\.safetensors.*does not hold what.*FILE\.gguf"):
        hub.local_snapshot("org/pickles")


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_means_offline(variable, online, monkeypatch):
    online(lambda *_, **__: pytest.fail("asked the network"))
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(InvalidModelFiles, match=f"{variable} is set"):
        hub.local_snapshot("org/fresh")


def test_without_the_library_the_extra_is_named(monkeypatch, cache):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InvalidModelFiles) as e:
        hub.local_snapshot("org/fresh")
    for part in ("There is no folder org/fresh", str(cache / "models--org--fresh"), "extra 'hf'", "Give a folder"):
        assert part in str(e.value)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_how_much_of_it_is_there(store, online, cache, monkeypatch):
    monkeypatch.setattr("hibachi.common.phases.SHOW_AFTER", 0.0)
    monkeypatch.setattr("hibachi.common.phases._TICK", 0.001)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()

    def model_info(self, repository, *, revision, files_metadata):
        assert (repository, revision, files_metadata) == ("org/fresh", "main", True)
        sizes = {
            "model.safetensors": 7_000_000,
            "config.json": 500_000,
            "tf_model.h5": 9_000_000,
            ".gitattributes": None,
        }
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=n, size=size) for n, size in sizes.items()])

    def download(repository, **_):
        blobs = cache / "models--org--fresh" / "blobs"
        blobs.mkdir(parents=True)
        (blobs / "1.incomplete").write_bytes(bytes(3_000_000))
        end = time.monotonic() + 10
        while "downloading org/fresh  3/7 MB" not in terminal.getvalue():
            assert time.monotonic() < end, terminal.getvalue()
            time.sleep(0.001)
        store(MODEL, repository)

    online(download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    with showing_phases(terminal):
        hub.local_snapshot("org/fresh")


def test_a_pipe_sees_no_bars_of_the_library(store, online, monkeypatch):
    off = []
    monkeypatch.setattr("huggingface_hub.utils.disable_progress_bars", lambda: off.append(True))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: pytest.fail("asked for sizes"))
    online(lambda repository, **_: store(MODEL, repository))
    hub.local_snapshot("org/fresh")
    assert not off  # in a notebook, say
    with showing_phases(io.StringIO()):
        hub.local_snapshot("org/another")
    assert off
