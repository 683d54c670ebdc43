"""Models with buffers and of other types: what is averaged, and what every array keeps."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.batchnorm import NumpyNetwork, World, accuracy, network
from flwr.app import Array, ArrayRecord, Message
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, Strategy
from hypothesis import given
from hypothesis import strategies as st

from fedipw.combining.tail import TailAverage
from fedipw.errors import InputError
from fedipw.flower import GaussianNoise, Screen
from fedipw.flower.arrays import Layout, array_view, packed_array
from fedipw.flower.buffers import buffer_mean, hajek_shares
from fedipw.flower.weighted_sum import weight_key
from fedipw.numerics.types import from_bfloat16, in_type, to_bfloat16
from fedipw.storage.checkpoint import load_checkpoint, save_checkpoint

from .federations import INSIDE, Behaviour, Small, answered, round_of

SCHEMES = ("fedavg", "fedipw", "augmented", "fedvarp+fedipw", "mifa+fedipw")
INNER: dict[str, Callable[..., Strategy]] = {
    "FedAvg": FedAvg,
    "FedAvgM": lambda **how: FedAvgM(server_learning_rate=3.0, server_momentum=0.5, **how),
    "FedAdam": lambda **how: FedAdam(eta=0.5, **how),
}
PLAIN: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}
NORM: dict[str, Any] = {
    "seen": np.array([2**60 + 1, 7]),  # the first is what everybody has, and beyond 2**53
    "bn.running_mean": np.zeros(2, np.float32),
    "fc.weight": np.zeros((2, 2), np.float32),
    "bn.running_var": np.full(2, 0.01, np.float32),
    "bn.num_batches_tracked": np.array(0),
    "fc.ema": np.zeros(2, np.float16),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 4), np.float32),
    "scale": np.array(1.0, np.float64),
}


def norm_reply(k: int, message: Message) -> dict[str, Any]:
    """Return client k's arrays: variances near zero, from which a weighted sum goes below it."""
    arrays = {key: v.numpy() for key, v in message.content.array_records["arrays"].items()}
    index = round_of(message)
    chance = np.random.default_rng([k, index])
    arrays["fc.weight"] += chance.normal(size=(2, 2)).astype(np.float32)
    arrays["scale"] = np.asarray(arrays["scale"] + 0.1 * k)
    arrays["bn.running_mean"] += chance.normal(size=2).astype(np.float32)
    arrays["bn.running_var"] = np.array([0.0 if (k + index) % 3 else 0.02, 1e-3 * k], np.float32)
    arrays["bn.num_batches_tracked"] = np.asarray(arrays["bn.num_batches_tracked"] + k)
    arrays["seen"] = arrays["seen"] + np.array([0, k])
    arrays["fc.ema"] = chance.normal(size=2).astype(np.float16)
    arrays["flags"] = np.array([k > 0, k == 5])
    return arrays


def normed(where: Path, name: str) -> Small:
    (where / name).mkdir()
    small = Small(where / name)
    small.start = ArrayRecord({key: Array(value) for key, value in NORM.items()})

    def reply(message: Message, k: int) -> Message:
        return answered(message, norm_reply(k, message), loss=0.5)

    small.behaviours = {k: as_client(reply, k) for k in range(INSIDE)}
    return small


def as_client(reply: Callable[[Message, int], Message], k: int) -> Behaviour:
    return lambda message, _: reply(message, k)


def arrays_of(record: ArrayRecord) -> dict[str, Any]:
    return {key: array.numpy() for key, array in record.items()}


# The mean.


def plain_mean(replies: Any, weights: Any, factors: Any, sent: Any) -> Any:
    """(O22) by a loop."""
    total = sum(max(0.0, w) for w in weights)
    out = np.zeros(sent.shape)
    for b, w, c in zip(replies, weights, factors, strict=True):
        share = max(0.0, w) / total if total else 1.0 / len(replies)
        out += share * (sent + c * (b - sent))
    return out


