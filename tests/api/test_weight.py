"""Bodies of very many values are refused before they are read; large ones of few values are not."""

import gc
import json
import random
import time

import msgspec
import pytest

from hibachi.llm.dialects import json_limits as weight
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.json_limits import DEEPEST, LIGHT, MOST, check_packed_weight, check_weight, may_be_deep
from hibachi.llm.dialects.openai.bodies import ChatBody, CompletionBody, read


def weighed(value):
    """The same of a value that was read."""
    if isinstance(value, str):
        return 4
    if isinstance(value, list):
        return 3 + sum(map(weighed, value)) + max(len(value) - 1, 0)
    if isinstance(value, dict):
        return 3 + sum(8 + weighed(each) for each in value.values()) + max(len(value) - 1, 0)
    return 0


def drawn(rng, depth):
    luck = rng.random()
    if depth == 0 or luck < 0.3:
        return "".join(rng.choice('\\"a,[{:\n') for _ in range(rng.randrange(9)))
    if luck < 0.4:
        return rng.randrange(99)
    if luck < 0.7:
        return [drawn(rng, depth - 1) for _ in range(rng.randrange(5))]
    return {drawn(rng, 0): drawn(rng, depth - 1) for _ in range(rng.randrange(5))}


def test_values_are_counted_and_texts_are_not_looked_into(monkeypatch):
    rng = random.Random(0)
    for _ in range(500):
        value = drawn(rng, 4)
        body, own = json.dumps(value).encode(), weighed(value)
        monkeypatch.setattr(weight, "_PIECE", rng.choice((1, 2, 3, 7, 50, 9999)))
        monkeypatch.setattr(weight, "MOST", own)
        check_weight(body)
        monkeypatch.setattr(weight, "MOST", own - 1)
        with pytest.raises(Refused, match="too many values"):
            check_weight(body)


def depth(value):
    held = value if isinstance(value, list) else value.values() if isinstance(value, dict) else None
    return 0 if held is None else 1 + max(map(depth, held), default=0)


def test_the_depth_is_found_and_texts_are_not_looked_into(monkeypatch):
    rng = random.Random(1)
    for _ in range(500):
        value = [drawn(rng, 9)]
        body, own = json.dumps(value).encode(), depth(value)
        monkeypatch.setattr(weight, "_PIECE", rng.choice((1, 2, 3, 7, 50, 9999)))
        monkeypatch.setattr(weight, "_SOME", rng.choice((1, 2, 7, 32)))
        monkeypatch.setattr(weight, "DEEPEST", own)
        check_weight(body)
        monkeypatch.setattr(weight, "DEEPEST", own - 1)
        assert may_be_deep(body)
        with pytest.raises(Refused, match="nested too deep") as e:
            check_weight(body)
        assert e.value.status == 400


def test_bodies_of_few_brackets_are_not_looked_at():
    wide = b'{"a": [' + b",".join([b"[]"] * (DEEPEST - 2)) + b"]}"
    assert not may_be_deep(wide) and may_be_deep(wide + b"[")
    check_weight(b"[" + wide * 9)


MANY = 16 << 20
FINE = {
    "a prompt of a million tokens": lambda: json.dumps({"prompt": [i % 100_000 for i in range(10**6)]}),
    "16 MB of text": lambda: json.dumps({"prompt": "It is a truth, [universally], {acknowledged} " * (MANY // 46)}),
    "16 MB of JSON in a text": lambda: json.dumps({"prompt": '{"a": [1, "b"]}, ' * (MANY // 22)}),
    "16 MB of backslashes": lambda: json.dumps({"prompt": "\\" * (MANY // 2 - 40)}),
}


@pytest.mark.parametrize("body", FINE.values(), ids=FINE.keys())
def test_large_bodies_of_few_values_are_taken(body):
    data = body().encode()
    check_weight(data)
    assert read(CompletionBody, data).prompt


UNITS = ["[]", "{}", "[[[[]]]]", '"a"', '{"a":1}', "1", '"é"', '""']


@pytest.mark.parametrize("unit", UNITS)
def test_what_is_taken_is_read_soon_and_more_is_refused(unit):
    def body(n):
        return b'{"messages":[],"metadata":[' + b",".join([unit.encode()] * n) + b"]}"

    n = MOST // (weighed(json.loads(unit)) + 1)
    with pytest.raises(Refused) as e:
        check_weight(body(n + 9))
    assert e.value.status == 413 and e.value.code == "body_too_large"
    data = body(n - 99)
    check_weight(data)
    assert LIGHT < len(data) < MANY
    took = []
    for _ in range(3):
        began = time.thread_time()
        read(ChatBody, data)
        took.append(time.thread_time() - began)
    assert min(took) < 0.3, f"others would wait for {min(took):.2f} s"  # 0.03 to 0.1 s on two busy cores


def numbers(value):
    """What a value of msgpack weighs."""
    if isinstance(value, str):
        return 4
    if isinstance(value, list):
        return 3 + sum(map(numbers, value))
    if isinstance(value, dict):
        return 3 + sum(numbers(name) + numbers(each) for name, each in value.items())
    return 1


LEAVES = [None, True, 0, 127, 128, 300, 2**17, 2**33, 2**63, -1, -32, -33, -200, -40_000, -(2**33), 1.5]
LEAVES += [kind(n * b"]") for kind in (bytes, bytes.decode) for n in (0, 31, 32, 255, 256, 70_000)]
LEAVES += [msgspec.msgpack.Ext(1, b"a" * n) for n in (1, 2, 3, 4, 8, 16, 17, 256, 70_000)]


def any_of_msgpack(rng, depth):
    if depth and rng.random() < 0.6:
        some = [any_of_msgpack(rng, depth - 1) for _ in range(rng.choice((0, 1, 3, 15, 16, 40)))]
        return some if rng.random() < 0.6 else {f"{i}": each for i, each in enumerate(some)}
    return rng.choice(LEAVES)


def test_values_of_msgpack_are_counted_and_bytes_are_not_looked_into(monkeypatch):
    rng = random.Random(0)
    monkeypatch.setattr(weight, "_STEPS", 7)
    for _ in range(300):
        value = any_of_msgpack(rng, 3)
        body, own = msgspec.msgpack.encode(value), numbers(value)
        monkeypatch.setattr(weight, "MOST", own)
        check_packed_weight(body)
        check_packed_weight(body[: rng.randrange(len(body) + 1)])  # cut off: its reader says so
        monkeypatch.setattr(weight, "MOST", own - 1)
        with pytest.raises(Refused, match="too many values"):
            check_packed_weight(body)


def test_large_lists_of_msgpack():
    check_packed_weight(msgspec.msgpack.encode({"prompt": list(range(10**6))}))
    check_packed_weight(msgspec.msgpack.encode({"prompt": {"data": b"\x90" * MANY}}))
    check_packed_weight(b"\xc1" * 1000)
    for unit in (b"\x90", b"\x80", b"\xa0", b"\x91" * 30 + b"\x01"):
        with pytest.raises(Refused, match="too many values"):
            check_packed_weight(b"\x81\xa6prompt\xdd" + (2**24).to_bytes(4, "big") + unit * (MANY // len(unit)))


def test_garbage_is_collected_again_whatever_was_read():
    assert gc.isenabled()
    read(CompletionBody, b'{"prompt": "' + b"a" * LIGHT + b'"}')
    with pytest.raises(Refused):
        read(CompletionBody, b'{"prompt": "' + b"a" * LIGHT)
    assert gc.isenabled()
