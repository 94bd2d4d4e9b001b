"""Level 0 on the host adds tokens to what it showed its model last: nobody notices, whoever comes, goes or writes."""

import ctypes
import logging

import numpy as np
import pytest

from hibachi import AutoregressiveBatchInference, ModelError, NumpyBackend
from hibachi.engine.runners import uncached
from hibachi.engine.runners.kept_inputs import Room, Rooms, wants_own
from hibachi.engine.runners.tokentable import TokenHistory, TokenKind, TokenTable
from hibachi.engine.scheduler.sequence import Seq

PROMPTS = [[1.0], [2.0, 3.0], [5.0, 1.0, 4.0], [7.0] * 20]
NEW = [60, 33, 47, 58]


class Weighed:
    """Its next token depends on every token and its place, counted from the right."""

    max_model_len = 200

    def __init__(self):
        self.shown = []  # (the array itself, as it was)
        self.calls = 0

    def forward(self, tokens, lengths):
        self.calls += 1
        self.shown.append((tokens, tokens.copy()))
        return self.next(tokens, lengths)

    def next(self, tokens, lengths):
        at = np.arange(tokens.shape[1])[None] >= tokens.shape[1] - lengths[:, None]
        return np.fmod((np.where(at, tokens, 0) * np.arange(tokens.shape[1], 0, -1)).sum(axis=1), 11.0)


class Writes(Weighed):
    """Writes into what it is shown, from its call number `late` on."""

    late = 0

    def next(self, tokens, lengths):
        out = super().next(tokens, lengths)
        if self.calls > self.late:
            tokens[...] = -1e9
        return out


class WritesLate(Writes):
    late = 9


class Wraps(WritesLate):
    """Its own errors tell nothing."""

    def next(self, tokens, lengths):
        try:
            return super().next(tokens, lengths)
        except ValueError as e:
            raise RuntimeError("no luck") from e


class Pointer(Weighed):
    """Reads memory from the first number on, as a library in C does that is told an address and a shape."""

    def next(self, tokens, lengths):
        whole = tokens if tokens.base is None else tokens.base
        return super().next(np.resize(whole, tokens.shape), lengths)


class SameMemory(Pointer):
    """Writes all its outputs into one array."""

    def next(self, tokens, lengths):
        found = super().next(tokens, lengths)
        if self.calls == 1:
            self.out = np.zeros(8)
        self.out[: len(found)] = found
        return self.out[: len(found)]


class Address(Weighed):
    """Writes where it is told that numbers are, whatever NumPy says of them, as PyTorch does."""

    def next(self, tokens, lengths):
        out = super().next(tokens, lengths)
        ctypes.c_double.from_address(tokens.ctypes.data).value = -1e9
        return out


class Former(Weighed):
    """Writes into what it was shown before."""

    def next(self, tokens, lengths):
        if self.calls > 1:
            self.given[...] = -1
        self.given = tokens
        return super().next(tokens, lengths)


class OnePiece(Weighed):
    def next(self, tokens, lengths):
        if self.calls > 9 and not tokens.flags.c_contiguous:
            raise ValueError("ndarray is not C-contiguous")
        return super().next(tokens, lengths)


class Afterwards(Weighed):
    """Gives a view of what it was shown, as a token."""

    def next(self, tokens, lengths):
        return tokens[:, -1]


class Held(Weighed):
    async def forward(self, tokens, lengths):
        return super().forward(tokens, lengths)


class FailsOnce(Weighed):
    """With a view: a call that is made only to compare may not fail."""

    failed = False

    def next(self, tokens, lengths):
        if self.calls >= 20 and not self.failed and not tokens.flags.writeable:
            self.failed = True
            raise ValueError("once")
        return super().next(tokens, lengths)


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """However small a call is."""
    monkeypatch.setattr(uncached, "WORTH", 0)


@pytest.fixture
def batches(monkeypatch):
    """Of each batch that is put together from the table of all tokens: its rows."""
    made, put_together = [], TokenTable.window

    def counted(self, rows, *rest):
        made.append(len(rows))
        return put_together(self, rows, *rest)

    monkeypatch.setattr(TokenTable, "window", counted)
    return made