@pytest.mark.parametrize(("replies", "size"), [(1, 1), (7, 5), (40, 60_000)])
@pytest.mark.parametrize("signs", [(0.1, 2.0), (-1.0, 1.0), (-2.0, -1.0)])
def test_buffers_are_averaged_by_shares_of_the_positive_weights(
    replies: int, size: int, signs: tuple[float, float]
) -> None:
    rng = np.random.default_rng(size)
    sent, found = rng.normal(size=size), rng.normal(size=(replies, size))
    weights, factors = rng.uniform(*signs, size=replies), rng.uniform(size=replies)
    made = buffer_mean(list(found), weights, factors, sent)
    expected = plain_mean(found, weights, factors, sent)
    np.testing.assert_allclose(made, expected, rtol=1e-10, atol=1e-12)
    for dtype in (np.float32, np.float16):
        typed = buffer_mean(list(found), weights, factors, sent.astype(dtype))
        assert typed.dtype == dtype
        np.testing.assert_allclose(typed, expected, rtol=0.0, atol=float(8.0 * np.finfo(dtype).eps))
    whole = buffer_mean(
        [np.rint(9 * b).astype(np.int64) for b in found],
        weights,
        np.ones(replies),
        sent.astype(int),
    )
    assert whole.dtype == np.int64
    means = plain_mean(np.rint(9 * found), weights, np.ones(replies), np.zeros(size))
    assert np.abs(whole - means).max() <= 0.5 + 1e-9


@given(
    values=st.lists(st.floats(0.0, 1e6), min_size=1, max_size=12),
    sent=st.floats(0.0, 1e6),
    data=st.data(),
)
def test_a_mean_of_variances_is_never_negative_nor_beyond_them(
    values: list[float], sent: float, data: st.DataObject
) -> None:
    numbers = st.lists(st.floats(-1e300, 1e300), min_size=len(values), max_size=len(values))
    shares = st.lists(st.floats(0.0, 1.0), min_size=len(values), max_size=len(values))
    weights, factors = data.draw(numbers), data.draw(shares)
    made = buffer_mean([np.array([v]) for v in values], weights, factors, np.array([sent]))
    assert 0.0 <= made[0] <= max([*values, sent]) * (1.0 + 1e-12)


def test_shares_of_huge_weights_are_finite() -> None:
    np.testing.assert_allclose(hajek_shares([1e308, 1e308, -1e308]), [0.5, 0.5, 0.0])


def test_integers_are_rounded_and_held_to_their_type() -> None:
    for dtype in map(np.dtype, ("i1", "u1", "i4", "u4", "i8", "u8")):
        info = np.iinfo(dtype)
        values = np.array([-math.inf, -1e30, -0.5, 0.5, 1.5, 99.7, 1e30, math.inf])
        low = info.min
        expected = [low, low, 0, 0, 2, 100, info.max, info.max]
        assert in_type(values, dtype).tolist() == expected
    assert in_type(np.array(2.6), np.dtype(np.int64)).shape == ()


def test_bfloat16_is_read_exactly_and_rounded_to_the_nearest() -> None:
    """All 65,536 of them, and the middle between neighbours, which goes to the even one."""
    bits = np.arange(65_536, dtype=np.uint16)
    values = from_bfloat16(bits)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(to_bfloat16(values)[number], bits[number])
    assert np.isnan(from_bfloat16(to_bfloat16(values[~number]))).all()
    low = bits[(bits < 0x7F80)]  # positive and finite; the next of the last is infinite
    a, b = from_bfloat16(low).astype(float), from_bfloat16(low + np.uint16(1)).astype(float)
    b[-1] = 2.0**128
    for share in (0.25, 0.5, 0.75):
        nearest = np.where((share > 0.5) | ((share == 0.5) & (low % 2 == 1)), low + 1, low)
        np.testing.assert_array_equal(
            to_bfloat16((a + share * (b - a)).astype(np.float32)), nearest
        )


def test_arrays_are_packed_as_flower_packs_them() -> None:
    for array in (*NORM.values(), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(3)):
        assert (
            packed_array(array).data == Array(np.ascontiguousarray(array).reshape(array.shape)).data
        )
        np.testing.assert_array_equal(array_view(Array(array)), array)
    made = packed_array(np.array([[1.5, -2.0]]), "bfloat16")
    assert (made.dtype, made.shape, Layout.of(made).name) == ("bfloat16", (1, 2), "bfloat16")
    np.testing.assert_array_equal(array_view(made), [[1.5, -2.0]])


def test_an_average_of_the_last_models_keeps_types_and_ranges() -> None:
    tail = TailAverage()
    top = np.iinfo(np.uint64).max
    for k in range(2):
        tail.add(
            {
                "n": np.array([k, 3], np.uint8),
                "s": np.array(k > 0),
                "u": np.array([top, top], np.uint64),
            }
        )
    mean = tail.mean()
    assert [str(mean[name].dtype) for name in "nsu"] == ["uint8", "bool", "uint64"]
    assert (mean["n"].tolist(), mean["s"].shape, mean["u"].tolist()) == ([0, 3], (), [top, top])


