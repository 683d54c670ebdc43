"""A limit on memory: sizes as people write them, blocks that keep to it, an error beyond it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cli.command import Files
from fedipw.errors import InputError
from fedipw.storage import memory
from fedipw.storage.memory import SMALLEST, block_memory, bytes_of, check_memory, memory_limit
from fedipw.tables.partitions import Block, Blocks
from worlds import World


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("12", 12),
        ("3GB", 3 * 10**9),
        ("3 gb", 3 * 10**9),
        ("2GiB", 2**31),
        ("1.5M", 1500000),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-3GB", "3TB", "three", "3 G B", "1e9", "IB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no size of memory"):
        bytes_of(text)


def test_blocks_keep_a_share_of_the_limit_and_the_rest_on_disk(tmp_path: Path) -> None:
    with memory_limit(SMALLEST):
        share = block_memory()
        assert share == (SMALLEST - 500 * 10**6) // 8
        blocks = Blocks(directory=tmp_path)
    held = []
    for k in range(6):
        columns = np.full((1, 10**6), float(k))
        blocks.append(Block(columns, np.zeros(10**6, dtype=np.int8), np.empty(0)))
        held.append(sum(isinstance(entry, Block) for entry in blocks._entries))
    assert held == [1, 2, 3, 4, 4, 4]  # of 9 MB each, 37.5 MB in all
    assert [block.columns[0, 0] for block in blocks] == list(range(6))


def test_what_was_used_beyond_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    check_memory()  # no limit holds
    here = memory.resident()
    monkeypatch.setattr(memory, "SMALLEST", 0)
    with memory_limit(here + 400 * 10**6):
        check_memory()
        more = np.ones(60 * 10**6)
        del more
        with pytest.raises(InputError, match=r"more than the .* GB to keep to.*Raise --memory"):
            check_memory()
    check_memory()


def test_commands_keep_to_it_or_say_that_they_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files.of(World(), tmp_path).put()
    near, _ = files.weighed()
    assert files.weighed("--memory", "20GB")[0].equals(near)
    code, _, said = files.weights("--memory", "100MB")
    assert (code, "800 MB of memory at least" in said) == (2, True)
    monkeypatch.setattr(memory, "SMALLEST", 0)
    before = files.listing()
    code, _, said = files.weights("--memory", "10MB")
    assert (code, "Raise --memory" in said) == (2, True)
    assert files.listing() == before
