"""Models that are safe to batch, and settings to judge them by: toys of every rung, and those of the examples."""

from pathlib import Path

import numpy as np

from hibachi import load_backend
from hibachi.common.named import object_named
from hibachi.testing import toys

ROOT = Path(__file__).parents[2]
FRAMES = [[[1, 2, 3]], [[1, 0, 5], [3, 6, 2], [1, 1, 1]]]  # tokens of three codes
VALUES = [[[1.0, 2.0]], [[8.0, 0.0], [3.0, 6.0], [1.0, 1.0]]]
TOYS = {
    toys.Count: {"vocab_size": 10},
    toys.Halve: {"examples": VALUES},
    toys.SumTokens: {"examples": FRAMES},
    toys.SumLogits: {},
    toys.SumOwn: {},
    toys.SumOwnState: {},
    toys.SumPaged: {},
    toys.SumFrames: {"examples": FRAMES},
    toys.SumState: {},
    toys.SumBoth: {},
}


def example(name, library="numpy"):
    """A model of the examples, and settings to judge it by."""
    get = lambda what: object_named(f"{ROOT}/examples/{what}")  # noqa: E731
    if name == "custom_numpy":
        return get("custom_numpy.py:NextEvent")(get("custom_numpy.py:PATHS")), {}
    if name == "custom_torch":
        return get("custom_torch.py:Reciter")(), {"vocab_size": len(get("custom_torch.py:ALPHABET"))}
    if name == "custom_jax":
        size, width, hidden = (
            len(get("custom_jax.py:ALPHABET")),
            get("custom_jax.py:WIDTH"),
            get("custom_jax.py:HIDDEN"),
        )
        shapes = {"embed": (size, width), "hidden": (16 * width, hidden), "out": (hidden, size)}
        draw, put = np.random.default_rng(0).normal, load_backend("jax").put
        params = {name: put(draw(size=shape).astype("float32")) for name, shape in shapes.items()}
        return get("custom_jax.py:Counter")(params), {"vocab_size": size, "padding_token": 0}
    if name == "music_codebooks":
        tune = get("music_codebooks.py:TUNE")
        voices = [np.array([[pitch, 0, 0, 0] for pitch in part]) for part in (tune[:1], tune[16:21])]
        return get("music_codebooks.py:Round")(tune), {"examples": voices}
    if name == "time_series":
        simulate = get("time_series.py:simulate")
        return get("time_series.py:Autoregression")(simulate(500, 0)), {
            "examples": [simulate(30 + n, n) for n in (1, 2)]
        }
    if name == "recurrent_state":
        ids = [get("recurrent_state.py:ALPHABET").index(c) for c in get("recurrent_state.py:VERSE")]
        return get("recurrent_state.py:EchoState")(ids), {}
    if name == "paged_attention":
        return get("paged_attention.py:InductionHead")(load_backend(library)), {}
    x = np.random.default_rng(0).normal(size=(40, 2))
    return get("feedforward.py:Flowers")(x, x[:, 0] > 0), {"examples": list(x[:3]), "feedforward": True}
