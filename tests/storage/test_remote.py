"""Files by URL: copies that are made once, files that are put whole, errors that name the URL."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fedipw.errors import InputError, UnwritableError
from fedipw.storage.places import (
    copies_of,
    identity,
    local_file,
    local_path,
    place_of,
    write_texts,
    written_path,
)
from fedipw.storage.remote import Copies, Remote

fsspec: Any = pytest.importorskip("fsspec")
memory: Any = pytest.importorskip("fsspec.implementations.memory")


class Counting(memory.MemoryFileSystem):
    """A store in memory that counts what is copied from it, and may lose its network."""

    protocol = "counting"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    got: ClassVar[list[str]] = []
    put: ClassVar[list[str]] = []
    lost: ClassVar[bool] = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix(f"{cls.protocol}://")))

    def get_file(self, rpath: str, lpath: str, **more: Any) -> None:
        self.got.append(rpath)
        if self.lost:
            Path(lpath).write_bytes(b"half")
            raise ConnectionResetError("the network is gone")
        super().get_file(rpath, lpath, **more)

    def put_file(self, lpath: str, rpath: str, **more: Any) -> None:
        self.put.append(rpath)
        super().put_file(lpath, rpath, **more)
        if self.lost:
            raise ConnectionResetError("the network is gone")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an empty store at ``counting://``."""
    for name, empty in {"store": {}, "pseudo_dirs": [""], "got": [], "put": []}.items():
        monkeypatch.setattr(Counting, name, empty)
    fsspec.register_implementation(Counting.protocol, Counting, clobber=True)
    return fsspec.filesystem("counting")


def test_a_url_is_told_from_a_path() -> None:
    assert place_of("s3://bucket/people/") == Remote("s3://bucket/people")
    assert place_of("simplecache::s3://bucket/x.csv") == Remote("simplecache::s3://bucket/x.csv")
    for text in ("people.csv", "a:b/people.csv", "/x/s3:/y", "C:/x", ""):
        assert place_of(text) == Path(text)
    assert place_of("file:///data/x.csv") == Path("/data/x.csv")
    with pytest.raises(InputError, match="give a URL as text"):
        place_of(Path("s3://bucket/x.csv"))
    with pytest.raises(InputError, match="s3://b/models: a directory of models is on a local disk"):
        local_path("s3://b/models", "a directory of models")


def test_names_of_chained_urls_end_in_the_archive() -> None:
    packed = Remote("zip://tables::s3://bucket/all.zip")
    assert (packed / "x.csv").url == "zip://tables/x.csv::s3://bucket/all.zip"
    assert (packed / "x.csv").name == "x.csv"
    assert (Remote("simplecache::s3://bucket/t") / "x.csv").name == "x.csv"


def test_two_names_of_one_place_are_known(store: Any, tmp_path: Path) -> None:
    del store
    one, other = place_of("counting://b/x/"), place_of("counting:///b/x")
    assert one != other
    assert identity(one) == identity(other) != identity(place_of("memory://b/x"))
    (tmp_path / "link").symlink_to(tmp_path / "x.csv")
    assert identity(tmp_path / "link") == identity(tmp_path / "x.csv")


def test_a_file_is_copied_once_and_again_when_it_changed(store: Any) -> None:
    store.pipe_file("/b/x.csv", b"one")
    place = place_of("counting://b/x.csv")
    for _ in range(3):
        with local_file(place) as path:
            assert path.read_bytes() == b"one"
    assert path.name.endswith("-x.csv")  # the suffix says how it is read
    assert len(store.got) == 1
    store.pipe_file("/b/x.csv", b"two")
    with local_file(place) as path:
        assert path.read_bytes() == b"two"
    assert len(store.got) == 2


def test_copies_beyond_the_limit_go_with_their_last_reader(store: Any, tmp_path: Path) -> None:
    for name in "abc":
        store.pipe_file(f"/b/{name}", name.encode() * 40)
    copies, left = Copies(tmp_path, kept=100), {}
    for _ in range(2):
        for name in "abc":
            copy = copies.copy(Remote(f"counting://b/{name}"))
            again = copies.copy(Remote(f"counting://b/{name}"))
            assert again.path.read_bytes() == name.encode() * 40
            del copy
            assert again.path.exists()  # somebody reads it still
            left[name] = again.path
            del again
    assert [left[name].exists() for name in "abc"] == [True, True, False]
    assert [path.rpartition("/")[2] for path in store.got] == ["a", "b", "c", "c"]


def test_a_listing_tells_versions_so_that_files_are_not_asked_for(store: Any) -> None:
    for name in "ab":
        store.pipe_file(f"/b/t/{name}", name.encode())
    found = list(Remote("counting://b/t").iterdir())
    assert {one.name: one.version is None for one in found} == {"a": False, "b": False}
    assert [copy.path.read_text() for copy in copies_of(found)] == ["a", "b"]


def test_what_was_lost_on_the_way_is_not_read(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store.pipe_file("/b/x.csv", b"whole")
    place = place_of("counting://b/x.csv")
    with monkeypatch.context() as patch:
        patch.setattr(Counting, "lost", True)
        with (
            pytest.raises(InputError, match=r"^counting://b/x.csv cannot be read: the network"),
            local_file(place),
        ):
            pass
    with local_file(place) as path:
        assert path.read_bytes() == b"whole"


def test_a_file_is_put_once_it_is_whole(store: Any) -> None:
    place = place_of("counting://b/out.csv")
    with written_path(place) as path:
        path.write_text("whole")
        assert not place.exists()
    assert store.cat_file("/b/out.csv") == b"whole"
    assert not path.exists()
    with pytest.raises(ZeroDivisionError), written_path(place) as path:
        path.write_text(str(1 / 0))
    assert store.cat_file("/b/out.csv") == b"whole"
    write_texts({place: "page", place_of("counting://b/more.json"): "{}"})
    assert store.cat_file("/b/out.csv") == b"page"
    assert store.cat_file("/b/more.json") == b"{}"


def test_where_half_a_file_shows_it_gets_its_name_at_the_end(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of("counting://b/out.csv")
    with written_path(place) as path:
        path.write_text("former")
    with monkeypatch.context() as patch:
        patch.setattr(Counting, "lost", True)
        with pytest.raises(UnwritableError, match="the network"), written_path(place) as path:
            path.write_text("new")
    assert store.cat_file("/b/out.csv") == b"former"
    assert store.find("/b") == ["/b/out.csv"]
    assert all(name.endswith(".partial") for name in store.put)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nowhere://b/x.csv", "nowhere://b/x.csv cannot be read: ValueError: Protocol not known"),
        ("memory://b/none.csv", "No file memory://b/none.csv"),
        ("zip://x.csv::memory://b/none.zip", "cannot be read: "),
    ],
)
def test_errors_name_the_url(url: str, said: str) -> None:
    with pytest.raises(InputError, match=said), local_file(place_of(url)):
        pass


def test_without_the_extra_an_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(InputError, match=r"URLs need the extra `remote`: pip install 'fedipw\["):
        place_of("s3://bucket/x.csv").exists()
    assert place_of("file:///none/x.csv").exists() is False  # needs none


def test_a_url_travels_and_keeps_its_password_to_itself() -> None:
    place = Remote("ftp://me:secret@host/x.csv?signature=ab", "v1")
    assert pickle.loads(pickle.dumps(place)).version == "v1"
    assert "secret" not in f"{place} {place!r}"
    assert "signature" not in f"{place} {place!r}"
