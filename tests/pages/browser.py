"""A real Chromium for tests of pages: opened, watched for complaints, and asked questions."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PROBES = (Path(__file__).parent / "probes.js").read_text()
Scheme = Literal["light", "dark"]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Give a browser, or skip the test and say why."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: Browser, path: Path, *, width: int = 1280, scheme: Scheme = "light", **settings: Any
) -> Iterator[Page]:
    """Give a page, and fail if it complained, asked for the network or opened a dialog."""
    complaints: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(f"console: {message.text}")

    def on_dialog(dialog: Dialog) -> None:
        complaints.append("a dialog")
        dialog.dismiss()

    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, **settings
    )
    try:
        page = context.new_page()
        page.on("console", on_console)
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", on_dialog)
        page.on("request", lambda request: complaints.append(f"request: {request.url}"))
        page.goto(path.as_uri())
        assert complaints.pop(0) == f"request: {path.as_uri()}"
        yield page
    finally:
        context.close()
    assert not complaints, complaints


def asked(page: Page, question: str) -> Any:
    """Return the answer to a call of one of the probes."""
    return page.evaluate(f"() => {{ {PROBES}\n return {question}; }}")


def resized(page: Page, width: int) -> None:
    """Change the width and wait until everything is drawn again."""
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("new Promise((done) => setTimeout(() => requestAnimationFrame(done), 50))")


def all_open(page: Page, on: bool = True) -> None:
    """Open, or close, every part that is shown on demand."""
    page.evaluate("(on) => document.querySelectorAll('details').forEach((d) => d.open = on)", on)


def artifacts(otherwise: Path) -> Path:
    """Return where pictures go: FEDIPW_ARTIFACTS, or a directory of the test."""
    named = os.environ.get("FEDIPW_ARTIFACTS")
    directory = Path(named) if named else otherwise
    directory.mkdir(parents=True, exist_ok=True)
    return directory
