"""Names of files and folders: absolute paths of this machine, or URIs of a store.

A URI is kept as text, in one spelling: without a slash at the end, what a key cannot hold in a URI
percent-encoded, the store's options behind a `?`. Wildcards and the placeholders of schedules stand
for themselves in it.
"""

from __future__ import annotations

import os
import re
import urllib.parse
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from jobs.records import SpecError

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_BEGIN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_KEPT = "/!$&'()*+,;=:@~{}[]"
_SECRET_NAMES = re.compile(r"secret|token|password|passwd|key|sig$|credential", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Uri:
    """A file or folder of a store.

    authority: the bucket, the container and its account, or the host
    path: below that, decoded, without a slash at either end
    query: options of the store, sorted
    """

    scheme: str
    authority: str
    path: str
    query: str

    @property
    def root(self) -> str:
        """What the store itself is opened by."""
        return str(replace(self, path=""))

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.path.split("/")) if self.path else ()

    def at(self, path: str) -> Uri:
        """Another path of the same store."""
        return replace(self, path=path.strip("/"))

    def __str__(self) -> str:
        path = f"/{urllib.parse.quote(self.path, safe=_KEPT)}" if self.path else ""
        query = f"?{self.query}" if self.query else ""
        return f"{self.scheme}://{self.authority}{path}{query}"


def is_uri(place: str | Path) -> bool:
    return isinstance(place, str) and _BEGIN.match(place) is not None


def parse_uri(text: str) -> Uri:
    """Raises SpecError: a scheme that no store has, no bucket, or secrets, which are not shown."""
    begin = _BEGIN.match(text)
    assert begin is not None, text
    scheme, rest = begin[1].lower(), text[begin.end() :]
    place, _, query = rest.partition("?")
    authority, _, path = place.partition("/")
    options = sorted(filter(None, query.split("&")))
    uri = Uri(
        scheme=scheme,
        authority=authority,
        path="/".join(filter(None, urllib.parse.unquote(path).split("/"))),
        query="&".join(options),
    )
    if scheme not in SCHEMES:
        raise SpecError(
            f"{mask(text)}: there is no store {scheme}://; a place is a path, file://, or one of "
            f"{', '.join(f'{known}://' for known in SCHEMES)}"
        )
    _refuse_secrets(uri, text)
    if not authority and scheme not in ("hdfs", "viewfs"):
        raise SpecError(f"{mask(text)} names no bucket: write {scheme}://BUCKET/FOLDER")
    return uri


def _refuse_secrets(uri: Uri, text: str) -> None:
    """Texts of jobs go to the database, the results and the logs."""
    user, at, _ = uri.authority.rpartition("@")
    has_password = bool(at) and (":" in user or uri.scheme == "s3")
    names = [name for name, _ in _pairs(uri.query) if _SECRET_NAMES.search(name)]
    if has_password or names:
        what = "a password" if has_password else names[0]
        raise SpecError(
            f"{mask(text)} holds {what}, which would be written down with the job: take it out, "
            "and give credentials as the store's own tools take them: in the environment "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE), a profile, or the "
            "machine's role"
        )


def _pairs(query: str) -> list[tuple[str, str]]:
    return urllib.parse.parse_qsl(query, keep_blank_values=True)


def mask(text: str) -> str:
    """A URI as it may be shown: user names with passwords, and secret options, as `***`."""
    begin = _BEGIN.match(text)
    if begin is None:
        return text
    place, mark, query = text[begin.end() :].partition("?")
    authority, slash, path = place.partition("/")
    user, at, host = authority.rpartition("@")
    if at and (":" in user or begin[1].lower() == "s3"):
        authority = f"***@{host}"
    shown = [
        f"{name}=***" if _SECRET_NAMES.search(name) else option
        for option in filter(None, query.split("&"))
        for name in [option.partition("=")[0]]
    ]
    return begin[0] + authority + slash + path + mark + "&".join(shown)


# ---- either ------------------------------------------------------------------------------


def absolute(place: str | Path) -> str:
    """The one spelling of a place: an absolute path, also for file://, or a URI.

    Raises SpecError: as `parse_uri`.
    """
    if not is_uri(place):
        return os.path.abspath(place)
    text = str(place)
    if text.lower().startswith("file://"):
        path = urllib.parse.unquote(text[len("file://") :])
        if not path.startswith("/"):
            raise SpecError(f"{text} is not on this machine: write file:///PATH, or the path alone")
        return os.path.abspath(path)
    return str(parse_uri(text))


def resolved(place: str | Path) -> str:
    """As `absolute`, links followed."""
    text = absolute(place)
    return text if is_uri(text) else str(Path(text).resolve())


def names_store(*places: str | None) -> bool:
    """Whether any of these is a URI."""
    return any(place is not None and is_uri(place) for place in places)


def child(folder: str, name: str) -> str:
    """What has this name in a folder."""
    if not is_uri(folder):
        return os.path.join(folder, name)
    uri = parse_uri(folder)
    return str(uri.at(f"{uri.path}/{name}"))


def base_name(place: str) -> str:
    """The last part of a place, decoded."""
    if not is_uri(place):
        return PurePosixPath(place).name
    uri = parse_uri(place)
    return uri.parts[-1] if uri.parts else uri.authority


def is_within(place: str, folder: str) -> bool:
    """Whether a place is a folder or anywhere below it, links followed.

    Options of a store say how to reach it, not which bucket is meant.
    """
    if not (is_uri(place) or is_uri(folder)):
        return Path(place).resolve().is_relative_to(Path(folder).resolve())
    if not (is_uri(place) and is_uri(folder)):
        return False
    inner, outer = parse_uri(place), parse_uri(folder)
    same = (inner.scheme, inner.authority) == (outer.scheme, outer.authority)
    return same and inner.parts[: len(outer.parts)] == outer.parts
