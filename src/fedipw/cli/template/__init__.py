"""A new Flower app whose model serves the whole population, from the files beside this module."""

from __future__ import annotations

import re
import shutil
import tempfile
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from fedipw.errors import InputError, UnwritableError

_SUFFIX = ".tpl"


def new_app(directory: str | Path) -> list[Path]:
    """Write a new app to a directory that is not there yet, and return its files.

    The name of the directory is the app's; its package has underscores in the place of dashes.
    Nothing is ever overwritten, and what fails leaves nothing behind.

    >>> new_app(tempfile.gettempdir())
    Traceback (most recent call last):
    ...
    fedipw.errors.InputError: ... is there already: choose a directory that is not.
    """
    place = Path(directory)
    name = place.resolve().name
    package = name.replace("-", "_").replace(".", "_").lower()
    if not re.fullmatch(r"[a-z][a-z0-9_]*", package):
        raise InputError(
            f"{name!r} cannot be the name of an app: it begins with a letter and has letters, "
            "digits, dashes and underscores."
        )
    if place.exists() or place.is_symlink():
        raise InputError(f"{place} is there already: choose a directory that is not.")
    words = {"name": name, "package": package}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=place.parent))
        try:
            _copied(files(__name__), made, words)
            made.chmod(0o755)
            made.rename(place)  # an empty directory made meanwhile is all it could replace
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    except OSError as error:
        raise UnwritableError(f"{place} cannot be made: {error.strerror}.") from error
    return sorted(path for path in place.rglob("*") if path.is_file())


def _copied(source: Traversable, target: Path, words: dict[str, str]) -> None:
    """Copy the files of the template with their words put in."""
    for entry in source.iterdir():
        if entry.is_dir() and entry.name == "app":
            folder = target / words["package"]
            folder.mkdir()
            _copied(entry, folder, words)
        elif entry.name.endswith(_SUFFIX):
            text = Template(entry.read_text(encoding="utf-8")).substitute(words)
            (target / entry.name.removesuffix(_SUFFIX)).write_text(text, encoding="utf-8")
