"""TGI's events and whole answers, from tokens as they come; and TGI's own description of them."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from hibachi.engine.streams.channel import Channel
from hibachi.engine.streams.stream import ItemStream
from hibachi.errors import EngineClosed
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.openai.answers import TokenTexts, encode
from hibachi.llm.dialects.openai.bodies import Bounds, read
from hibachi.llm.dialects.tgi.answers import ChatTokenizeResponse, Info, SimpleToken, simple_tokens
from hibachi.llm.dialects.tgi.bodies import GenerateBody
from hibachi.llm.dialects.tgi.limits import TgiLimits
from hibachi.llm.dialects.tgi.parse import fit, generation
from hibachi.llm.dialects.tgi.writing import GenerateWriter, TgiTokens
from hibachi.llm.textstream import TextChoice, TextStream
from hibachi.llm.tokenizers import Detokenizer
from hibachi.llm.tokenizers.own import OwnTokenizer
from hibachi.llm.tokenizers.tokenizer import Tokenizer
from hibachi.request import Finish

from ..lib.described import description

DATA = Path(__file__).parents[1] / "data"
END, PROMPT = 2, "It is"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(DATA / "smollm2")


class Told:
    """A request whose tokens the test says. `say`: (token, its log-probability, others) ..."""

    def __init__(self, tokenizer, *, runs=1, stream=True, full_text=False, listed=False, ends=(END,), **parameters):
        if runs > 1:
            parameters |= {"best_of": runs, "do_sample": True}
        raw = json.dumps({"inputs": PROMPT, "parameters": parameters}).encode()
        given = generation(read(GenerateBody, raw), TgiLimits(), Bounds(), 500, stream=stream, full_text=full_text)
        self.ids = fit(given, tokenizer.encode(PROMPT), TgiLimits(), Bounds(), 500)
        words = TgiTokens(
            TokenTexts(tokenizer.token_bytes, lambda ids: tokenizer.decode(ids, skip_special_tokens=False)),
            tokenizer,
            ends,
            lambda seed, i: seed + i,
        )
        self.writer = GenerateWriter(given, "m", words, listed=listed)
        params = given.asked.params
        self.channels = [Channel() for _ in range(runs)]
        choices = [
            TextChoice(
                i,
                ItemStream(channel, lambda: None, lambda item: item),
                partial(Detokenizer, tokenizer, params.stop, after=self.ids, include_stop=True),
                params.logprobs is not None,
                ends=ends,
                delivers=True,
            )
            for i, channel in enumerate(self.channels)
        ]
        self.text = TextStream(PROMPT, self.ids, choices, runs)
        self.writer.ids, self.writer.streams = [self.ids], [self.text]

    def say(self, tokens, *, finish=None, run=0, score=-0.5, others=None):
        channel = self.channels[run]
        for token in tokens:
            channel.logprobs.append({token: score, **(others or {})})
            channel.buffer.append(token)
            if token == END and finish is Finish.STOP:
                channel.stop_token = token
        if finish is not None:
            channel.end(finish)

    def events(self):
        """What goes out: all that has come so far, and the end if it has."""

        async def come():
            out = []
            (choice,) = self.text.choices
            while choice.tokens.channel.ready and not choice.over:
                pieces = await self.text.come(each=self.writer.each)
                out += [self.writer.piece(p) for p in pieces]
                if choice.over:
                    out.append(self.writer.end(choice))
            return [json.loads(encode(e)) for e in out if e is not None]

        return asyncio.run(come())

    def whole(self):
        async def come():
            while await self.text.come(each=self.writer.each):
                pass

        asyncio.run(come())
        return json.loads(encode(self.writer.whole()))


# ---- events ----------------------------------------------------------------------------------------------------------


def test_an_event_a_token_and_the_text_in_the_last(tokenizer):
    """T-34: indices from 1 on; only the last event has the text, and details where they were asked for."""
    ids = tokenizer.encode(" of the nature", add_special_tokens=False)
    told = Told(tokenizer, max_new_tokens=len(ids), details=True)
    told.say(ids, finish=Finish.LENGTH)
    events = told.events()
    assert [e["index"] for e in events] == list(range(1, len(ids) + 1))
    assert [e["token"]["id"] for e in events] == ids
    assert "".join(e["token"]["text"] for e in events) == " of the nature"
    assert [e["generated_text"] for e in events] == [None] * (len(ids) - 1) + [" of the nature"]
    details = {"finish_reason": "length", "generated_tokens": len(ids), "seed": None, "input_length": len(told.ids)}
    assert [e["details"] for e in events] == [None] * (len(ids) - 1) + [details]
    assert all(e["token"]["logprob"] == -0.5 and not e["token"]["special"] and "top_tokens" not in e for e in events)


def test_events_leave_as_tokens_come(tokenizer):
    """But for the last one, which waits for the end, also if that comes a little later than its token."""
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    told = Told(tokenizer, max_new_tokens=3)
    for index in (1, 2):
        told.say([a])
        (event,) = told.events()
        assert event["index"] == index and event["generated_text"] is None
    for token, finish in ((END, Finish.STOP), (a, Finish.LENGTH)):
        late = Told(tokenizer, max_new_tokens=1 + (token == END))
        late.say([token])
        assert late.events() == []
        late.channels[0].stop_token = END if token == END else None
        late.say([], finish=finish)
        assert [e["generated_text"] for e in late.events()] == ["" if token == END else "a"]
    told.say([a], finish=Finish.LENGTH)
    (event,) = told.events()
    assert event["index"] == 3 and event["generated_text"] == "aaa" and event["details"] is None


def test_the_end_token_is_an_event_too(tokenizer):
    """Special, with its name, and counted; it is no part of the text."""
    ids = tokenizer.encode(" of", add_special_tokens=False)
    told = Told(tokenizer, details=True)
    told.say([*ids, END], finish=Finish.STOP)
    *_, last = told.events()
    assert last["token"] == {"id": END, "text": "<|im_end|>", "logprob": -0.5, "special": True}
    assert last["generated_text"] == " of"
    assert last["details"]["finish_reason"] == "eos_token" and last["details"]["generated_tokens"] == len(ids) + 1


def test_the_end_comes_before_the_length(tokenizer):
    """Which is our order, and not TGI's."""
    told = Told(tokenizer, max_new_tokens=1, details=True)
    told.say([END], finish=Finish.STOP)
    (event,) = told.events()
    assert event["details"]["finish_reason"] == "eos_token" and event["generated_text"] == ""