def plain(model, prompt, new):
    """A loop of one's own."""
    tokens = list(prompt)
    for _ in range(new):
        shown = np.array([tokens])
        tokens.append(float(Weighed.next(model, shown, np.array([len(tokens)]))[0]))
    return tokens[len(prompt) :]


def rooms_of(engine):
    return engine.core.runner.rooms


MODELS = [Weighed, Writes, WritesLate, Wraps, Pointer, SameMemory, Address, Former, OnePiece, Held, FailsOnce]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("padding", [-5.0, None])
@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_a_plain_loop(serve, model, padding, deterministic):
    mine = model()
    one = serve(mine, padding_token=padding, max_num_seqs=3, deterministic=deterministic)
    streams = [one.run(prompt, max_tokens=n) for prompt, n in zip(PROMPTS * 2, NEW * 2, strict=True)]
    for prompt, n, stream in zip(PROMPTS * 2, NEW * 2, streams, strict=True):
        assert [float(t) for t in stream.collect()] == plain(Weighed(), prompt, n)
    assert getattr(mine, "failed", True)
    if model not in (Pointer, SameMemory, OnePiece):  # which can do with calls of one row, as these are in one piece
        assert rooms_of(one).useful == (model in (Weighed, Held, FailsOnce))


@pytest.mark.parametrize("model", [Weighed, WritesLate])
def test_what_a_model_keeps_of_its_inputs_does_not_change(serve, model):
    mine = model()
    mine.next, inner = lambda *shown: inner(*shown).copy(), mine.next
    one = serve(mine, padding_token=-5.0, max_num_seqs=3)
    for stream in [one.run(prompt, max_tokens=n) for prompt, n in zip(PROMPTS, NEW, strict=True)]:
        stream.collect()
    kept = mine.shown[: mine.late if model is WritesLate else None]
    assert len(kept) > 8 and all(np.array_equal(array, then) for array, then in kept)


def test_nobody_can_write_into_a_view_by_its_flag_either(serve):
    class Forces(Weighed):
        def next(self, tokens, lengths):
            tokens.flags.writeable = True
            return super().next(tokens, lengths)

    model = Forces()
    one = serve(model, padding_token=-5.0)
    assert [float(t) for t in one.run(PROMPTS[2], max_tokens=9).collect()] == plain(model, PROMPTS[2], 9)
    assert not rooms_of(one).useful


def test_a_batch_is_put_together_only_when_rows_come_or_go(serve, batches):
    one = serve(Weighed(), padding_token=-5.0, max_num_seqs=4)
    one.run(PROMPTS[1], max_tokens=100).collect()
    assert batches == [1]
    streams = [one.run(prompt, max_tokens=100) for prompt in PROMPTS[:2]]
    assert [len(stream.collect()) for stream in streams] == [100, 100]
    assert len(batches) <= 4


def test_small_calls_get_arrays_of_their_own(serve, monkeypatch):
    monkeypatch.setattr(uncached, "WORTH", 8 * 10 * 1)
    model = Weighed()
    serve(model, padding_token=-5.0).run(PROMPTS[0], max_tokens=15).collect()
    assert [array.flags.writeable for array, _ in model.shown] == [True] * 9 + [True, True] + [False] * 5


def test_frames_of_an_odd_dtype_and_bools(serve):
    class Shifted:
        max_model_len = 100

        def forward(self, tokens):
            return np.roll(tokens[:, -1], 1, axis=1) ^ tokens[:, 0]

    one = serve(Shifted())
    for prompt in (np.array([[True, False, False]]), np.array([[1, 2, 3], [4, 5, 6]], np.uint16)):
        tokens = list(prompt)
        for token in one.run(prompt, max_tokens=40):
            tokens.append(np.roll(tokens[-1], 1) ^ tokens[0])
            assert token.dtype == prompt.dtype and np.array_equal(token, tokens[-1])
    assert rooms_of(one).useful


