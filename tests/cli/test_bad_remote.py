"""Buckets and servers that cannot be used: exit 1 and one sentence, within seconds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.support.bucket_runs import furnish, refusal, start, store_volume
from tests.support.faulty_proxy import Fault
from tests.support.object_stores import GCS_URL, S3_ENDPOINTS, behind_proxy, gcs_store, http_store, s3_store
from znnpy.cli import main
from znnpy.volume import bucket, object_store
from znnpy.volume.bucket import Bucket
from znnpy.volume.location import Location

if TYPE_CHECKING:
    from tests.support.object_stores import ObjectStore

pytestmark = pytest.mark.slow

SECONDS = 30  # within which every command ends


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a volume, a network, and what it predicts."""
    return furnish(tmp_path_factory.mktemp("bad-remote"))


@pytest.fixture(scope="module")
def stores(place: Path) -> Iterator[dict[str, ObjectStore]]:
    """Return each store, with the volume at v.zarr."""
    with s3_store() as s3, gcs_store() as gcs, http_store(place) as http:
        for kvstore in (s3.kvstore("v.zarr/"), gcs.kvstore("v.zarr/"), {"driver": "file", "path": f"{place}/v.zarr/"}):
            store_volume(place, kvstore, "zarr3")
        yield {"s3": s3, "gcs": gcs, "http": http}


@pytest.fixture(autouse=True)
def _few_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "RETRIES", {"max_retries": 2, "initial_delay": "10ms", "max_delay": "50ms"})
    monkeypatch.setattr(bucket, "SECONDS_IN_ALL", 1.0)


