"""Models of no language, over HTTP: what comes back is what a loop in NumPy computes, wherever the engine is.

The weights of the model of phonemes (Apache-2.0) come out of the package g2p-en, of which nothing is imported: `make
test-all` fetches it into .g2p. Without it made-up weights of the same shapes are tried.
"""

import importlib.util
import io
import json
import re
import wave
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from hibachi.llm import users_model as named
from hibachi.llm.own import open_model
from hibachi.llm.remote.llm import open_remote

msgspec = pytest.importorskip("msgspec")

from hibachi.llm.dialects.tokens.bodies import Parameters  # noqa: E402

from ..serve.conftest import site  # noqa: E402

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
WHEEL = ROOT / ".g2p" / "g2p_en-2.1.0-py3-none-any.whl"
PLACES = {"own": open_model, "child": open_remote}
MOSTLY_HERE = pytest.mark.parametrize(
    "served", ["own", pytest.param("child", marks=pytest.mark.slow)], indirect=True, scope="module"
)


def example(name):
    """The module of an example, for its constants and as a client."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=PLACES)
def served(request):
    """From the name of a model in examples/ to its server. All stay until the end."""
    with ExitStack() as stack:
        sites = {}

        def serve(name):
            if name not in sites:
                made = stack.enter_context(PLACES[request.param](f"{EXAMPLES / name}", max_num_seqs=16))
                sites[name] = stack.enter_context(site(made))
            return sites[name]

        yield serve


def generate(here, body, **headers):
    """A whole answer that must succeed."""
    answer = here.client.post("/v1/generate", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(here, **request):
    """The events of a stream of lines."""
    request["headers"] = {"Accept": "application/x-ndjson", **request.get("headers", {})}
    with here.client.stream("POST", "/v1/generate", **request) as answer:
        assert answer.status_code == 200, answer.read()
        return [json.loads(line) for line in answer.iter_lines() if line]


def at_once(ask, each):
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, each))


# ---- four codebooks --------------------------------------------------------------------------------------------------


def in_canon():
    """The piece from its first frame, in which each voice sings the tune 16 frames after the one before it."""
    tune = example("music_codebooks").TUNE
    piece = np.zeros((len(tune) + 3 * 16 + 1, 4), np.int64)  # the last frame is silent
    for voice in range(4):
        piece[16 * voice : 16 * voice + len(tune), voice] = tune
    return piece


def test_the_client_gets_the_same_music_in_three_ways(served, capsys):
    client, here, piece = example("served_client"), served("music_codebooks.py:Round"), in_canon()
    client.main(here.url)
    assert capsys.readouterr().out == f"{len(piece) - 1} frames of 4 voices, silent at the end: True\n" + (
        "three times the same: True\n"
    )
    for way in (client.with_npy, client.with_json, client.with_msgpack):
        got = way(here.url)
        assert got.dtype == np.int64 and np.array_equal(got, piece[1:])


def test_music_that_many_take_up_at_different_places_ends_alike(served):
    here, piece = served("music_codebooks.py:Round"), in_canon()
    lengths = [1, 5, 16, 17, 40, 64, 100, 111]
    whole = at_once(lambda n: generate(here, {"prompt": piece[:n].tolist(), "include_stop": n % 2 == 0}), lengths)
    for n, answer in zip(lengths, whole, strict=True):
        assert answer["tokens"] == piece[n : None if n % 2 == 0 else -1].tolist()
        assert answer["finish_reason"] == "stop" and answer["shape"] == [4] and answer["dtype"] == "int64"
    opening, *events, end = streamed(here, json={"prompt": piece[:40].tolist(), "max_tokens": 10, "stream": True})
    assert (opening["shape"], opening["dtype"]) == ([4], "int64")
    assert [frame for event in events for frame in event["tokens"]] == piece[40:50].tolist()
    assert end["finish_reason"] == "length" and end["usage"]["completion_tokens"] == 10
    curl = {"Accept": "application/json"}  # as `curl --json` says, and OpenAI's clients, also for a stream
    answer = here.client.post("/v1/generate", json={"prompt": [[1, 0, 0, 0]], "stream": True}, headers=curl)
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("wrong", [[1, 0, 0, 0], [[1, 0, 0]], [[0.5, 0, 0, 0]], [[[1, 0, 0, 0]]], [], "C", [[1], 0]])
def test_a_wrong_frame_is_refused_beside_a_right_one(served, wrong):
    here, piece = served("music_codebooks.py:Round"), in_canon()
    ask = [{"prompt": piece[:90].tolist()}, {"prompt": wrong}, {"prompt": piece[:90].tolist()}]
    right, refused, too = at_once(lambda body: here.post("/v1/generate", body), ask)
    assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"
    assert right.json()["tokens"] == too.json()["tokens"] == piece[90:].tolist()


# ---- real values -----------------------------------------------------------------------------------------------------


def forecast(rivers, past, hours):
    """What the autoregression says of the next hours [hours, 2], one after another."""
    weights, known = rivers.Autoregression().weights, list(past.astype(np.float32))
    for _ in range(hours):
        seen = np.stack(([known[0]] * rivers.HOURS + known)[-rivers.HOURS :]).T.ravel()
        known.append((np.append(seen, 1.0) @ weights).astype(np.float32))
    return np.stack(known[len(past) :])


@MOSTLY_HERE
def test_real_values_stop_at_the_threshold_of_the_class(served):
    here, rivers = served("time_series.py:Autoregression"), example("time_series")
    pasts = [rivers.simulate(hours, seed) for hours, seed in ((107, 1), (114, 2), (128, 4), (163, 9), (5, 3))]
    answers = at_once(lambda past: generate(here, {"prompt": past.tolist(), "max_tokens": 72}), pasts)
    floods = 0
    for past, answer in zip(pasts, answers, strict=True):
        want = forecast(rivers, past, 72)
        over = np.flatnonzero(want[:, 1] > rivers.FLOOD)
        want = want[: over[0] + 1] if len(over) else want
        assert np.allclose(answer["tokens"], want, rtol=1e-4, atol=1e-4)
        assert answer["finish_reason"] == ("stop" if len(over) else "length")
        assert (answer["dtype"], answer["shape"]) == ("float32", [2])
        floods += bool(len(over))
    assert 0 < floods < len(pasts)


@MOSTLY_HERE
def test_a_request_adds_a_stop_token_with_a_tolerance(served):
    here, rivers = served("time_series.py:Autoregression"), example("time_series")
    past = rivers.simulate(107, 1)  # no flood comes
    want, atol = forecast(rivers, past, 72), 0.01
    near = want[20] + [0.004, -0.004]  # no token is this one
    at = int(np.flatnonzero((abs(want - near) <= atol).all(1))[0])
    body = {"prompt": past.tolist(), "max_tokens": 72, "stop": [near.tolist()]}
    assert len(generate(here, body)["tokens"]) == 72
    for included in (True, False):
        answer = generate(here, {**body, "atol": atol, "include_stop": included})
        assert len(answer["tokens"]) == at + included and answer["finish_reason"] == "stop"
    prompt = {"dtype": "float32", "shape": past.shape, "data": past.astype("<f4").tobytes()}
    packed = msgspec.msgpack.encode({**body, "prompt": prompt, "atol": atol})
    answer = here.client.post("/v1/generate", content=packed, headers={"Content-Type": "application/msgpack"})
    assert len(answer.json()["tokens"]) == at + 1


def test_the_page_names_every_field_of_a_request_and_every_attribute_of_a_class():
    page = (ROOT / "docs" / "serving-tokens.md").read_text()
    assert "all filters and penalties ([sampling](sampling.md))" in page
    page += (ROOT / "docs" / "sampling.md").read_text()
    attributes = re.findall(r"^    ([a-z_]+(?:, [a-z_]+)*)  +\S", named.__doc__ or "", re.MULTILINE)
    names = [*Parameters.__struct_fields__, *", ".join(attributes).split(", ")]
    assert len(attributes) > 8 and [name for name in names if f"`{name}`" not in page] == []


def test_what_the_page_shows_of_curl_is_so(tmp_path):
    page, file = (ROOT / "docs" / "serving-tokens.md").read_text(), tmp_path / "falling.py"
    file.write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    asked = [json.loads(body) for body in re.findall(r"-H 'Content-Type: application/json' -d '(.*)'", page)[:2]]
    shown = json.loads(re.search(r"```text\n(\{.*?)```", page, re.DOTALL)[1])
    [(data, lines)] = re.findall(r'-d "(.*)"\n```\n\n```text\n(.*?)```', page, re.DOTALL)
    with open_model(f"{file}:Falling") as made, site(made) as here:
        long, short = (generate(here, body) for body in asked)
        assert long["finish_reason"] == "stop" and long["tokens"][-1][0] <= 0
        short["usage"].pop("prompt_tokens_details", None)
        for answer in (shown, short):
            answer["tokens"] = np.round(answer["tokens"], 2).tolist()
            for name in ("id", "created", "model"):
                assert answer.pop(name)
        assert short == shown
        csv = {"Content-Type": "text/csv", "Accept": "text/csv"}
        assert here.client.post("/v1/generate", content=data, headers=csv).text == lines


# ---- a classifier ----------------------------------------------------------------------------------------------------


@MOSTLY_HERE
def test_flowers_are_told_apart(served):
    here, flowers = served("served_flowers.py:Flowers"), example("served_flowers")
    model, petals = flowers.Flowers(), np.random.default_rng(1).uniform(0, [7, 3], size=(40, 2)).round(2)
    answers = at_once(lambda petal: generate(here, {"input": petal.tolist()}), petals)
    told = here.post("/classify", {"input": petals.tolist()}).json()["data"]
    kinds = set()
    for petal, answer, classified in zip(petals, answers, told, strict=True):
        off = (petal.astype(np.float32) - model.mean) / model.spread
        density = np.exp(-off * off / 2).prod(1) / model.spread.prod(1)
        assert np.allclose(np.exp(answer["output"]), density, rtol=1e-4, atol=1e-9)
        assert np.allclose(classified["probs"], density / density.sum(), rtol=1e-4, atol=1e-9)
        assert classified["label"] == model.labels[density.argmax()]
        kinds.add(int(density.argmax()))
    assert kinds == {0, 1, 2}
    for body in ({"input": [1.0]}, {"input": [1, 2], "max_tokens": 1}, {"input": [1, 2], "stream": True}):
        assert here.post("/v1/generate", body).status_code == 400
    assert here.post("/classify", {"input": [1.0]}).status_code == 400


# ---- sound -----------------------------------------------------------------------------------------------------------


def sounding(samples, rate=8000, width=2):
    """The bytes of a .wav."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setframerate(rate)
        file.setsampwidth(width)
        file.writeframes(np.asarray(samples, "<i2").tobytes())
    return out.getvalue()


