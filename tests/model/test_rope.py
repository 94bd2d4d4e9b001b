"""Rotary frequencies against those of transformers, in every way of stretching them."""

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hibachi
from hibachi.errors import InvalidModelFiles
from hibachi.llm.model import rope
from hibachi.llm.model.fields import Fields
from hibachi.llm.model.files import locate, open_files
from hibachi.llm.model.registry import load_model
from hibachi.llm.model.rope import FIRST, LongRope, Rope, read_rope, room, tables

ORIGINAL, LONGEST, DIM = 64, 256, 32
SCALINGS = {
    "linear": dict(factor=4.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL),
    "yarn": dict(factor=4.0, original_max_position_embeddings=ORIGINAL),
    "yarn, its own ramp": dict(
        factor=4.0, original_max_position_embeddings=ORIGINAL, beta_fast=16.0, beta_slow=2.0, truncate=False
    ),
    "yarn, magnitude": dict(factor=4.0, original_max_position_embeddings=ORIGINAL, attention_factor=0.8),
    "yarn, mscale": dict(factor=4.0, original_max_position_embeddings=ORIGINAL, mscale=0.7, mscale_all_dim=1.1),
    "longrope": dict(
        short_factor=[1 + i / 20 for i in range(DIM // 2)],
        long_factor=[2 + i / 5 for i in range(DIM // 2)],
        original_max_position_embeddings=ORIGINAL,
    ),
}


@pytest.mark.parametrize("length", [ORIGINAL, LONGEST])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_those_of_transformers(name, length):
    kind = name.partition(",")[0]
    parameters = dict(rope_type=kind, rope_theta=5000.0, **SCALINGS[name])
    config = transformers.LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, max_position_embeddings=LONGEST, rope_parameters=parameters
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    written = Fields(dict(rope_parameters=parameters, max_position_embeddings=LONGEST))
    cos, sin = tables(read_rope(written, DIM), length)
    assert cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos, angles.cos().numpy() * magnitude, atol=2e-5)
    np.testing.assert_allclose(sin, angles.sin().numpy() * magnitude, atol=2e-5)


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(short_factor=[1.0] * 3), "short_factor must be a list of 16 numbers > 0"),
        (dict(long_factor=[0.0] * 16), "long_factor must be a list of 16 numbers > 0"),
        (
            dict(original_max_position_embeddings=None),
            "original_max_position_embeddings must be a number > 0; got null",
        ),
    ],
)
def test_a_stretching_that_makes_no_sense_is_refused(change, says):
    parameters = dict(rope_type="longrope", **SCALINGS["longrope"]) | change
    with pytest.raises(InvalidModelFiles, match=says):
        read_rope(Fields(dict(rope_parameters=parameters, max_position_embeddings=LONGEST)), DIM)


@pytest.mark.parametrize("name", [*SCALINGS, "default"])
def test_a_position_has_the_same_bits_in_every_table(name):
    """Whatever the table's size, and wherever it goes on from."""
    parameters = dict(rope_type=name.partition(",")[0], rope_theta=5000.0, **SCALINGS.get(name, {}))
    turned = read_rope(Fields(dict(rope_parameters=parameters, max_position_embeddings=LONGEST)), DIM)
    whole = tables(turned, 5000)
    for length in (1, 7, 64, 1023, 1024, 1025, 4999):
        for start in (0, 1, 1000, 1024, 2047, length - 1):
            part = tables(turned, length, start=start, longest=5000) if start < length else whole
            for table, other in zip(part, whole, strict=True):
                expected = other[start:length] if start < length else other
                np.testing.assert_array_equal(table, expected)


def test_longrope_chooses_by_the_longest_sequence_and_not_by_the_table():
    turned = Rope(5000.0, 4, LongRope((1.0, 2.0), (3.0, 4.0), ORIGINAL, 1.0))
    short, long = tables(turned, 16), tables(turned, LONGEST)
    assert not np.array_equal(short[0], long[0][:16])
    np.testing.assert_array_equal(tables(turned, 16, longest=LONGEST)[0], long[0][:16])


def test_tables_have_few_sizes():
    assert room(1, 100) == 100 and room(1, 10**8) == FIRST
    assert {room(n, 10**6) for n in range(1, 10**6, 999)} == {FIRST * 2**i for i in range(6)} | {10**6}
    assert all(room(n, 10**6) >= n for n in (1, FIRST, FIRST + 1, 10**6))


def test_a_model_is_ready_for_positions_that_it_is_told_of(monkeypatch):
    monkeypatch.setattr(rope, "FIRST", 16)
    model = load_model(open_files(locate("tiny")), hibachi.load_backend("numpy"))
    ((first, _),) = model.params["ropes"]
    for positions, size in [(16, 16), (17, 32), (20, 32), (10**9, model.max_model_len)]:
        model.reach(positions)
        ((table, _),) = model.params["ropes"]
        assert len(table) == size and (table[:16] == first).all()
