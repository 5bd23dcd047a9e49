"""Write objects below a place in a bucket, by tensorstore. Needs the extra `io`.

Requests that fail are repeated with growing pauses, by tensorstore for most faults and here for the others, until
`SECONDS_IN_ALL` have passed. Only then OutputError says what is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from znnpy.errors import MissingExtraError, OutputError, VolumeError
from znnpy.extras import install
from znnpy.messages import excerpt, option
from znnpy.volume.location import Location
from znnpy.volume.object_store import NEVER, REFUSED, SECONDS, context, kvstore_spec, remote_error

try:
    import tensorstore as ts
except ImportError:
    raise MissingExtraError(f"outputs in buckets need the package tensorstore; `{install('io')}`") from None

T = TypeVar("T")

SECONDS_IN_ALL = 60.0  # after which a request is given up that keeps failing
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 4.0  # seconds between attempts
PASSING = ("NOT_FOUND", "ABORTED", "UNAVAILABLE", "DATA_LOSS", "FAILED_PRECONDITION", "INTERNAL")  # may pass by itself
ERRORS = (ValueError, RuntimeError, OSError, TimeoutError, NotImplementedError)  # raised by tensorstore
MOST_BYTES = 2**26  # of an object that is read


class Bucket:
    """The objects whose keys begin with the place and a slash."""

    def __init__(self, place: Location) -> None:
        """Remember the place; OutputError if the bucket cannot be listed."""
        self.place = place
        self.limits = context()
        self.spec = kvstore_spec(place)
        self._store = self.repeated(
            lambda: ts.KvStore.open(self.spec, context=self.limits).result(timeout=SECONDS), is_first=True
        )

    def check(self) -> None:
        """Raise OutputError unless the bucket is there and may be listed: some writing to no bucket never ends."""
        nothing = ts.KvStore.KeyRange(".znnpy", ".znnpy\0")
        self.repeated(lambda: self._store.list(nothing).result(timeout=SECONDS), is_first=True)

    def read(self, key: str) -> bytes | None:
        """Return an object; None where there is none, by the bucket's own list."""
        asked = self.repeated(lambda: self._store.read(key).result(timeout=SECONDS))
        if asked.state == "missing" and self.holds(key):
            asked = self.repeated(lambda: self._present(key))
        return bytes(asked.value) if asked.state == "value" else None

    def holds(self, key: str) -> bool:
        """Return whether the bucket lists an object of this key."""
        return bool(self._listed(ts.KvStore.KeyRange(key, f"{key}\0")))

    def every(self, folder: str = "") -> list[str]:
        """Return the keys of all objects below a folder, sorted; "" for all below the place."""
        return sorted(self._listed(_below(folder)))

    def write(self, key: str, content: bytes) -> None:
        """Write an object, whatever is there."""
        self.repeated(lambda: self._store.write(key, content).result(timeout=SECONDS))

    def create(self, key: str, content: bytes) -> bool:
        """Write an object where none is; return whether it is there with this content: another may have been first."""
        absent = self.repeated(lambda: self._store.read(f"{key}.none").result(timeout=SECONDS)).stamp.generation
        return self.repeated(lambda: self._created(key, content, absent))

    def remove(self, folder: str) -> None:
        """Remove all objects below a folder; "" for all below the place."""
        self._remove(lambda: self._store.delete_range(_below(folder)).result(timeout=SECONDS), _below(folder))

    def remove_one(self, key: str) -> None:
        """Remove an object if it is there."""
        self._remove(lambda: self._store.write(key, None).result(timeout=SECONDS), ts.KvStore.KeyRange(key, f"{key}\0"))

    def _remove(self, ask: Callable[[], Any], keys: Any) -> None:
        """Remove objects until the bucket lists none: an answer that one is not there is taken for its removal."""

        def removed() -> None:
            ask()
            if left := self._listed(keys):
                raise ValueError(f"ABORTED: {left[0]} could not be removed")

        self.repeated(removed)

    def repeated(self, ask: Callable[[], T], *, is_first: bool = False) -> T:
        """Return what a request gives, repeated while its faults may pass by themselves; OutputError afterwards.

        is_first  whether nothing was asked before, so that a bucket or a host which is not there has not vanished
        """
        until, pause = time.monotonic() + SECONDS_IN_ALL, FIRST_PAUSE
        while True:
            try:
                return ask()
            except ERRORS as error:
                said = str(error)
                is_passing = said.startswith(PASSING) and not REFUSED.search(said)
                is_passing = is_passing and not (is_first and NEVER.search(said))
                if not is_passing or time.monotonic() + pause > until:
                    raise self.error(error, resumes=not is_first) from None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def error(self, error: BaseException, *, resumes: bool = True) -> OutputError:
        """Return an error of the bucket in one sentence; `resumes`: with the advice to continue."""
        said = str(remote_error(self.place, error if isinstance(error, Exception) else RuntimeError(str(error))))
        said = said.replace("cannot be read", "cannot be written").replace("may read it", "may write it")
        return OutputError(
            f"{said.removesuffix('; run it again')}; continue with {option('resume', True)}" if resumes else said
        )

    def _present(self, key: str) -> Any:
        """Read an object that is known to be there; ValueError if the bucket says that it is not."""
        asked = self._store.read(key).result(timeout=SECONDS)
        if asked.state == "missing":
            raise ValueError(f"NOT_FOUND: {key} is listed, and could not be read")
        return asked

    def _created(self, key: str, content: bytes, absent: bytes) -> bool:
        """Write an object where none is, once. A refusal is believed only where the object is there."""
        if self._store.write(key, content, if_equal=absent).result(timeout=SECONDS).generation:
            return True
        found = self.read(key)
        if found is None:
            raise ValueError(f"ABORTED: {key} was not written, and is not there")
        return found == content  # the answer to an earlier attempt may be lost

    def _listed(self, keys: Any) -> list[str]:
        found = self.repeated(lambda: self._store.list(keys).result(timeout=SECONDS))
        return [one.decode() if isinstance(one, bytes) else str(one) for one in found]


def _below(folder: str) -> Any:
    return ts.KvStore.KeyRange(f"{folder}/", f"{folder}0") if folder else ts.KvStore.KeyRange()


def check_place(place: Location, reads: Sequence[Location]) -> None:
    """Raise OutputError for an output that would be a whole bucket, or replace or contain something that is read."""
    if place.scheme in ("http", "https"):
        raise OutputError(
            f"{place} is on a web server, which takes no files; give a path, s3:// or gs:// in {option('out')}"
        )
    if not place.key:
        raise OutputError(f"the output {place} is a whole bucket; give a name inside it in {option('out')}")
    for read in reads:
        for name, what in ((place.place, place.name), (f"{place.place}.journal", f"{place.name}.journal")):
            theirs = read.place
            if name == theirs:
                why = "is"
            elif theirs.startswith(f"{name}/"):
                why = "contains"
            elif name.startswith(f"{theirs}/"):
                why = "is inside"
            else:
                continue
            raise OutputError(
                f"the output {place}, which writes to {excerpt(what)}, {why} {theirs}, which is read; give another "
                f"name in {option('out')}"
            )


def check_bucket(place: Location) -> Bucket:
    """Open the place of an output; OutputError for a bucket that cannot be listed."""
    try:
        bucket = Bucket(place)
        bucket.check()
    except VolumeError as error:
        raise OutputError(str(error)) from None
    return bucket
