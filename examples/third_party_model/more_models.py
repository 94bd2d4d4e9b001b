"""Two architectures that hibachi does not know: one that its decoder covers, one with a model of its own."""

import hibachi

# What config.json and the weights say otherwise than Llama's: LayerNorm, and a quarter of each head turns.
STABLE_LM = hibachi.Family("stablelm", fields={"norm": "layer"}, refused={"use_parallel_residual": False})


class Gru:
    """A GRU language model: level 2 with a `State`, written over the backend, so it runs on every library.

    Weights as torch.nn.GRU names them: embed.weight [vocab, size], gru.weight_ih_l0, gru.weight_hh_l0 [3 * size, size],
    gru.bias_ih_l0, gru.bias_hh_l0 [3 * size], head.weight [vocab, size].
    """

    model_type = "gru"

    @classmethod
    def load(cls, files, backend, *, dtype, max_model_len):
        """Called by hibachi: files.config is config.json, files.tensors() the arrays of the checkpoint by name."""
        return cls(files.config, files.tensors(), backend, dtype or "float32", max_model_len or 4096)

    def __init__(self, config, tensors, backend, dtype, max_model_len):
        self.backend, self.dtype, self.max_model_len = backend, dtype, max_model_len
        self.vocab_size, self.size = config["vocab_size"], config["hidden_size"]
        self.bos_ids, self.eos_ids = (), (config["eos_token_id"],)
        matrices = ("gru.weight_ih_l0", "gru.weight_hh_l0", "head.weight")
        put = {True: backend.put_weight, False: backend.put}
        self.params = {name: put[name in matrices](tensors[name], dtype) for name in tensors}

    def cache_spec(self):
        return [hibachi.State((self.size,), self.dtype)]

    def step(self, params, cache, x):
        b, n = self.backend, self.size
        h = cache[0]  # (B, size)
        tokens = b.xp.reshape(x.tok, (h.shape[0], -1))  # with a State, all rows have equally many tokens
        inputs = b.linear(b.take(params["embed.weight"], tokens), params["gru.weight_ih_l0"], params["gru.bias_ih_l0"])

        def advance(h, now):
            (i,) = now  # (B, 3 * size)
            g = b.linear(h, params["gru.weight_hh_l0"], params["gru.bias_hh_l0"])
            reset, update = sigmoid(b.xp, i[:, :n] + g[:, :n]), sigmoid(b.xp, i[:, n : 2 * n] + g[:, n : 2 * n])
            new = b.xp.tanh(i[:, 2 * n :] + reset * g[:, 2 * n :])
            h = (1 - update) * new + update * h
            return h, h

        h, states = b.scan(advance, h, (b.xp.permute_dims(inputs, (1, 0, 2)),))
        states = b.xp.reshape(b.xp.permute_dims(states, (1, 0, 2)), (-1, n))
        return b.float32(b.linear(b.take(states, x.last), params["head.weight"])), [h]


def sigmoid(xp, x):
    return 0.5 * (1 + xp.tanh(0.5 * x))
