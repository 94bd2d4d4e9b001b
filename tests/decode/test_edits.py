"""Changes of a row's logits, against the slow definition."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hibachi.backend.masks import packed
from hibachi.engine.sampling.edits import add_bias, penalise

from .libraries import INF, LIBRARIES, every_library, host
from .reference import edited

ROWS = np.array([[0.5, -2.0, 3.0, -INF, 0.0], [1.0, 1.0, -1.0, 4.0, -0.5]], np.float32)


@every_library
def test_only_what_is_kept_is_left(library):
    kept = np.stack([packed([0, 2, 3], 5), packed(range(5), 5)])
    logits = library.put(ROWS[::-1].copy())
    found, finite = map(library.get, library.kept_rows(logits, np.array([1, 0], np.int32), kept))
    np.testing.assert_array_equal(found[0], edited(ROWS[0], allowed_token_ids=[0, 2, 3]))
    np.testing.assert_array_equal(found[1], ROWS[1])
    assert found.dtype == np.float32 and finite.tolist() == [True, True]


@every_library
def test_biases_are_added_to_their_tokens(library):
    ids = np.array([[2, 0, 3, 2], [4, 4, 4, 4]], np.int32)  # lists are padded by repeating an entry
    bias = np.array([[1.5, -INF, 7, 1.5], [-100, -100, -100, -100]], np.float32)
    found = host(library, add_bias, ROWS, ids, bias)
    np.testing.assert_array_equal(found[0], [-INF, -2, 4.5, -INF, 0])
    np.testing.assert_array_equal(found[1], edited(ROWS[1], logit_bias={4: -100}))


tokens = st.integers(0, 6)


@settings(max_examples=200, deadline=None)
@given(
    row=st.lists(st.sampled_from([-INF, -3.0, -0.25, 0.0, 0.5, 8.0]), min_size=7, max_size=7),
    prompt=st.lists(tokens, max_size=6),
    output=st.lists(tokens, max_size=9),
    repetition=st.sampled_from([0.5, 1.0, 1.3, 2.0]),
    presence=st.sampled_from([-2.0, 0.0, 0.7, 2.0]),
    frequency=st.sampled_from([-2.0, 0.0, 0.3, 2.0]),
    name=st.sampled_from(["numpy", "torch"]),
)
def test_penalties_are_those_of_the_definition(row, prompt, output, repetition, presence, frequency, name):
    seen = sorted({*prompt, *output}) or [0]
    counts = np.array([output.count(t) for t in seen], np.float32)
    factor = np.full(len(seen), repetition if prompt or output else 1, np.float32)
    minus = np.float32(frequency) * counts + np.float32(presence) * (counts > 0)
    row = np.array([row], np.float32)
    found = host(LIBRARIES[name], penalise, row.copy(), np.array([seen], np.int32), factor[None], minus[None])
    options = dict(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    np.testing.assert_allclose(found[0], edited(row[0], prompt, output, **options), rtol=1e-5, atol=1e-6)