def test_noise_becomes_a_note(served):
    here, string = served("served_string.py:String"), example("served_string")
    noise = np.random.default_rng(0).integers(-16000, 16000, 200)
    wanted = {"Content-Type": "audio/wav", "Accept": "audio/wav"}
    answer = here.client.post("/v1/generate", content=sounding(noise), headers=wanted)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/wav"), answer.text
    with wave.open(io.BytesIO(answer.content)) as file:
        assert file.getparams()[:3] == (1, 2, 8000)
        got = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32767
    sound = [*noise / 32768, *[0.0] * 40]  # 200 samples are two frames and a half
    while len(sound) % 80 or len(sound) == 240 or max(map(abs, sound[-80:])) >= string.SILENT:
        sound.append(string.QUIETER * (sound[-80] + sound[-81]) / 2)
    assert answer.headers["x-finish-reason"] == "stop" and len(got) == len(sound) - 240
    assert np.allclose(got, sound[240:], atol=2e-4)
    wanted["Accept"] = "application/json"
    lists = here.client.post("/v1/generate?max_tokens=2", content=sounding(noise), headers=wanted)
    assert np.allclose(np.ravel(lists.json()["tokens"]), sound[240:400], atol=1e-6)


@pytest.mark.parametrize(
    "body", [b"", b"noise", sounding([1, 2], rate=44100), sounding([1, 2])[:20], sounding([])], ids=lambda b: len(b)
)
def test_what_is_no_sound_is_refused_in_words_of_the_model(served, body):
    wanted = {"Content-Type": "audio/wav", "Accept": "audio/wav"}
    answer = served("served_string.py:String").client.post("/v1/generate", content=body, headers=wanted)
    assert answer.status_code == 400
    assert re.match("Expected |A prompt must hold", answer.json()["error"]["message"])