# Rounds.


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_buffers_are_means_by_the_weights_of_the_round_and_arrays_keep_their_types(
    tmp_path: Path, scheme: str, inner: str
) -> None:
    """Three rounds under each optimiser, stopped after the first and gone on with."""
    small = normed(tmp_path, "parts")
    how: dict[str, Any] = {"scheme": scheme, "average": None, "buffers": ["*.ema"]}
    sent, first = dict(NORM), INNER[inner](**PLAIN)
    small.trained(1, first, **how)
    again = INNER[inner](**PLAIN)
    strategy = small.strategy(again, **how)
    for index in (1, 2, 3):
        result = strategy.start(small.grid, small.start, num_rounds=index)
        made = arrays_of(result.arrays)
        assert {k: (v.dtype, v.shape) for k, v in made.items()} == {
            k: (v.dtype, v.shape) for k, v in NORM.items()
        }
        assert list(made) == list(NORM)
        weights = np.maximum(result.train_metrics_clientapp[index]["fedipw-weights"], 0.0)
        order = [int(unit[1:]) for unit in small.round(index)]
        record = ArrayRecord({key: Array(np.asarray(value)) for key, value in sent.items()})
        replies = [norm_reply(k, _Sent(record, index)) for k in order]  # type: ignore[arg-type]
        for key in sorted(set(NORM) - {"fc.weight", "scale", "empty", "seen"}):
            values = np.array([reply[key].astype(float) for reply in replies])
            mean = np.tensordot(weights / weights.sum(), values, axes=1)
            near = 0.5 if made[key].dtype.kind in "ib" else 1e-2 if key == "fc.ema" else 1e-6
            assert np.abs(made[key].astype(float) - mean).max() <= near + 1e-9, key
        assert made["seen"][0] == 2**60 + 1
        assert (made["bn.running_var"] >= 0.0).all()
        sent = made
    assert not np.allclose(made["fc.weight"], 0.0)
    for name in ("m_t", "v_t", "momentum_vector"):
        state = getattr(again, name, None) or {}
        for value in state.values() if isinstance(state, dict) else state:
            assert np.isfinite(value).all()


class _Sent:
    """A message with a model and a round, as a client receives it."""

    def __init__(self, record: ArrayRecord, index: int) -> None:
        self.content = self
        self.array_records = {"arrays": record}
        self.config_records = {"config": {"server-round": index}}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("scheme", ["fedipw", "augmented", "fedvarp+fedipw"])
def test_buffers_change_nothing_for_the_parameters(tmp_path: Path, scheme: str, inner: str) -> None:
    """The same updates with and without buffers beside them give the same bytes."""
    found = []
    for name, keys in (("all", list(NORM)), ("alone", ["fc.weight", "scale"])):
        small = normed(tmp_path, name)
        whole = {key: small.start[key] for key in NORM}

        def reply(message: Message, k: int, keys: list[str] = keys, whole: Any = whole) -> Message:
            given = message.content.array_records["arrays"]
            full = ArrayRecord({key: given.get(key, whole[key]) for key in NORM})
            made = norm_reply(k, _Sent(full, round_of(message)))  # type: ignore[arg-type]
            return answered(message, {key: made[key] for key in keys}, loss=0.5)

        small.behaviours = {k: as_client(reply, k) for k in range(INSIDE)}
        small.start = ArrayRecord({key: whole[key] for key in keys})
        how: dict[str, Any] = {"buffers": ["*.ema"]} if name == "all" else {}
        found.append(small.trained(3, INNER[inner](**PLAIN), scheme=scheme, **how))
    for key in ("fc.weight", "scale"):
        assert found[0].arrays[key].data == found[1].arrays[key].data


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("name", ["float16", "bfloat16", ">f4"])
@pytest.mark.parametrize("scheme", ["fedipw", "augmented", "fedvarp+fedipw"])
def test_models_of_other_types_train_as_in_double_precision(
    tmp_path: Path, scheme: str, name: str, inner: str
) -> None:
    """Replies move by one on a grid that all types have; sums are in single precision at least."""
    made = {}
    for kind in (name, "float64"):
        (tmp_path / kind.strip(">")).mkdir()
        small = Small(tmp_path / kind.strip(">"))
        zero = {"w": np.zeros((2, 2)), "point": np.array(0.5), "none": np.zeros((3, 0))}
        small.start = ArrayRecord({k: packed_array(v, kind) for k, v in zero.items()})

        def reply(message: Message, k: int, kind: str = kind) -> Message:
            record = ArrayRecord()
            for key, array in message.content.array_records["arrays"].items():
                assert Layout.of(array).name == kind
                update = 0.125 * (k % 5 - 1) + np.zeros(array.shape)
                record[key] = packed_array(array_view(array) + update, kind)
            done = answered(message, {}, loss=0.5)
            done.content["arrays"] = record
            return done

        small.behaviours = {k: as_client(reply, k) for k in range(INSIDE)}
        result = small.trained(2, INNER[inner](**PLAIN), scheme=scheme)
        assert {Layout.of(array).name for array in result.arrays.values()} == {kind}
        made[kind] = {k: array_view(array).astype(float) for k, array in result.arrays.items()}
        again = small.trained(3, INNER[inner](**PLAIN), scheme=scheme)  # from disk
        assert {Layout.of(array).name for array in again.arrays.values()} == {kind}
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7, ">f4": 2.0**-22}[name]
    for key, expected in made["float64"].items():
        # a few roundings of models near one, each at most doubled by the optimiser's step of three
        np.testing.assert_allclose(made[name][key], expected, rtol=0.0, atol=16.0 * eps)


