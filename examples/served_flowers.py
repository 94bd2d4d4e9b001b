"""A classifier over HTTP: `hibachi serve served_flowers.py:Flowers`

    curl http://127.0.0.1:8000/classify -H 'Content-Type: application/json' -d '{"input": [1.4, 0.2]}'
    curl http://127.0.0.1:8000/v1/generate -H 'Content-Type: application/json' -d '{"input": [1.4, 0.2]}'

The first says which kind of flower has petals of that length and width in cm, and how sure that is (the softmax of
what the model returns); the second says what the model returns.
"""

import numpy as np

MEANS = np.array([[1.5, 0.3], [4.3, 1.3], [5.6, 2.1]])  # of made-up petals
SPREADS = np.array([[0.2, 0.1], [0.5, 0.2], [0.6, 0.3]])


class Flowers:
    labels = ("setosa", "versicolor", "virginica")  # `forward` takes single inputs, and scores each of these
    token = np.zeros(2, np.float32)  # all inputs are like this one

    def __init__(self, n=200):  # a normal distribution for each kind and number
        rng = np.random.default_rng(0)
        petals = rng.normal(MEANS, SPREADS, size=(n, 3, 2))
        self.mean, self.spread = petals.mean(0), petals.std(0)

    def forward(self, x):  # (B, 2) -> (B, 3): the logarithms of how likely such petals are
        z = (x[:, None] - self.mean) / self.spread
        return -(z * z / 2 + np.log(self.spread)).sum(-1)
