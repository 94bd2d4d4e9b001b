"""Files with one thing changed, for tests of what reads them."""

from random import Random

NUMBERS = [0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
WORDS = [b"-1", b"1e999", b"NaN", b"null", b"[]", b"{}", b'""', b"99999999999999999999", b"true", b"\\ud800", b'"a"']
WORDS += [b"[[[[", b'"F64"', b'"../1"']


def changed(data: bytes, end: int, rng: Random) -> bytes:
    """One thing in the first `end` bytes is another, or the file ends somewhere, or goes on."""
    out, at = bytearray(data), rng.randrange(end)
    match rng.randrange(10):
        case 0:
            out[at] ^= 1 << rng.randrange(8)
        case 1:
            out[:8] = rng.choice(NUMBERS).to_bytes(8, "little")
        case 2:
            del out[at : at + rng.randrange(1, 40)]
        case 3:
            out[at:at] = out[(other := rng.randrange(end)) : other + rng.randrange(1, 60)]
        case 4:
            del out[rng.randrange(len(out)) :]
        case 5:
            out += rng.randbytes(rng.randrange(1, 100))
        case 6 | 7:  # a number in binary
            size = rng.choice((1, 4, 8))
            out[at : at + size] = (rng.choice(NUMBERS) % 2 ** (8 * size)).to_bytes(size, "little")
        case _:  # a number or a word of a text
            ends = [i for i in range(at, end) if out[i] in b',:]}"['][:2]
            if len(ends) == 2:
                out[ends[0] + 1 : ends[1]] = rng.choice([*WORDS, str(rng.choice(NUMBERS)).encode()])
    return bytes(out)
