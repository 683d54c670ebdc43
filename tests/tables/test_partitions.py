"""Sums over blocks of rows: the same whatever the blocks, where they lie, and how many threads."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedipw.errors import InputError
from fedipw.numerics import FloatArray
from fedipw.numerics.threads import limit_threads, thread_count
from fedipw.tables.partitions import BLOCK_ROWS, Block, Blocks, Frame, added, sum_over


@contextmanager
def at_most(count: int) -> Iterator[None]:
    """Limit the threads for a while."""
    before = thread_count()
    limit_threads(count)
    try:
        yield
    finally:
        limit_threads(before)


def some_blocks(
    sizes: list[int], q: int = 3, *, seed: int = 0, labelled: bool = True, weighted: bool = True
) -> list[Block]:
    """Return blocks of whole numbers, so that any order of adding gives the same sum."""
    rng = np.random.default_rng(seed)
    return [
        Block(
            rng.integers(-9, 9, (q, m)).astype(np.float64),
            rng.integers(0, 2, m if labelled else 0).astype(np.int8),
            rng.integers(1, 9, m if weighted else 0).astype(np.float64),
        )
        for m in sizes
    ]


def stored(blocks: list[Block], memory: int) -> Blocks:
    made = Blocks(memory=memory)
    for block in blocks:
        made.append(block)
    return made


def totals(block: Block) -> tuple[int, FloatArray, int, float]:
    columns = block.columns.sum(axis=1)
    return block.rows, columns, int(block.labels.sum()), float(block.weights.sum())


def weighted_start(block: Block) -> float:
    """Return a number that tells the place of every row: its position times its weight."""
    return float((block.start + np.arange(len(block.weights))) @ block.weights)


sizes_of = st.lists(st.integers(0, 13), min_size=1, max_size=9)


@settings(max_examples=150)
@given(
    sizes=sizes_of,
    q=st.integers(0, 4),
    memory=st.integers(0, 4000),
    labelled=st.booleans(),
    weighted=st.booleans(),
    threads=st.integers(1, 3),
)
def test_the_sum_over_any_blocks_anywhere_is_the_plain_sum(
    sizes: list[int], q: int, memory: int, labelled: bool, weighted: bool, threads: int
) -> None:
    blocks = some_blocks(sizes, q, labelled=labelled, weighted=weighted)
    with at_most(threads):
        rows, columns, labels, weights = sum_over(stored(blocks, memory), totals)
    whole = np.concatenate([block.columns for block in blocks], axis=1)
    assert rows == sum(sizes)
    np.testing.assert_array_equal(columns, whole.sum(axis=1))
    assert labels == sum(int(block.labels.sum()) for block in blocks)
    assert weights == sum(float(block.weights.sum()) for block in blocks)


@settings(max_examples=100)
@given(sizes=sizes_of, memory=st.integers(0, 3000), q=st.integers(0, 3))
def test_what_comes_back_from_the_scratch_file_is_what_went_in(
    sizes: list[int], memory: int, q: int
) -> None:
    """Also where the bytes of labels are no multiple of 8, so that weights lie askew."""
    blocks = some_blocks(sizes, q)
    made = stored(blocks, memory)
    assert (len(made), made.rows) == (len(blocks), sum(sizes))
    start = 0
    for got, put in zip(made, blocks, strict=True):
        assert got.start == start
        for name in ("columns", "labels", "weights"):
            there, here = getattr(got, name), getattr(put, name)
            assert there.dtype == here.dtype
            np.testing.assert_array_equal(there, here)
        start += put.rows


@pytest.mark.parametrize("memory", [0, 2**40])
def test_an_iterated_block_outlives_the_next(memory: int) -> None:
    blocks = some_blocks([4, 4, 4])
    kept = list(stored(blocks, memory))
    for got, put in zip(kept, blocks, strict=True):
        np.testing.assert_array_equal(got.columns, put.columns)


def test_floating_sums_have_the_same_bytes_for_any_number_of_threads_and_any_memory() -> None:
    rng = np.random.default_rng(3)
    blocks = [
        Block(rng.normal(size=(2, m)) * 10.0 ** rng.integers(-8, 8), np.zeros(m, np.int8), w)
        for m in (1, 501, 64, 9, 3000, 7, 250, 33, 40, 41, 42, 43)
        for w in [rng.random(m)]
    ]

    def moments(block: Block) -> FloatArray:
        squares: FloatArray = (block.columns * block.weights) @ block.columns.T
        return squares

    seen = set()
    for memory in (0, 20_000, 2**40):
        for threads in (1, 2, 3, 5):
            with at_most(threads):
                seen.add(sum_over(stored(blocks, memory), moments).tobytes())
    assert len(seen) == 1
    first, *others = [moments(block) for block in blocks]
    assert sum(others, first).tobytes() in seen
    backwards = sum((moments(block) for block in reversed(blocks)), np.zeros((2, 2)))
    assert backwards.tobytes() not in seen  # order shows in the bytes, so it was kept


def test_values_are_combined_in_order() -> None:
    blocks = some_blocks([1] * 23)
    for threads in (1, 4):
        with at_most(threads):
            text = stored(blocks, 100).reduced(lambda b: f"{b.start} ", lambda a, b: a + b)
        assert text == "".join(f"{k} " for k in range(23))


def test_a_part_is_a_range_of_blocks_that_knows_its_place() -> None:
    sizes = [5, 3, 8, 1, 4]
    blocks = some_blocks(sizes)
    for memory in (0, 300, 2**40):
        made = stored(blocks, memory)
        for first in range(5):
            for last in range(first + 1, 6):
                part = made.part(first, last)
                assert (len(part), part.rows) == (last - first, sum(sizes[first:last]))
                assert sum_over(part, weighted_start) == sum(
                    weighted_start(b._replace(start=sum(sizes[:k])))
                    for k, b in enumerate(blocks[first:last], first)
                )
        assert made.part(2, 2).rows == 0
        with pytest.raises(InputError, match="There are no rows"):
            sum_over(made.part(2, 2), totals)


def test_blocks_may_be_added_after_a_sum() -> None:
    blocks = some_blocks([5, 6, 7, 8])
    made = stored(blocks[:2], 0)
    assert sum_over(made, totals)[0] == 11
    for block in blocks[2:]:
        made.append(block)
    assert sum_over(made, totals)[2:] == (
        sum(int(b.labels.sum()) for b in blocks),
        sum(float(b.weights.sum()) for b in blocks),
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_arrays_are_cut_into_blocks(weighted: bool) -> None:
    n = 2 * BLOCK_ROWS + 3
    X = np.arange(2.0 * n).reshape(n, 2)
    y = (np.arange(n) % 3 == 0).astype(np.int8)
    w = np.arange(n, dtype=np.float64)
    made = Blocks.of_arrays(X, y, w if weighted else None)
    assert [block.rows for block in made] == [BLOCK_ROWS, BLOCK_ROWS, 3]
    rows, columns, labels, weight = sum_over(made, totals)
    assert (rows, labels, weight) == (n, int(y.sum()), w.sum() if weighted else 0.0)
    np.testing.assert_array_equal(columns, X.sum(axis=0))
    assert [block.start for block in made] == [0, BLOCK_ROWS, 2 * BLOCK_ROWS]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("memory", [0, 2**40])
def test_no_rows_and_errors_reach_the_caller(threads: int, memory: int) -> None:
    def fail(block: Block) -> int:
        raise ArithmeticError(f"at {block.start}") if block.start == 6 else KeyError("later")

    with at_most(threads):
        with pytest.raises(InputError, match="There are no rows"):
            sum_over(Blocks(memory=memory), totals)
        made = stored(some_blocks([6, 2, 2, 2]), memory).part(1, 4)
        with pytest.raises(ArithmeticError, match="at 6"):
            sum_over(made, fail)
        assert sum_over(made, totals)[0] == 6


def test_tuples_are_added_entry_by_entry_and_keep_their_type() -> None:
    a = Block(np.ones((1, 2)), np.ones(2, np.int8), np.ones(2), 1)
    both = added(a, a)
    assert isinstance(both, Block)
    assert both.start == 2
    np.testing.assert_array_equal(both.columns, [[2.0, 2.0]])
    assert added((1, 2.0), (3, 4.0)) == (4, 6.0)
    with pytest.raises(ValueError, match="shorter"):
        added((1, 2), (3,))


@pytest.mark.parametrize("place", ["missing", "a file"])
def test_a_directory_that_is_none_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").write_text("")
    made = Blocks(memory=0, directory=tmp_path / place)
    with pytest.raises(InputError, match=f"No scratch file can be made: .*{place}"):
        made.append(some_blocks([3])[0])


def test_a_scratch_file_that_cannot_grow_is_an_error_with_advice(tmp_path: Path) -> None:
    """The limit on the size of files stands for a full disk: both fail in the write."""
    program = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        import numpy as np
        from fedipw.tables.partitions import Block, Blocks, sum_over
        from fedipw.errors import InputError
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        made = Blocks(memory=0, directory=Path(sys.argv[1]))
        block = Block(np.ones((4, 500)), np.ones(500, np.int8), np.empty(0))
        for _ in range(6):
            made.append(block)
        assert sum_over(made, lambda block: block.rows) == 3000
        try:
            for _ in range(20):
                made.append(block)
            sum_over(made, lambda block: block.rows)
        except InputError as error:
            print(error)
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "The scratch file could not grow beyond 0.0 GiB" in done.stdout
    assert f"free space in {tmp_path} or set TMPDIR" in done.stdout
    assert list(tmp_path.iterdir()) == []  # the file never had a name


def test_a_frame_standardises_and_its_matrix_takes_coefficients_along() -> None:
    rng = np.random.default_rng(1)
    columns = rng.normal(size=(3, 50)) * [[1.0], [1e-6], [1e6]] + [[0.0], [3.0], [1e9]]
    weights = rng.random(50)
    frame = Frame.of(columns, weights)
    inside = frame.standard(columns.copy())
    share = weights / weights.sum()
    np.testing.assert_allclose(inside @ share, 0.0, atol=1e-7)
    np.testing.assert_allclose((inside**2) @ share, 1.0, rtol=1e-7)
    beta = np.array([0.3, 2e5, -1e-6, 0.7])  # of the columns and, last, the constant
    there = frame.matrix() @ beta
    np.testing.assert_allclose(
        there[:-1] @ inside + there[-1], beta[:-1] @ columns + beta[-1], rtol=1e-9
    )


@pytest.mark.parametrize("weights", [None, np.ones(4), np.zeros(4)])
def test_a_column_without_variation_keeps_its_unit(weights: FloatArray | None) -> None:
    frame = Frame.of(np.array([[7.0] * 4, [1e9] * 4]), weights)
    np.testing.assert_array_equal(frame.scale, [1.0, 1.0])
    assert np.isfinite(frame.centre).all()
    empty = Frame.of(np.empty((2, 0)))
    np.testing.assert_array_equal(empty.matrix(), np.eye(3))
