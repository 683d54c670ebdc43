"""The task: model and data. Put your own here."""

import sys
from zlib import crc32

import numpy as np
import polars as pl

Model = dict[str, np.ndarray]
FEATURES, ROWS = 4, 40


def first_model() -> Model:
    """Return the model that training begins with."""
    return {"weights": np.zeros(FEATURES), "bias": np.zeros(1)}


def data(unit: str, held_out: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return a client's features and labels; here drawn from its identifier."""
    rng = np.random.default_rng([crc32(unit.encode()), held_out])
    x = rng.standard_normal((ROWS, FEATURES)) + 0.1 * (crc32(unit.encode()) % 7)
    return x, (x[:, 0] - 0.5 * x[:, 1] + 0.5 * rng.standard_normal(ROWS) > 0).astype(float)


def battery(unit: str, server_round: int) -> float:
    """Return how full the client's battery is, something that a round's replies depend on."""
    return float(np.random.default_rng([crc32(unit.encode()), server_round]).random())


def takes_part(unit: str, server_round: int) -> bool:
    """Return whether the client trains in a round: mostly if its battery is full."""
    rng = np.random.default_rng([crc32(unit.encode()), server_round, 1])
    return bool(rng.random() < 0.2 + 0.7 * battery(unit, server_round))


def _prob(model: Model, x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-(x @ model["weights"] + model["bias"])))


def trained(model: Model, x: np.ndarray, y: np.ndarray, rate: float, steps: int = 5) -> Model:
    """Return the model after some steps of gradient descent."""
    for _ in range(steps):
        apart = _prob(model, x) - y
        model = {"weights": model["weights"] - rate * apart @ x / len(y),
                 "bias": model["bias"] - rate * apart.mean(keepdims=True)}  # fmt: skip
    return model


def loss(model: Model, x: np.ndarray, y: np.ndarray) -> float:
    """Return the mean cross-entropy."""
    p = np.clip(_prob(model, x), 1e-12, 1 - 1e-12)
    return float(-np.mean(y * np.log(p) + (1 - y) * np.log(1 - p)))


def accuracy(model: Model, x: np.ndarray, y: np.ndarray) -> float:
    """Return the share of rows with the right label."""
    return float(np.mean((_prob(model, x) > 0.5) == (y > 0.5)))


def population(size: int = 120, enrolled: int = 40) -> pl.DataFrame:
    """Return a population to try the app with: the first clients are the enrolled, and younger."""
    rng = np.random.default_rng(0)
    age = rng.normal(45.0, 12.0, size)
    order = np.argsort(age + rng.normal(0.0, 20.0, size))
    return pl.DataFrame({
        "unit_id": [str(k) for k in range(size)], "age": age[order],
        "os": rng.choice(["android", "ios"], size), "enrolled": np.arange(size) < enrolled,
    })  # fmt: skip


if __name__ == "__main__":
    population().write_parquet(sys.argv[1])