# ---- letters to phonemes ---------------------------------------------------------------------------------------------


def made_up():
    """A wheel with random weights of the right shapes."""
    rng, out, npz = np.random.default_rng(0), io.BytesIO(), io.BytesIO()
    shapes = {"enc_emb": (29, 256), "dec_emb": (74, 256), "fc_w": (74, 256), "fc_b": (74,)}
    for part in ("enc", "dec"):
        shapes |= {f"{part}_w_ih": (768, 256), f"{part}_w_hh": (768, 256)}
        shapes |= {f"{part}_b_ih": (768,), f"{part}_b_hh": (768,)}
    weights = {name: rng.normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    weights["fc_b"][3] = 0  # so that some words end, and some do not
    np.savez(npz, **weights)
    with zipfile.ZipFile(out, "w") as wheel:
        wheel.writestr("g2p_en/checkpoint20.npz", npz.getvalue())
    return out.getvalue()


def say(here, word):
    plain = {"Content-Type": "text/plain", "Accept": "text/plain"}
    answer = here.client.post("/v1/generate?temperature=0", content=word.encode(), headers=plain)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain"), answer.text
    return answer.text


def compare(wheel, words, place, monkeypatch):
    """Whole as text, and streamed as ids; all at once. Returns what was said."""
    monkeypatch.setenv("G2P_EN", str(wheel))
    phonemes = example("served_phonemes").PHONEMES
    with PLACES[place](f"{EXAMPLES}/served_phonemes.py:Phonemes", max_num_seqs=16) as made, site(made) as here:
        want = at_once(lambda word: say(here, word), words)
        assert [say(here, word) for word in words[:8]] == want[:8]  # alone

        def stream(word):
            kind = {"Content-Type": "text/plain"}
            opening, *events, end = streamed(
                here, params={"temperature": 0, "stream": True}, content=word.encode(), headers=kind
            )
            ids = [i for event in events for i in event["tokens"]]
            assert (opening["shape"], end["finish_reason"]) == ([], "stop")
            assert ids.pop() == 29 + 3  # </s>
            return " ".join(phonemes[i - 29] for i in ids)

        assert at_once(stream, words) == want
        for wrong in (b"", b" ", b"two words", b"a" * 200):
            assert here.client.post(
                "/v1/generate", content=wrong, headers={"Content-Type": "text/plain"}
            ).is_client_error
        html = {"Content-Type": "text/html"}
        assert "got 'a' as text/html" in here.client.post("/v1/generate", content=b"a", headers=html).text
    return want


@pytest.mark.parametrize("place", ["own", pytest.param("child", marks=pytest.mark.slow)])
def test_phonemes_of_made_up_weights(tmp_path, monkeypatch, place):
    wheel = tmp_path / "made_up.whl"
    wheel.write_bytes(made_up())
    words = ["a", "hello", "kyubyong", "it's", "naïve", "zzz", "antidisestablishmentarianism", "b" * 60]
    said = [len(text.split()) for text in compare(wheel, words, place, monkeypatch)]
    assert max(said) == 20 and len(set(said)) > 2


@pytest.mark.slow
@pytest.mark.skipif(not WHEEL.exists(), reason=f"{WHEEL.name} is not in .g2p: make .g2p/fetched")
@pytest.mark.parametrize("place", PLACES)
def test_phonemes_of_the_published_weights(monkeypatch, place):
    words = sorted(set(re.findall("[a-z]{2,}", (ROOT / "README.md").read_text().lower())))[::2]
    words = [*words[:199], "pneumonoultramicroscopicsilicovolcanoconiosis"]
    assert len(words) == 200
    hello, *others, long = compare(WHEEL, ["hello", *words], place, monkeypatch)
    assert hello == "HH EH1 L OW0" and len(set(others)) > 190 and len(long.split()) == 20
