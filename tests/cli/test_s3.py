"""Commands on a real S3 interface, that of a server on this machine, in processes of their own.

``make s3`` installs what these tests need; without it they are left out.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from worlds import World

from .command import Files, succeeded

pytest.importorskip("s3fs", reason="needs s3fs: make s3")
pytest.importorskip("flask_cors", reason="needs flask-cors: make s3")
boto3: Any = pytest.importorskip("boto3", reason="needs moto[s3]: make s3")
server: Any = pytest.importorskip("moto.server", reason="needs moto[s3]: make s3")

WORLD = World(size=200, rounds=3, seed=5, covariates=("age",), metric=pl.col("age"))
KEYS = {
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not every request
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture(scope="module")
def bucket(address: str) -> Iterator[Any]:
    store = boto3.resource(
        "s3", endpoint_url=address, region_name=KEYS["AWS_DEFAULT_REGION"],
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
    )  # fmt: skip
    yield store.create_bucket(Bucket="devices")
    store.meta.client.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, bucket: Any) -> Files:
    """Return files on a disk, which are in the bucket too, the population in two parts."""
    made = Files.of(WORLD, tmp_path_factory.mktemp("world")).put()
    (made.where / "people").mkdir()
    for k, part in enumerate((made.people[:90], made.people[90:])):
        part.write_parquet(made.where / "people" / f"part-{k:06d}.parquet")
    for path in made.where.rglob("*.parquet"):
        bucket.upload_file(str(path), str(path.relative_to(made.where)))
    return made


def process(address: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fedipw", *arguments],
        check=False, capture_output=True, text=True,
        env=os.environ | KEYS | {"AWS_ENDPOINT_URL": address} | more,
    )  # fmt: skip


def given(at: object) -> list[str]:
    return ["--population", f"{at}/people", "--rounds", f"{at}/rounds"]


def objects(bucket: Any, start: str) -> dict[str, bytes]:
    return {o.key: o.get()["Body"].read() for o in bucket.objects.filter(Prefix=start)}


def test_weights_in_a_bucket_are_those_on_a_disk(
    address: str, bucket: Any, files: Files, tmp_path: Path
) -> None:
    """Also over a larger table; and no copy stays in the temporary directory."""
    succeeded("weights", *given(files.where), "--out", tmp_path / "weights")
    (part,) = (tmp_path / "weights").iterdir()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    # a larger table was there before, and a program was killed while it wrote
    for name in ("part-000000", "part-000001", "_unfinished-ab/part-000000"):
        bucket.put_object(Key=f"out/weights/{name}.parquet", Body=b"former")
    bucket.put_object(Key="out/weights/_SUCCESS", Body=b"")
    asked = ["weights", *given("s3://devices"), "--out", "s3://devices/out/weights/", "--force"]
    done = process(address, *asked, TMPDIR=str(scratch))
    assert done.returncode == 0, done.stderr
    assert objects(bucket, "out/weights/") == {
        "out/weights/_SUCCESS": b"",
        "out/weights/_unfinished-ab/part-000000.parquet": b"former",
        f"out/weights/{part.name}": part.read_bytes(),
    }
    assert not list(scratch.iterdir())


def test_a_page_in_a_bucket_is_that_on_a_disk(
    address: str, bucket: Any, files: Files, tmp_path: Path
) -> None:
    succeeded("audit", *given(files.where), "--out", tmp_path / "a.html")
    done = process(address, "audit", *given("s3://devices"), "--out", "s3://devices/out/a.html")
    assert done.returncode == 0, done.stderr
    assert objects(bucket, "out/a.html") == {"out/a.html": (tmp_path / "a.html").read_bytes()}


def test_a_bucket_that_is_not_there_is_bad_input(address: str, bucket: Any, files: Files) -> None:
    del files
    before = objects(bucket, "")
    done = process(address, "weights", *given("s3://devices"), "--out", "s3://nowhere/w.csv")
    assert done.returncode == 2, done.stderr
    said = "s3://nowhere/w.csv cannot be written: 'nowhere' is not there, or not yours."
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert objects(bucket, "") == before
