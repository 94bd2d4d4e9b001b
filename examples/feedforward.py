"""Models without a sequence: single inputs in, single outputs out, batched behind the scenes.

The model is a logistic regression that tells two kinds of flowers apart, fitted to made-up measurements. A
hundred callers ask for one flower each; those who wait together are answered by one forward pass.
"""

import asyncio

import numpy as np

import hibachi


class Flowers:
    """Petal length and width in cm -> the probability of the second kind."""

    def __init__(self, x, y, steps=500):
        self.mean, self.spread = x.mean(0), x.std(0)
        z, self.weights, self.bias = self._scaled(x), np.zeros(2), 0.0
        for _ in range(steps):  # gradient descent on the log loss
            error = self._sigmoid(z @ self.weights + self.bias) - y
            self.weights -= z.T @ error / len(y)
            self.bias -= error.mean()

    def forward(self, x):  # (B, 2) -> (B,)
        return self._sigmoid(self._scaled(x) @ self.weights + self.bias)

    def _scaled(self, x):
        return (x - self.mean) / self.spread

    @staticmethod
    def _sigmoid(x):
        return 1 / (1 + np.exp(-x))


async def main():
    rng = np.random.default_rng(0)
    kind = rng.integers(2, size=400)
    petals = np.array([[1.5, 0.3], [4.3, 1.3]])[kind] + rng.normal(scale=[0.9, 0.4], size=(400, 2))
    model = Flowers(petals[:300], kind[:300])

    async with hibachi.FeedforwardBatchInference(model, max_batch_size=32) as engine:

        async def ask(flower):
            return await engine.run(flower) > 0.5

        answers = await asyncio.gather(*[ask(flower) for flower in petals[300:]])
        stats = engine.stats()
    right = int((np.array(answers) == kind[300:]).sum())
    print(f"{right} of {len(answers)} flowers told apart; {stats.finished} requests in {stats.steps} forward passes")


if __name__ == "__main__":
    asyncio.run(main())
