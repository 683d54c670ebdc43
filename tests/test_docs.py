"""What the README and the pages of the documentation show works, and prints what they say.

The tutorial is followed with nothing but the wheel, in ``test_tutorial``.
"""

from pathlib import Path

import pytest

from shown import (
    Block,
    assert_prints,
    blocks_of,
    follow,
    in_process,
    in_terminal,
    loose_commands,
    pages,
)

SHOWING = {
    page.name: page
    for page in pages()
    if page.name != "tutorial.md" and any(block.is_run for block in blocks_of(page))
}


@pytest.mark.parametrize("name", SHOWING)
def test_a_page_works_from_an_empty_directory(name: str, tmp_path: Path) -> None:
    follow(SHOWING[name], tmp_path, in_process)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_command_is_in_a_block_that_is_run_or_says_why_not(page: Path) -> None:
    assert not loose_commands(page)


def test_some_pages_have_examples() -> None:
    assert {"README.md", "testbed.md", "theory.md"} <= set(SHOWING)


def test_blocks_and_their_commands_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ echo a \\\n    b\na b\n$ true\n```\n\n```sh\n# not run: why\nfedipw\n```\n"
        "```python\nprint(1)\n```\n```text\n1\n```\n    fedipw weights\n\n```\nmake demo\n```\n"
    )
    blocks = blocks_of(page)
    assert [(block.kind, block.is_run) for block in blocks] == [
        ("console", True), ("sh", False), ("python", True), ("text", False),
    ]  # fmt: skip
    assert blocks[0].commands == [("echo a     b", "a b"), ("true", "")]
    assert Block("sh", "a  # why\n\n# b\nc \\\n d\n").commands == [("a", ""), ("c  d", "")]
    assert loose_commands(page) == ["fedipw weights", "make demo"]
    assert follow(page, tmp_path, in_process) == 2


@pytest.mark.parametrize(
    "fence", ["python", "py", "{code-block} python", "{code-block} py\n:caption: a sum\n"]
)
def test_python_is_run_however_its_fence_is_spelt(fence: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```{fence}\nprint(1 + 1)\n```\n\n```text\n2\n```\n")
    assert follow(page, tmp_path, in_process) == 1
    page.write_text(f"```{fence}\n# not run: why\nprint(1 + 1)\n```\n")
    assert [block.is_run for block in blocks_of(page)] == [False]


def test_what_is_printed_is_compared() -> None:
    assert_prints("a  1.25\nb\nc\nd\n", "a 1.2...\n...\nd", "")
    assert_prints("│ a │\n└───┘\nend", "│ a  │\n└────┘\nend", "")
    for wrong in ("a 1.3...\n...\nd", "a 1.25\nb\nd", "a 1.25\nb\nc"):
        with pytest.raises(AssertionError, match="the page has"):
            assert_prints("a 1.25\nb\nc\nd\n", wrong, "")


def test_a_command_that_fails_is_noticed(tmp_path: Path) -> None:
    assert in_terminal("test -t 1 && tput cols", tmp_path).split() == ["100"]
    for run in (in_process, in_terminal):
        with pytest.raises(AssertionError, match="weights"):
            run("fedipw weights", tmp_path)
