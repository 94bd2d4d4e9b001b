"""A decoder as ONNX, in onnxruntime: keys and values go in and come out, as in graphs that are exported for generation.

In the checkout, in an environment of its own:

    pip install ".[serve]" "onnx>=1.17" "onnxruntime>=1.20"
    python examples/gallery/onnx_gpt.py
    hibachi serve examples/gallery/onnx_gpt.py:Gpt
    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: application/json" \\
        -d '{"prompt": [1, 2, 3], "temperature": 0}'

The class is for the rung between levels 1 and 2; arrays are NumPy's. The graph is written below in ONNX's text form,
and its weights are random. A file that somebody exported has the same inputs, perhaps in another order:
`onnxruntime.InferenceSession("model.onnx")`.
"""

import numpy as np
import onnx
import onnxruntime
from side_by_side import arguments, compare, work

import hibachi

VOCAB, LONGEST = 1000, 256
SIZES = {"tiny": (32, 2, 2), "real": (512, 6, 8)}  # width, layers, heads


class Gpt:
    backend, vocab_size, max_model_len, past = "numpy", VOCAB, LONGEST, hibachi.OwnCache()

    def __init__(self, session=None):
        self.session = session or network("tiny")

    def step(self, tokens, lengths, past):
        width = tokens.shape[1] + (past[0].shape[2] if past else 0)
        place = np.arange(width) - (width - lengths[:, None])  # of each position in its row, below 0 for padding
        logits, *past = run(self.session, tokens, place >= 0, place[:, -tokens.shape[1] :].clip(0), past)
        return logits[:, -1], past


def run(session, tokens, mask, places, past):
    """What the graph returns: logits (rows, new, vocab), then keys and values of each layer. past: those before it."""
    names = [each.name for each in session.get_inputs()]
    if past is None:
        _, heads, _, dim = session.get_inputs()[-1].shape
        past = [np.zeros((len(tokens), heads, 0, dim), np.float32)] * (len(names) - 3)
    given = [array.astype(np.int64) for array in (tokens, mask, places)]
    return session.run(None, dict(zip(names, [*given, *past], strict=True)))


GRAPH = """
<ir_version: 9, opset_import: ["": 20]>
gpt (int64[rows, new] input_ids, int64[rows, all] attention_mask, int64[rows, new] position_ids, {before})
=> (float[rows, new, {vocab}] logits, {after}) {{
  new = Shape <start = 1, end = 2> (input_ids)
  all = Shape <start = 1, end = 2> (attention_mask)
  past = Sub (all, new)
  first = Squeeze (past)
  end = Squeeze (all)
  keys = Range (zero, end, one)
  queries = Range (first, end, one)
  column = Unsqueeze (queries, one)
  later = Less (column, keys)
  mask = Unsqueeze (attention_mask, inner)
  padding = Equal (mask, zero)
  hidden = Or (padding, later)
  bias = Where (hidden, lowest, nothing)
  token = Gather (embed, input_ids)
  place = Gather (places, position_ids)
  x0 = Add (token, place)
  {layers}
  y = LayerNormalization (x{n}, ones)
  logits = MatMul (y, head)
}}
"""
LAYER = """
  a{i} = LayerNormalization (x{i}, ones)
  {projections}
  key{i} = Concat <axis = 2> (past_key{i}, k{i})
  value{i} = Concat <axis = 2> (past_value{i}, v{i})
  turned{i} = Transpose <perm = [0, 1, 3, 2]> (key{i})
  product{i} = MatMul (q{i}, turned{i})
  score{i} = Add (product{i}, bias)
  share{i} = Softmax (score{i})
  mixed{i} = MatMul (share{i}, value{i})
  side{i} = Transpose <perm = [0, 2, 1, 3]> (mixed{i})
  joined{i} = Reshape (side{i}, whole)
  out{i} = MatMul (joined{i}, out_weight{i})
  b{i} = Add (x{i}, out{i})
  c{i} = LayerNormalization (b{i}, ones)
  up{i} = MatMul (c{i}, up_weight{i})
  curved{i} = Gelu (up{i})
  down{i} = MatMul (curved{i}, down_weight{i})
  x{j} = Add (b{i}, down{i})
"""
PROJECTION = """
  long_{p}{i} = MatMul (a{i}, {p}_weight{i})
  cut_{p}{i} = Reshape (long_{p}{i}, apart)
  {p}{i} = Transpose <perm = [0, 2, 1, 3]> (cut_{p}{i})
"""


def network(size):
    """A session with random weights."""
    (width, layers, heads), random = SIZES[size], np.random.default_rng(0)
    dim, of = width // heads, [(i, kind) for i in range(layers) for kind in ("key", "value")]
    text = GRAPH.format(
        vocab=VOCAB,
        n=layers,
        before=", ".join(f"float[rows, {heads}, before, {dim}] past_{kind}{i}" for i, kind in of),
        after=", ".join(f"float[rows, {heads}, all, {dim}] {kind}{i}" for i, kind in of),
        layers="".join(
            LAYER.format(i=i, j=i + 1, projections="".join(PROJECTION.format(i=i, p=p) for p in "qkv"))
            for i in range(layers)
        ),
    )
    shapes = {"embed": (VOCAB, width), "places": (LONGEST, width), "head": (width, VOCAB)}
    for i in range(layers):
        shapes |= {f"{name}_weight{i}": (width, width) for name in ("q", "k", "v", "out")}
        shapes |= {f"up_weight{i}": (width, 4 * width), f"down_weight{i}": (4 * width, width)}
    weights = {name: random.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    for i in range(layers):
        weights[f"q_weight{i}"] *= np.float32(dim**-0.5)
    sizes = {"zero": 0, "one": 1, "inner": [1, 2], "apart": [0, 0, heads, dim], "whole": [0, 0, width]}
    weights |= {name: np.array(value, np.int64) for name, value in sizes.items()}
    weights |= {"lowest": np.float32(-1e9), "nothing": np.float32(0), "ones": np.ones(width, np.float32)}
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(w), name) for name, w in weights.items())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def main():
    asked = arguments(__doc__)
    session, (prompts, new) = network(asked.size), work(VOCAB, asked.size)

    def own(prompt):
        ids, past, found = np.array([prompt]), None, []
        for n in range(len(prompt), len(prompt) + new):
            logits, *past = run(session, ids, np.ones((1, n)), np.arange(n)[None, -ids.shape[1] :], past)
            ids = logits[:, -1:].argmax(-1)
            found.append(int(ids[0, 0]))
        return found

    compare(Gpt(session), own, prompts, new, asked)


if __name__ == "__main__":
    main()