def test_a_reader_who_writes_into_a_token_changes_nothing(serve):
    one = serve(Afterwards(), padding_token=-5.0)
    for token in one.run(PROMPTS[2], max_tokens=20):
        assert float(token) == 4.0
        token[...] = 3.0


def test_an_item_keeps_no_more_than_the_tokens_of_its_step(serve):
    items = serve(Afterwards(), padding_token=-5.0).run(PROMPTS[2], max_tokens=20).collect()
    assert all(item.base is None or item.base.size == 1 for item in items)


def test_a_bad_request_beside_innocents_harms_nobody(serve):
    """Steps are cut in halves until the guilty one is found, and go on together."""

    class Chokes(Weighed):
        def next(self, tokens, lengths):
            if (tokens[:, -1] == 0).any():
                raise ValueError("zero")
            return super().next(tokens, lengths)

    guilty, fine = [4.0, 0.0], [3.0, 0.5, 0.25]
    want = plain(Weighed(), fine, 12)
    assert 0 not in want
    one = serve(Chokes(), padding_token=-5.0, max_num_seqs=4)
    streams = [one.run(prompt, max_tokens=12) for prompt in (fine, guilty, fine)]
    with pytest.raises(ModelError, match="zero"):
        streams[1].collect()
    assert [[float(t) for t in s.collect()] for s in (streams[0], streams[2])] == [want, want]
    assert rooms_of(one).useful


def test_a_model_that_writes_is_told_of_once(serve, caplog):
    caplog.set_level(logging.INFO, logger="hibachi.engine")
    one = serve(WritesLate(), padding_token=-5.0)
    for prompt in PROMPTS[:2]:
        one.run(prompt, max_tokens=30).collect()
    assert [record.message for record in caplog.records if "copy" in record.message] == [
        "WritesLate.forward gets a copy of all tokens in each step: it writes into them, or needs them in one piece"
    ]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.parametrize("stop", [None, lambda batch: batch >= 0])
def test_nothing_is_kept_when_all_have_ended(serve, stop):
    one = serve(Weighed(), padding_token=-5.0)
    one.run(PROMPTS[2], max_tokens=9, stop_rule=stop).collect()
    assert one.drain(10) and not len(rooms_of(one))


def test_what_a_cancelled_request_leaves_goes_with_the_next_steps(serve):
    one = serve(Weighed(), padding_token=-5.0)
    next(one.run(PROMPTS[3], max_tokens=150))
    one.run(PROMPTS[0], max_tokens=3).collect()
    assert one.drain(10) and len(rooms_of(one)) <= 1


@pytest.mark.parametrize("lost", [lambda runner: runner.adopt(None), lambda runner: runner.rebuild(keep=False)])
def test_another_scheduler_or_device_begins_anew(serve, lost):
    one = serve(Weighed())
    ask(rooms_of(one), seqs(0), [2])
    lost(one.core.runner)
    assert not len(rooms_of(one))


class Device(NumpyBackend):
    asynchronous = True


class Foreign(NumpyBackend):
    def owns(self, t):
        return False


@pytest.mark.parametrize("library", [Device, Foreign])
def test_where_the_library_has_arrays_of_its_own_there_are_no_rooms(library):
    assert not Rooms(library(), "forward", useful=True).useful
    assert not Rooms(NumpyBackend(), "forward", useful=False).useful
    assert Rooms(NumpyBackend(), "forward", useful=True).useful


# ---- rooms by themselves -----------------------------------------------------------------------------------------


def seqs(*numbers, end=100):
    found = [Seq(1, None, number=number) for number in numbers]
    for seq in found:
        seq.end = end
    return found


def ask(rooms, who, lengths, width=None, newest=9.0):
    """What is shown; tokens that are put together are zeros."""
    lengths = np.array(lengths)

    def fill(out):
        out[...] = 0.0

    return rooms.tokens(
        who,
        lengths,
        width or int(lengths.max()),
        TokenKind((), np.dtype(np.float64)),
        lambda: np.full(len(lengths), newest),
        fill,
    )


