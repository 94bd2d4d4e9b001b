"""`hibachi.ray` without Ray: what is computed of blocks, and what is refused. With Ray: tests/install/test_ray.py."""

import asyncio
import json
import sys
from types import ModuleType

import numpy as np
import pytest

import hibachi.offline
import hibachi.ray
from hibachi.errors import ConfigError, EngineFailed, InvalidModelFiles, MissingExtra
from hibachi.offline import Columns

SETTINGS = {"backend": "numpy", "max_num_seqs": 4}
COLUMNS = Columns(prompt="text", params={"ignore_eos": True}, param_columns={"max_tokens": "limit", "temperature": "t"})


def objects(values):
    found = np.empty(len(values), object)
    found[:] = values
    return found


def block(numbers):
    """Rows of which every fifth has no text. Where a limit is missing, NumPy has NaN."""
    return {
        "id": np.array(numbers),
        "text": objects([None if n % 5 == 4 else f"Chapter {n}." for n in numbers]),
        "limit": np.array([np.nan if n % 3 == 0 else n + 1 for n in numbers]),
        "t": np.array([float(n % 2) for n in numbers]),
    }


@pytest.fixture
def generate():
    made = []

    def make(**more):
        made.append(hibachi.ray.Generate(**{"settings": SETTINGS, "columns": COLUMNS, **more}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def computed(generate, *blocks):
    """The rows of several blocks in flight at once."""

    async def all_at_once():
        return await asyncio.gather(*[generate(block) for block in blocks])

    rows = []
    for one in asyncio.run(all_at_once()):
        columns = {name: column.tolist() for name, column in one.items()} if isinstance(one, dict) else one.to_pydict()
        rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return rows


def results(row):
    return {name: value for name, value in row.items() if name not in ("text", "limit", "t")}


def test_a_row_has_the_same_answer_in_any_block_and_beside_any_row_that_fails(generate, tmp_path):
    together = computed(generate(), block(range(20)))
    apart = computed(generate(), block([19, 3, 3, 4]), *[block([n]) for n in range(20)])
    for row, same in zip(apart, [together[n] for n in (19, 3, 3, 4, *range(20))], strict=True):
        assert results(row) == results(same)
    assert [r["id"] for r in together if r["error"] is not None] == [4, 9, 14, 19]
    assert all(("has no 'text'" in r["error"]) == (r["output"] is None) for r in together if r["error"])
    assert [r["completion_tokens"] for r in together[:4]] == [16, 2, 3, 16]

    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    greedy = [r for r in together if r["t"] == 0 and r["error"] is None]
    given = [{"text": r["text"], "limit": None if r["id"] % 3 == 0 else int(r["limit"]), "t": 0} for r in greedy]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in given))
    hibachi.offline.run(file, out, columns=COLUMNS, settings={**SETTINGS, "engine": "own"})
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [results(r) for r in greedy] == [{"id": r["id"], **results(w)} for r, w in zip(greedy, written, strict=True)]

    pa = pytest.importorskip("pyarrow")
    limits = [None if n % 3 == 0 else n + 1 for n in range(20)]
    table = pa.table({**block(range(20)), "limit": pa.array(limits), "text": [r["text"] for r in together]})
    assert [results(row) for row in computed(generate(), table)] == [results(row) for row in together]


def test_a_seed_is_of_the_row_and_lists_and_nested_values_are_read(generate):
    columns = Columns(tokens="ids", params={"max_tokens": 6, "logprobs": 1, "n": 2})
    rows = {"ids": objects([np.array([5, 6, 7]), [5, 6, 7]]), "k": np.array([1, 2])}
    one, other = computed(generate(columns=columns, token_ids=True, prefix="r_"), rows)
    assert one["r_output"] != other["r_output"], "rows that differ in anything draw apart"
    assert [len(ids) for ids in json.loads(one["r_output_token_ids"])] == [6, 6]
    assert computed(generate(columns=columns, token_ids=True, prefix="r_"), rows)[0]["r_logprobs"] == one["r_logprobs"]
    assert computed(generate(columns=columns, prefix="r_", seed=1), rows)[0]["r_output"] != one["r_output"]
    vectors = computed(generate(columns=Columns(), task="embed"), {"text": objects(["She was"])})
    assert len(vectors[0]["embedding"]) > 8 and vectors[0]["prompt_tokens"] == 2


def test_what_concerns_all_rows_is_raised(generate):
    with pytest.raises(InvalidModelFiles, match="/no/such"):
        hibachi.ray.Generate("/no/such")
    with pytest.raises(ConfigError, match="There is no setting 'max_seqs'"):
        hibachi.ray.Generate(settings={"max_seqs": 4})
    here = generate()
    with pytest.raises(ConfigError, match="no column 'limit'"):
        computed(here, {"text": objects(["a"]), "t": np.zeros(1)})
    with pytest.raises(ConfigError, match="a column 'error'"):
        computed(here, {**block([1]), "error": objects([None])})

    async def lost():
        asked = asyncio.ensure_future(here(block(range(200))))
        await asyncio.sleep(0.1)
        here.close()
        with pytest.raises(EngineFailed):
            await asked
        with pytest.raises(EngineFailed):
            await here(block([1]))

    asyncio.run(lost())


def test_serving_needs_ray_and_one_that_is_not_too_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"'ray'.*\.\[ray\]"):
        hibachi.ray.app()
    old = ModuleType("ray")
    old.__version__ = "2.9.3"
    monkeypatch.setitem(sys.modules, "ray", old)
    with pytest.raises(ConfigError, match=r"Ray 2\.60 or later; got 2\.9\.3"):
        hibachi.ray.app()
