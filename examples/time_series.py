"""Continuous values: a token is a measurement of two numbers, and a forecast ends when it crosses a threshold.

The model is a linear autoregression over the last 24 hours, fitted by least squares to a simulated record of rain
and river level. `StopRule(where=...)` sees the new measurements of all rows at once and says which forecasts are over.
Served: `hibachi serve time_series.py:Autoregression`.
"""

import numpy as np

import hibachi

HOURS, FLOOD = 24, 2.3  # hours that the model looks back; metres


def simulate(hours, seed):
    """(hours, 2): rain, and a level that rises with the rain and falls slowly."""
    rng = np.random.default_rng(seed)
    rain, level = np.zeros(hours), np.ones(hours)
    for t in range(2, hours):
        rain[t] = 1.9 * rain[t - 1] - 0.95 * rain[t - 2] + 0.05 + 0.03 * rng.normal()
        level[t] = 0.94 * level[t - 1] + 0.12 * rain[t - 1]
    return np.stack([rain, level], axis=1)


class Autoregression:
    token, max_model_len = np.zeros(2, np.float32), 1000  # these and `stop_rule`: where it is opened by its name
    stop_rule = hibachi.StopRule(where=lambda measured: measured[:, 1] > FLOOD)

    def __init__(self, record=None):
        record = simulate(3000, seed=0) if record is None else record
        past = np.lib.stride_tricks.sliding_window_view(record[:-1], HOURS, axis=0)  # (n, 2, HOURS)
        self.weights = np.linalg.lstsq(self._with_one(past), record[HOURS:], rcond=None)[0]

    def forward(self, tokens):  # (B, S, 2) -> (B, 2)
        past = np.pad(tokens, ((0, 0), (HOURS, 0), (0, 0)), mode="edge")[:, -HOURS:]  # also of who has measured less
        return (self._with_one(past.transpose(0, 2, 1)) @ self.weights).astype(tokens.dtype)

    @staticmethod
    def _with_one(past):
        flat = past.reshape(len(past), -1)
        return np.concatenate([flat, np.ones((len(past), 1))], axis=1)


def main():
    model = Autoregression()
    rivers = {f"river {seed}": simulate(100 + 7 * seed, seed) for seed in (1, 2, 4, 9, 10)}
    with hibachi.AutoregressiveBatchInference(model, max_model_len=1000) as engine:
        streams = {name: engine.run(past, max_tokens=72, stop_rule=model.stop_rule) for name, past in rivers.items()}
        for name, stream in streams.items():
            forecast = np.array(stream.collect())
            now, peak = rivers[name][-1, 1], forecast[:, 1].max()
            end = (
                f"flood in {len(forecast)} hours"
                if stream.finish_reason == "stop"
                else f"at most {peak:.1f} m for 72 hours"
            )
            print(f"{name}: {now:.1f} m after {len(rivers[name])} hours; then {end}")


if __name__ == "__main__":
    main()
