"""The examples on the documentation's pages run and print what the pages say."""

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = sorted(p.name for p in DOCS.glob("*.md") if "```python\n" in p.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES)
def test_examples_print_what_the_page_says(page: str) -> None:
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    shared: dict[str, object] = {}
    for (kind, text), (after, expected) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if kind == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(text, page, "exec"), shared)
            if after == "text":
                assert printed.getvalue().split() == expected.split(), text


def test_some_pages_have_examples() -> None:
    assert {"testbed.md", "theory.md"} <= set(PAGES)
