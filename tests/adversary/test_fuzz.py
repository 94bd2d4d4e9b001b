"""Half a minute of the fuzzer, with its solo runs, and the promise that it draws every field.

`make soak` runs it for ten minutes.
"""

import dataclasses
import inspect
import os

import pytest

from hibachi import AutoregressiveBatchInference, HibachiError

from .drawn import FIELDS, ODD, RUN
from .fuzz import fuzz
from .places import CASES
from .watch import shown

SECONDS = 9.0  # of company, for all cases together
SEED = int(os.environ.get("HIBACHI_FUZZ_SEED", "0"))
TESTED = [name for name, case in CASES.items() if not case.soak]


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_every_field_is_drawn(kind):
    fields = {field.name for field in dataclasses.fields(kind)}
    assert fields == FIELDS[kind].keys(), "drawn.FIELDS says what the fuzzer puts into each field"


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_every_value_is_taken_or_refused_in_few_words(kind):
    wrong = []
    for name, values in FIELDS[kind].items():
        for value in (*values, *ODD):
            try:
                kind(**{name: value})
            except HibachiError as e:
                if len(str(e)) > 500:
                    wrong.append(f"{name}: {len(str(e))} characters")
            except Exception as e:
                wrong.append(f"{name}={shown(value):.60}: {type(e).__name__}: {e}")
    assert not wrong, "\n".join(wrong)


def test_every_argument_is_drawn():
    taken = inspect.signature(AutoregressiveBatchInference.run).parameters.keys() - {"self"}
    assert taken == RUN.keys(), "drawn.RUN says what the fuzzer passes for each argument"


@pytest.mark.parametrize("case", TESTED)
def test_hostile_requests_change_no_bit_of_others(case):
    report, wrong = fuzz(case, SEED, SECONDS / len(TESTED))
    print(report)
    assert report.good, f"{report.short()}\n{wrong}"