def test_the_text_keeps_the_stop_string(tokenizer):
    """And nothing behind it; nothing is held back for a string that may come."""
    ids = tokenizer.encode(" of the", add_special_tokens=False)
    told = Told(tokenizer, stop=[" the"], details=True)
    told.say(ids[:1])
    assert [e["token"]["text"] for e in told.events()] == [" of"]
    told.say([*ids[1:], *ids])
    *_, last = told.events()
    assert last["generated_text"] == " of the" and last["details"]["finish_reason"] == "stop_sequence"
    assert last["index"] == last["details"]["generated_tokens"] == len(ids)
    told = Told(tokenizer, stop=["h"], details=True, stream=False)
    told.say(ids, finish=Finish.LENGTH)
    answer = told.whole()
    assert answer["generated_text"] == " of th" == "".join(t["text"] for t in answer["details"]["tokens"])


def test_a_part_of_a_character_has_no_text(tokenizer):
    ids = tokenizer.encode("日", add_special_tokens=False)
    assert len(ids) > 1
    told = Told(tokenizer, max_new_tokens=len(ids))
    told.say(ids, finish=Finish.LENGTH)
    assert [e["token"]["text"] for e in told.events()] == [""] * (len(ids) - 1) + ["日"]
    told = Told(tokenizer, max_new_tokens=len(ids) - 1)
    told.say(ids[:-1], finish=Finish.LENGTH)
    events = told.events()
    assert events[-1]["generated_text"] == "".join(e["token"]["text"] for e in events) == "\ufffd"
    told = Told(tokenizer, max_new_tokens=len(ids) - 1, details=True, stream=False)
    told.say(ids[:-1], finish=Finish.LENGTH)
    answer = told.whole()
    assert "".join(t["text"] for t in answer["details"]["tokens"]) == answer["generated_text"] == "\ufffd"