def refused(place: Path, volume: object, out: object, *more: str) -> str:
    """Return the sentence with which `infer` is refused."""
    began = time.monotonic()
    network = ["--network", str(place / "n.yaml"), "--no-calibrate", "--patch", "8,12,14", "--device", "cpu"]
    result = CliRunner().invoke(
        main, ["infer", str(volume), *network, "--out", str(out), *more], catch_exceptions=False
    )
    assert time.monotonic() - began < SECONDS
    assert result.exit_code == 1, result.output
    lines = [line for line in result.stderr.strip().splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    assert "[http" not in lines[0]
    return lines[0]


@pytest.mark.parametrize("mode", [[], ["--resume"], ["--overwrite"]], ids=str)
class TestMissing:
    def test_credentials(
        self, stores: dict[str, ObjectStore], place: Path, mode: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        said = "its credentials are not complete; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        assert said in refused(place, stores["s3"].url("v.zarr"), place / "out.h5", *mode)
        assert said in refused(place, place / "v.npy", stores["s3"].url("out.zarr"), *mode)

    def test_a_profile(
        self,
        stores: dict[str, ObjectStore],
        place: Path,
        mode: list[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        (tmp_path / "config").write_text("[default]\nregion = us-east-1\n")
        for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_PROFILE", "nobody")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "config"))
        said = "its credentials are not complete"
        assert said in refused(place, stores["s3"].url("v.zarr"), place / "out.h5", *mode)
        assert said in refused(place, place / "v.npy", stores["s3"].url("out.zarr"), *mode)

    def test_buckets(self, stores: dict[str, ObjectStore], place: Path, mode: list[str]) -> None:
        assert stores
        said = "there is no such bucket; check its name"
        assert said in refused(place, "s3://nowhere/v.zarr", place / "out.h5", *mode)
        assert said in refused(place, place / "v.npy", "s3://nowhere/out.zarr", *mode)
        assert said in refused(place, place / "v.npy", "gs://nowhere/out.zarr", *mode)
        assert "it holds no zarr.json" in refused(place, "gs://nowhere/v.zarr", place / "out.h5", *mode)

    def test_volumes(self, stores: dict[str, ObjectStore], place: Path, mode: list[str]) -> None:
        for store in stores.values():
            assert "none.zarr is not Zarr: it holds no zarr.json" in refused(
                place, store.url("none.zarr"), place / "out.h5", *mode
            )


# Another process asks for the kernels of a run that is resumed, with all of its retries.
@pytest.mark.parametrize("mode", [[], ["--overwrite"], pytest.param(["--resume"], marks=pytest.mark.long)], ids=str)
class TestHosts:
    def test_are_named(
        self, stores: dict[str, ObjectStore], place: Path, mode: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert stores
        for address, said in (
            ("http://host.invalid", "its host is not found; check the name"),
            ("http://127.0.0.1:9", "its server does not answer; check its address"),
        ):
            monkeypatch.setenv(S3_ENDPOINTS[0], address)
            monkeypatch.setenv(GCS_URL, address)
            for scheme in ("s3", "gs"):
                assert said in refused(place, f"{scheme}://bbb/v.zarr", place / "out.h5", *mode)
                sentence = refused(place, place / "v.npy", f"{scheme}://bbb/out.zarr", *mode)
                assert said in sentence
                assert "--resume" not in sentence
            assert said in refused(place, f"{address}/v.zarr", place / "out.h5", *mode)


class TestDenied:
    @pytest.mark.parametrize("kind", ["s3", "gcs", "http"])
    def test_volumes(self, stores: dict[str, ObjectStore], place: Path, kind: str) -> None:
        with behind_proxy(stores[kind], every=0) as (near, proxy):
            proxy.vanish("denied")
            said = refused(place, near.url("v.zarr"), place / "out.h5")
            assert "v.zarr/zarr.json cannot be read: access is denied; give credentials that may read it" in said

    @pytest.mark.parametrize("kind", ["s3", "gcs"])
    @pytest.mark.parametrize("methods", [("PUT", "POST"), ("GET", "PUT", "POST")], ids=["read-only", "all"])
    def test_outputs(self, stores: dict[str, ObjectStore], place: Path, kind: str, methods: tuple[str, ...]) -> None:
        with behind_proxy(stores[kind], every=0) as (near, proxy):
            proxy.spoil("denied", methods=methods)
            for mode in ("--resume", "--overwrite"):
                said = refused(place, place / "v.npy", near.url("denied.zarr"), mode)
                assert "cannot be written: access is denied; give credentials that may write it" in said
        assert not Bucket(Location.of(stores[kind].url("denied.zarr"))).every()

    def test_a_name_that_no_bucket_has(self, place: Path) -> None:
        assert "no bucket can have this name; check the name" in refused(place, "s3://b/v.zarr", place / "out.h5")

    def test_a_number_in_a_name_is_no_answer(self) -> None:
        refusing: Fault = "busy"
        said = object_store.remote_error("v", ValueError(f"ABORTED: Error reading c/403/404: {refusing}"))
        assert "denied" not in str(said)
        assert "not there" not in str(said)
        assert object_store.is_transient(ValueError("ABORTED: Error reading c/403/404: busy"))


class TestSilent:
    @pytest.fixture
    def silent(self) -> Iterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"

    def test_servers_are_not_waited_for(
        self, stores: dict[str, ObjectStore], place: Path, silent: str, tmp_path: Path
    ) -> None:
        assert stores
        quick = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "1", S3_ENDPOINTS[0]: silent}
        processes = [
            start(place, volume, out, environment={**os.environ, **quick})
            for volume, out in (
                (f"{silent}/v.zarr", str(tmp_path / "a.h5")),
                ("s3://bbb/v.zarr", str(tmp_path / "b.h5")),
                (str(place / "v.npy"), "s3://bbb/out.zarr"),
            )
        ]
        for process in processes:
            assert "no answer came within 10 s; run it again when the network is faster" in refusal(process)

    def test_the_wait_is_bounded_unless_the_user_says_otherwise(self) -> None:
        program = "import os, znnpy.volume.object_store as s; print(os.environ[f'TENSORSTORE_CURL_LOW_SPEED_{name}'])"
        for name, given, expected in (
            ("TIME_SECONDS", None, "15"),
            ("LIMIT_BYTES", None, "1"),
            ("TIME_SECONDS", "7", "7"),
        ):
            variable = f"TENSORSTORE_CURL_LOW_SPEED_{name}"
            environment = {key: value for key, value in os.environ.items() if key != variable}
            command = [sys.executable, "-c", program.replace("{name}", name)]
            done = subprocess.run(
                command, env={**environment, variable: given} if given else environment, capture_output=True, check=True
            )
            assert done.stdout.decode().strip() == expected

    def test_reading_ends_within_minutes(self) -> None:
        # A request is tried 1 + max_retries times, after pauses that double up to max_delay; nothing tries it anew.
        retries = 8 * [4.0]
        assert 9 * int(object_store.LOW_SPEED["TIME_SECONDS"]) + sum(retries) < 180
        for said in ("DEADLINE_EXCEEDED: CURL error Timeout was reached", "ABORTED: All retries: Timeout was reached"):
            assert not object_store.is_transient(ValueError(said))
