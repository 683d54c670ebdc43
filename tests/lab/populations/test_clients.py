"""Client data in one ragged block: shapes refused, chunks that cover, shares in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.errors import InputError
from fedipw.lab import clients
from fedipw.lab.clients import ClientData


def block(counts: list[int], d: int = 2) -> ClientData:
    rng = np.random.default_rng(0)
    rows = sum(counts)
    return ClientData(
        features=rng.normal(size=(rows, d)),
        labels=rng.integers(0, 2, rows).astype(np.int8),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
    )


def with_fields(**fields: Any) -> ClientData:
    good = {
        "features": np.zeros((3, 2)),
        "labels": np.array([0, 1, 1], dtype=np.int8),
        "offsets": np.array([0, 1, 3]),
    }
    return ClientData(**{**good, **fields})


def test_sizes_are_counted() -> None:
    data = block([2, 5, 1], d=4)
    assert data.size == 3
    assert data.n_parameters == 5
    assert data.counts.tolist() == [2, 5, 1]


@pytest.mark.parametrize(
    ("features", "said"),
    [
        (np.zeros((4, 2)), r"\(4, 2\) and labels \(3,\) disagree on rows"),
        (np.zeros(3), r"\(3,\) and labels \(3,\) disagree"),
        (np.zeros((3, 2), dtype=np.float32), "C-contiguous float64"),
        (np.zeros((2, 3)).T, "C-contiguous float64"),
        (np.array([[0.0, np.nan], [0.0, 0.0], [0.0, 0.0]]), "missing or infinite"),
        (np.array([[0.0, 0.0], [0.0, 0.0], [np.inf, 0.0]]), "missing or infinite"),
    ],
)
def test_features_that_cannot_be_used_are_refused(features: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        with_fields(features=features)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (np.array([0, 1, 1]), "must be int8 .* not int64"),
        (np.array([0.0, 1.0, 1.0]), "must be int8 .* not float64"),
        (np.array([0, 2, 1], dtype=np.int8), "must be 0 or 1"),
        (np.array([0, -1, 1], dtype=np.int8), "must be 0 or 1"),
    ],
)
def test_labels_other_than_zero_and_one_are_refused(labels: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        with_fields(labels=labels)


@pytest.mark.parametrize("offsets", [[0, 1], [1, 2, 3], [0, 2, 1, 3], [0, 1, 4]])
def test_offsets_that_do_not_rise_to_the_rows_are_refused(offsets: list[int]) -> None:
    with pytest.raises(InputError, match="offsets must rise from 0 to the number of rows, 3"):
        with_fields(offsets=np.array(offsets))


def test_clients_without_rows_are_named() -> None:
    with pytest.raises(InputError, match=r"2 clients have no rows \(client 0, 2\)"):
        with_fields(offsets=np.array([0, 0, 1, 1, 3]))


def test_a_bad_value_beyond_the_first_piece_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_CHUNK_ROWS", 2)
    features = np.zeros((3, 2))
    features[2, 1] = np.nan
    with pytest.raises(InputError, match="missing or infinite"):
        with_fields(features=features)


@settings(max_examples=100)
@given(counts=st.lists(st.integers(1, 30), min_size=1, max_size=40), limit=st.integers(1, 100))
def test_chunks_cover_everything_once_in_bounded_pieces(counts: list[int], limit: int) -> None:
    data = block(counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clients, "_CHUNK_ROWS", limit)
        pieces = list(data.chunks())
    for which, last in ((0, data.size), (1, len(data.labels))):
        edges = [0, *(piece[which].stop for piece in pieces)]
        assert [piece[which].start for piece in pieces] == edges[:-1]
        assert edges[-1] == last
    for own, rows in pieces:
        assert (rows.start, rows.stop) == (data.offsets[own.start], data.offsets[own.stop])
        assert own.stop > own.start
        assert rows.stop - rows.start <= limit or own.stop == own.start + 1


def test_small_data_is_one_chunk() -> None:
    data = block([3, 4])
    assert list(data.chunks()) == [(slice(0, 2), slice(0, 7))]


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=10), min_size=1, max_size=20))
def test_label_share_is_the_mean_of_each_clients_labels(labels: list[list[int]]) -> None:
    counts = [len(own) for own in labels]
    data = ClientData(
        features=np.zeros((sum(counts), 1)),
        labels=np.array([y for own in labels for y in own], dtype=np.int8),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
    )
    expected = [sum(own) / len(own) for own in labels]
    np.testing.assert_array_equal(data.label_share, expected)


def test_label_share_counts_beyond_the_range_of_a_label() -> None:
    data = ClientData(  # 1000 ones do not fit an int8
        features=np.zeros((2000, 1)),
        labels=np.repeat(np.array([1, 0], dtype=np.int8), 1000),
        offsets=np.array([0, 1500, 2000]),
    )
    np.testing.assert_array_equal(data.label_share, [2.0 / 3.0, 0.0])