def test_the_likeliest_tokens(tokenizer):
    told = Told(tokenizer, max_new_tokens=1, top_n_tokens=2)
    told.say([40], finish=Finish.LENGTH, others={END: -0.25, 41: -9.0, 42: -float("inf")})
    (event,) = told.events()
    assert [(t["id"], t["logprob"], t["special"]) for t in event["top_tokens"]] == [
        (END, -0.25, True),
        (40, -0.5, False),
    ]
    assert event["top_tokens"][0]["text"] == "<|im_end|>"


def test_what_cannot_happen_is_reported_as_tgi_does(tokenizer):
    """An end behind a token that nothing said would be the last."""
    told = Told(tokenizer, max_new_tokens=5)
    told.say([40])
    assert len(told.events()) == 1
    told.say([], finish=Finish.STOP)
    with pytest.raises(Refused, match="not known to be the last") as found:
        told.events()
    assert told.writer.dialect.error(found.value)["error_type"] == "incomplete_generation"


def test_a_text_that_was_cut_off_has_no_end(tokenizer):
    told = Told(tokenizer, max_new_tokens=5)
    told.say([40], finish=Finish.CLOSED)
    with pytest.raises(EngineClosed):
        told.events()
    told = Told(tokenizer, max_new_tokens=5)
    told.say([40])
    assert len(told.events()) == 1
    told.say([], finish=Finish.CLOSED)  # behind the last of its tokens
    with pytest.raises(EngineClosed):
        told.events()


def test_the_end_of_a_tokenizer_that_shows_it(tokenizer):
    """One's own knows of no special tokens: the end is one."""

    class Letters:
        encode = staticmethod(lambda text: [ord(c) for c in text])
        decode = staticmethod(lambda ids: "".join("." if i == END else chr(i) for i in ids))

    for stream in (True, False):
        told = Told(OwnTokenizer(Letters), stream=stream, details=True)
        told.say([97, 98, END], finish=Finish.STOP)
        answer = told.events()[-1] if stream else told.whole()
        assert answer["generated_text"] == "ab" and answer["details"]["generated_tokens"] == 3
        token = answer["token"] if stream else answer["details"]["tokens"][-1]
        assert token == {"id": END, "text": ".", "logprob": -0.5, "special": True}


# ---- whole answers ---------------------------------------------------------------------------------------------------


def test_a_whole_answer(tokenizer):
    ids = tokenizer.encode(" of", add_special_tokens=False)
    told = Told(tokenizer, stream=False)
    told.say([*ids, END], finish=Finish.STOP)
    assert told.whole() == {"generated_text": " of"}
    assert told.writer.generated == len(ids) + 1
    told = Told(tokenizer, stream=False, full_text=True, listed=True)
    told.say(ids, finish=Finish.LENGTH)
    assert told.whole() == [{"generated_text": "It is of"}]


def test_details(tokenizer):
    ids = tokenizer.encode(" of", add_special_tokens=False)
    told = Told(tokenizer, stream=False, decoder_input_details=True, top_n_tokens=1, do_sample=True, seed=7)
    told.channels[0].prompt_logprobs = [None, *({i: -1.25} for i in told.ids[1:])]
    told.say([*ids, END], finish=Finish.STOP)
    details = told.whole()["details"]
    tokens = [*((i, tokenizer.decode([i]), False) for i in ids), (END, "<|im_end|>", True)]
    rows = [{"id": i, "text": text, "logprob": -0.5, "special": special} for i, text, special in tokens]
    prefill = [{"id": i, "text": tokenizer.decode([i]), "logprob": -1.25} for i in told.ids]
    prefill[0]["logprob"] = None
    assert details == {
        "finish_reason": "eos_token",
        "generated_tokens": len(ids) + 1,
        "seed": 7,
        "prefill": prefill,
        "tokens": rows,
        "top_tokens": [[row] for row in rows],
    }


