"""A store of vectors against a dictionary, whatever is written, read, removed or harmed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedipw.errors import InputError
from fedipw.storage.atomic import written_paths
from fedipw.storage.vectors import VectorStore

SIZE = 10


def write(store: VectorStore, vectors: dict[int, Any], index: int, edge: int) -> Any:
    """Write a round's vectors in two pieces, and their sum."""
    total = np.sum([v.astype(float) for v in vectors.values()] or [np.zeros(SIZE)], axis=0)
    with store.writing(vectors, index) as (files, sum_file):
        for piece in (slice(0, edge), slice(edge, SIZE)):
            for row, vector in vectors.items():
                store.put(files[row], piece, vector[piece])
            store.put_sum(sum_file, piece, total[piece])
    return total


@given(
    rounds=st.lists(st.sets(st.integers(0, 30), max_size=6), min_size=1, max_size=6),
    dtype=st.sampled_from([np.float32, np.float64]),
    edge=st.integers(0, SIZE),
)
def test_the_store_is_a_dictionary_of_latest_vectors(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[set[int]], dtype: Any, edge: int
) -> None:
    store = VectorStore(tmp_path_factory.mktemp("store") / "memory", SIZE, dtype)
    latest: dict[int, int] = {}
    vectors: dict[int, Any] = {}
    rng = np.random.default_rng(0)
    for index, rows in enumerate(rounds, start=1):
        made = {row: rng.standard_normal(SIZE).astype(dtype) for row in sorted(rows)}
        total = write(store, made, index, edge)
        vectors |= made
        latest |= dict.fromkeys(rows, index)
        assert store.check(latest, index)
        store.keep_only(latest, index)
        names = {store.client(row, last).name for row, last in latest.items()}
        assert {p.name for p in store.directory.iterdir()} == {*names, store.sum(index).name}
        for row, vector in vectors.items():
            for piece in (slice(0, SIZE), slice(edge, SIZE), slice(0, edge)):
                np.testing.assert_array_equal(store.vector(row, latest[row], piece), vector[piece])
            np.testing.assert_array_equal(np.load(store.client(row, latest[row])), vector)
        np.testing.assert_array_equal(store.total(index, slice(0, SIZE)), total)
        taken = sum(path.stat().st_size for path in store.directory.iterdir())
        assert taken == len(latest) * store.bytes_each + store.bytes_of_sum == store.room()[0]


def test_what_killed_writers_left_is_removed_and_other_files_are_not(tmp_path: Path) -> None:
    store = VectorStore(tmp_path, SIZE, np.float64)
    write(store, {3: np.ones(SIZE)}, 1, 5)
    for name in (".000003-000002.npy.abc.partial", "000004-000002.npy", "sum-000002.npy"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("mine")
    store.keep_only({3: 1}, 1)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["000003-000001.npy", "notes.txt", "sum-000001.npy"]


def test_nothing_appears_of_a_round_that_fails(tmp_path: Path) -> None:
    store = VectorStore(tmp_path, SIZE, np.float64)

    def failing() -> None:
        with store.writing([1, 2], 1) as (files, _):
            store.put(files[1], slice(0, SIZE), np.ones(SIZE))
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        failing()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("harm", ["cut", "grown", "type", "length", "text"])
def test_harmed_files_are_named(tmp_path: Path, harm: str) -> None:
    store = VectorStore(tmp_path, SIZE, np.float64)
    write(store, {3: np.ones(SIZE)}, 1, 5)
    path = store.client(3, 1)
    whole = path.read_bytes()
    if harm == "type":
        np.save(path, np.ones(SIZE, dtype=np.int64))
    elif harm == "length":
        np.save(path, np.ones(SIZE + 1))
    else:
        path.write_bytes({"cut": whole[:-3], "grown": whole + b"x", "text": b"no"}[harm])
    with pytest.raises(InputError, match=r"000003-000001.npy is damaged"):
        store.check({3: 1}, 1)
    path.unlink()
    with pytest.raises(InputError, match=r"000003-000001.npy is missing"):
        store.check({3: 1}, 1)
    assert not VectorStore(tmp_path, SIZE, np.float64).check({}, 2)


def test_a_file_that_ends_or_goes_while_it_is_read_is_named(tmp_path: Path) -> None:
    store = VectorStore(tmp_path, SIZE, np.float64)
    write(store, {3: np.ones(SIZE)}, 1, 5)
    path = store.client(3, 1)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(InputError, match="ends too early"):
        store.vector(3, 1, slice(0, SIZE))
    path.unlink()
    with pytest.raises(InputError, match="No such file"):
        store.vector(3, 1, slice(0, SIZE))


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = VectorStore(tmp_path / "file" / "memory", SIZE, np.float64)
    with pytest.raises(InputError, match="cannot be made"), store.writing([1], 1):
        pass
    assert store.room()[1] > 0


def test_several_files_get_their_names_together(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    with written_paths(places) as made:
        for place in places:
            made[place].write_text(place.name)
        assert not any(place.exists() for place in places)
    assert [place.read_text() for place in places] == ["a", "b"]
    assert len(list(tmp_path.iterdir())) == 2
