"""`hibachi verify` as a command: what it takes, what it says, its exit status."""

import json
import re

import pytest

from hibachi import ConfigError
from hibachi.cli.verify import ids, token

from ..lib.command import called

MODELS = '''
import numpy as np

class Sums:
    """Good."""
    vocab_size = 10
    def logits(self, tokens, lengths):
        real = np.arange(tokens.shape[1]) >= tokens.shape[1] - lengths[:, None]
        return np.eye(10, dtype="f4")[((tokens * real).sum(1) + 1) % 10]

class Leaks(Sums):
    def logits(self, tokens, lengths):
        return np.eye(10, dtype="f4")[(tokens.sum(1) + 1) % 10]

class Nearly(Sums):
    def logits(self, tokens, lengths):
        return super().logits(tokens, lengths) * np.float32(1 + 1e-6 * len(tokens))

class Doubles:
    def forward(self, x):
        return x * 2

class Frames:
    def forward(self, tokens):
        return (tokens[:, -1] + 1) % 5

def fails():
    raise RuntimeError("no weights here")

INPUTS = [[1.0, 2.0], [3.0, 5.0]]
'''


@pytest.fixture
def verify(tmp_path, capsys):
    """verify(name, *options): exit status, standard output, standard error."""
    (tmp_path / "mine.py").write_text(MODELS)

    def call(name, *options):
        model = name if not name.startswith(":") else f"{tmp_path}/mine.py{name}"
        return called(capsys, "verify", "--model", model, *options)

    return call


def test_a_good_model_exits_with_0(verify):
    status, out, err = verify(":Sums")
    assert (status, err) == (0, "") and out.endswith("No fault was found; all bits are equal.\n")


def test_a_faulty_model_exits_with_1_and_is_explained(verify):
    status, out, err = verify(":Leaks")
    assert (status, err) == (1, "")
    assert re.search(r"^FAULT  Padding leaks into the row", out, re.MULTILINE)
    assert verify(":Leaks", "--no-padding")[0] == 0


def test_json_is_for_programs(verify):
    status, out, _ = verify(":Leaks", "--json")
    found = json.loads(out)
    assert status == 1 and found["model"].endswith(":Leaks") and not found["good"]
    assert [c["key"] for c in found["causes"]] == ["padding-leaks"]


def test_exact_and_tolerance(verify):
    assert verify(":Nearly")[0] == 0
    assert verify(":Nearly", "--exact")[0] == 1
    assert verify(":Nearly", "--tolerance", "1e-9")[0] == 1


def test_the_model_that_ships_from_its_path(verify):
    status, out, _ = verify("tiny", "--batch", "2", "--chunks", "3", "--prompt", "1,2,3", "--prompt", "4,5")
    assert status == 0 and "prompts of 2 to 25" in out


@pytest.mark.slow
def test_deterministic_kernels_give_equal_bits(verify):
    status, out, _ = verify("tiny", "--backend", "jax", "--deterministic", "--batch", "3", "--chunks", "3")
    assert status == 0 and out.endswith("all bits are equal.\n")


def test_inputs_of_other_kinds(verify, tmp_path):
    options = "--feedforward", "--examples", f"{tmp_path}/mine.py:INPUTS"
    assert verify(":Doubles", *options)[0] == 0
    (tmp_path / "prompts").write_text("[[1, 2, 3]]\n[[4, 0, 1], [1, 1, 1]]\n")
    assert verify(":Frames", "--prompts", str(tmp_path / "prompts"))[0] == 0


@pytest.mark.parametrize(
    "args, says",
    [
        ([":Missing"], "has no 'Missing'"),
        ([":fails"], "could not be made: RuntimeError: no weights here"),
        ([":Frames"], "There is nothing to try"),
        ([":Sums", "--backend", "abacus"], "abacus"),
        ([":Sums", "--prompt", "1,two"], "--prompt takes token ids"),
        ([":Sums", "--prompt", "1,2", "--examples", "x:y"], "Pass one of --prompt, --prompts and --examples"),
        ([":Sums", "--prompts", "/nowhere/at/all"], "No such file"),
        ([":Sums", "--max-model-len", "4"], "takes a max_model_len >= 12"),
        ([":Sums", "--batch", "1"], "Batch sizes must be >= 2"),
        ([":Sums", "--batch", "many"], "argument --batch"),
        (["/nowhere/at/all"], "nowhere"),
    ],
)
def test_what_cannot_be_used_exits_with_2(verify, args, says):
    status, out, err = verify(*args)
    assert (status, out) == (2, "") and says in err


def test_tokens_on_the_command_line():
    assert ids("1,2,30") == [1, 2, 30]
    assert (token(None), token("3"), token("0.5")) == (None, 3, 0.5)
    assert token("1,2").tolist() == [[1, 2]] and token("nan,1e3").shape == (1, 2)
    with pytest.raises(ConfigError, match="got '1 2'"):
        ids("1 2")
    with pytest.raises(ConfigError, match="got '1;2'"):
        token("1;2")