def test_the_best_of_several_has_the_best_mean(tokenizer):
    """Not the best sum: a longer one may win. Each has the seed by which it can be had again."""
    told = Told(tokenizer, runs=2, stream=False, details=True)
    told.say([40], finish=Finish.LENGTH, run=0, score=-1.0)
    told.say([41, 42, 43], finish=Finish.LENGTH, run=1, score=-0.75)
    answer = told.whole()
    (other,) = answer["details"]["best_of_sequences"]
    assert answer["generated_text"] == tokenizer.decode([41, 42, 43]) and other["generated_text"] == tokenizer.decode(
        [40]
    )
    assert answer["details"]["seed"] == told.writer.given.seed + 1 and other["seed"] == told.writer.given.seed
    assert answer["details"]["generated_tokens"] == told.writer.generated == 3 and other["generated_tokens"] == 1
    assert [t["id"] for t in other["tokens"]] == [40]


# ---- tokens of a text ------------------------------------------------------------------------------------------------


def test_places_are_bytes(tokenizer):
    """As TGI's are; tokens that share a character all stand for it."""
    for text in ("It is a truth", "Grüße 日本!", ""):
        found = simple_tokens(text, tokenizer.spans(text))
        assert [t.id for t in found] == tokenizer.encode(text)
        for t in found:
            assert text.encode()[t.start : t.stop].decode() == t.text
    assert simple_tokens("é日", [(1, 0, 1), (2, 1, 2), (3, 1, 2)])[1:] == [
        SimpleToken(2, "日", 2, 5),
        SimpleToken(3, "日", 2, 5),
    ]
    assert simple_tokens("ab", [(9, 0, 0), (1, 0, 2)]) == [SimpleToken(9, "", 0, 0), SimpleToken(1, "ab", 0, 2)]


# ---- TGI's description -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def described():
    """described(name, answer): the answer is what TGI's document calls by this name."""
    return description("tgi/openapi.json")


def test_answers_are_as_tgi_describes_them(tokenizer, described):
    told = Told(tokenizer, top_n_tokens=2, details=True, do_sample=True)
    told.say([40, END], finish=Finish.STOP, others={41: -2.0})
    for event in told.events():
        described("StreamResponse", event)
    for more in ({}, {"details": True, "top_n_tokens": 1}, {"decoder_input_details": True, "runs": 2}):
        told = Told(tokenizer, stream=False, **more)
        for run, channel in enumerate(told.channels):
            channel.prompt_logprobs = [None, *({i: -1.25} for i in told.ids[1:])]
            told.say([40], finish=Finish.LENGTH, run=run)
        described("GenerateResponse", told.whole())
    described("TokenizeResponse", json.loads(encode(simple_tokens("ab", [(1, 0, 2)]))))
    described("ChatTokenizeResponse", json.loads(encode(ChatTokenizeResponse([SimpleToken(1, "a", 0, 1)], "a"))))
    described("Info", json.loads(encode(Info("m", None, "text-generation", 1, 2, 3, 4, 5, 6, 7, "hibachi", "0"))))
    for error in (Refused("x"), Refused("x", status=500), Refused("x", code="tool_error")):
        described("ErrorResponse", told.writer.dialect.error(error))


def test_an_answer_has_the_fields_of_the_snapshot(tokenizer):
    """`test_mpt_load`, which TGI's client wrote; what it has as null may be missing here, as TGI leaves it out."""
    (snapshot,) = json.loads((DATA / "tgi" / "test_mpt_load.json").read_text())
    told = Told(tokenizer, stream=False, decoder_input_details=True, max_new_tokens=2)
    told.channels[0].prompt_logprobs = [None, *({i: -1.25} for i in told.ids[1:])]
    told.say([40, 41], finish=Finish.LENGTH)
    answer = told.whole()

    def shape(node):
        if isinstance(node, dict):
            return {name: shape(value) for name, value in node.items() if value is not None}
        return [shape(node[-1])] if isinstance(node, list) else type(node).__name__

    assert shape(answer) == shape(snapshot)
    assert snapshot["details"]["prefill"][0]["logprob"] is None is answer["details"]["prefill"][0]["logprob"]