def test_a_reply_of_low_precision_does_not_set_that_of_the_sums(tmp_path: Path) -> None:
    """The first client's numbers have three digits; the others' keep all of theirs."""

    def precise(message: Message, index: int) -> Message:
        del index
        return answered(message, {"theta": np.full(3, 1.0 + 1e-6)})

    small = Small(tmp_path, dict.fromkeys(range(INSIDE), precise))
    small.behaviours[0] = lambda m, _: answered(m, {"theta": np.ones(3, np.float16)})
    made = small.trained(1, scheme="fedavg").arrays["theta"].numpy()
    np.testing.assert_allclose(made, 1.0 + 1e-6 * (INSIDE - 1) / INSIDE, rtol=1e-12)
    assert made.dtype == np.float64


def test_a_checkpoint_whose_counters_became_floating_is_mended(tmp_path: Path) -> None:
    """As runs begun before wrote them: the model takes the types of initial_arrays."""
    small = normed(tmp_path, "a")
    strategy = small.strategy(scheme="fedavg")
    strategy.start(small.grid, small.start, num_rounds=1)
    journal = strategy.journal
    state = load_checkpoint(journal.directory, journal._fingerprint, name="round-000001.npz")
    assert state is not None
    place = state["model"]["keys"].index("bn.num_batches_tracked")
    state["model"]["value"][place] = np.array(5.000000001)
    del state["model"]["types"]
    del state["names"]
    save_checkpoint(journal.directory, state, journal._fingerprint, name="round-000001.npz")
    small.trained(2, scheme="fedavg")
    assert sum(row["replied"] for row in small.round(2).values()) == INSIDE


def test_set_up_mistakes_say_so(tmp_path: Path) -> None:
    small = normed(tmp_path, "a")
    with pytest.raises(
        InputError, match=r"'\*.emma' matches no array of the model, which has seen"
    ):
        small.trained(1, buffers=["*.emma"])
    noise = GaussianNoise(multiplier=1.0, delta=1e-5)
    with pytest.raises(InputError, match=r"does not cover buffers.*running_mean"):
        small.trained(1, noise=noise, screen=Screen(clip=1.0))
    small.start = ArrayRecord({"w": Array(np.zeros(2, np.complex64))})
    with pytest.raises(InputError, match="'w' of the model is complex64, which cannot be averaged"):
        small.trained(1)
    small.start = ArrayRecord({"w": Array("float32", (2,), "numpy.ndarray", b"nothing")})
    with pytest.raises(InputError, match="'w' of the model cannot be read"):
        small.trained(1)
    assert weight_key(FedAvg(**PLAIN)) == "num-examples"


# A network.


def test_a_network_with_batch_normalisation_trains_as_well_as_under_fedavg_alone() -> None:
    """Three seeds, twelve rounds, selection at random; PyTorch where it is, else NumPy."""
    apart = []
    for seed in range(3):
        found = {}
        for method in ("plain", "augmented"):
            world = World(seed, net=network())
            model = world.run(method, 12)
            found[method] = accuracy(model, *world.test)
            assert world.smallest > 0.0
        assert model["1.num_batches_tracked"].dtype == np.int64
        assert model["1.num_batches_tracked"] == 36  # three batches a round
        assert found["plain"] > 0.8
        apart.append(found["augmented"] - found["plain"])
    assert abs(np.mean(apart)) < 0.01


def test_running_variances_stay_positive_under_horvitz_thompson_weights_and_adam() -> None:
    world = World(0, net=NumpyNetwork())
    model = world.run("fedipw", 6, lambda **how: FedAdam(eta=0.3, **how))
    assert world.smallest > 0.0
    assert np.isfinite(model["0.weight"]).all()