@pytest.fixture
def rooms():
    """Of two rows, after a step of lengths 2 and 3."""
    rooms = Rooms(NumpyBackend(), "forward", useful=True)
    ask(rooms, seqs(4, 6), [2, 3])
    rooms.begin()
    return rooms


def test_the_next_step_gets_one_token_more_and_the_same_again_the_same(rooms):
    assert ask(rooms, seqs(4, 6), [2, 3]).tolist() == [[0, 0, 0]] * 2
    assert ask(rooms, seqs(4, 6), [3, 4]).tolist() == [[0, 0, 0, 9]] * 2
    assert ask(rooms, seqs(4, 6), [3, 4]).tolist() == [[0, 0, 0, 9]] * 2  # tried again in the same step
    rooms.begin()
    assert ask(rooms, seqs(4, 6), [4, 5], 4, newest=8.0).tolist() == [[0, 0, 9, 8]] * 2


@pytest.mark.parametrize(
    ("who", "lengths", "width"),
    [
        ([4, 6], [4, 5], 5),
        ([4, 6], [3, 4], 5),  # needs padding
        ([4], [3], 3),
        ([4, 7], [3, 4], 4),
        ([6, 4], [3, 4], 4),
        ([4, 6], [3, 4, 4], 4),  # filled up with another row
    ],
)
def test_else_all_is_put_together(rooms, who, lengths, width):
    assert ask(rooms, seqs(*who), lengths, width).tolist() == [[0] * width] * len(lengths)


def test_what_is_older_than_a_step_is_gone(rooms):
    rooms.begin()
    assert ask(rooms, seqs(4, 6), [3, 4]).tolist() == [[0] * 4] * 2


def test_the_newest_token_may_have_left_the_table(serve):
    """A row that comes back with more tokens than the table holds has all of them in its history."""
    tables = serve(Weighed(), token=1.0).core.runner.tables
    history = TokenHistory(np.arange(2000.0))
    tables.fill(0, TokenKind((), np.dtype(np.float64)), history)
    row, newest = np.zeros(1, np.intp), np.array([1999])
    assert tables.at(0).packed(row, newest, np.ones(1, np.intp), row, newest).tolist() == [1999.0]


@pytest.mark.parametrize("most", [0, 1, 5, 1000])
def test_a_room_grows_and_has_no_more_than_will_come(most):
    room = Room((2, 3), np.float64, np.array([3, 3]), most)
    room.tokens[...] = [[0, 1, 2], [3, 4, 5]]
    for n in range(40):
        room.add(np.array([n, n]), max(most - n, 1))
    assert room.view(43).tolist() == [[0, 1, 2, *range(40)], [3, 4, 5, *range(40)]]
    assert room.view(44) is None and room.lengths.tolist() == [43, 43]
    assert room.columns <= max(43 * 2, 3 + most)


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("assignment destination is read-only", True),
        ("Cannot modify readonly array: 3", True),
        ("The given NumPy array is not writable", True),
        ("cannot set WRITEABLE flag to True of this array", True),
        ("ndarray is not C-contiguous", True),
        ("zero", False),
    ],
)
def test_which_errors_tell_that_a_view_will_not_do(text, own):
    assert wants_own(ValueError(text)) == own
    circle = RuntimeError("no luck")
    circle.__cause__ = ValueError(text)
    circle.__cause__.__context__ = circle
    assert wants_own(circle) == own


def alone(model, **options):
    with AutoregressiveBatchInference(model, backend="numpy", max_model_len=50, **options) as engine:
        return [float(t) for t in engine.run(PROMPTS[2], max_tokens=12).collect()]


def test_a_model_that_answers_nonsense_to_its_first_call_is_tried_at_the_next():
    class Nonsense(Weighed):
        def next(self, tokens, lengths):
            return None if self.calls == 1 else super().next(tokens, lengths)

    assert alone(Nonsense()) == alone(Weighed())
