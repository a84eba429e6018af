"""Models split over several GGUF files: find the shards and check that they belong together."""

from __future__ import annotations

import re
from pathlib import Path

from engine.gguf_header import DOWNLOAD_HINT, Header, listed, read_header
from engine.requests import GgufError

SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def read_shards(header: Header) -> list[Header]:
    """Headers of all shards, in order."""
    count = header.int_value("split.count", default=1)
    if count <= 1:
        return [header]
    paths = _shard_paths(header, count)
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise GgufError(
            f"{header.path}: {len(missing)} of {count} shards are missing in "
            f"{header.path.parent}: {listed(missing)}; download them too"
        )
    headers = [read_header(path) for path in paths]
    for number, shard in enumerate(headers):
        _check_shard(shard, number, count, headers[0])
    _check_num_tensors(headers)
    return headers


def _shard_paths(header: Header, count: int) -> list[Path]:
    match = SHARD_NAME.fullmatch(header.path.name)
    if match is None or int(match["count"]) != count:
        number = header.int_value("split.no", default=0) + 1
        raise GgufError(
            f"{header.path}: shard {number} of {count}, so its name must end in "
            f"-{number:05d}-of-{count:05d}.gguf; rename it back"
        )
    names = [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    return [header.path.with_name(name) for name in names]


def _check_shard(shard: Header, number: int, count: int, first: Header) -> None:
    found = (shard.int_value("split.no", default=-1), shard.int_value("split.count", default=-1))
    if found != (number, count):
        raise GgufError(
            f"{shard.path}: says it is shard {found[0] + 1} of {found[1]}, not {number + 1} of "
            f"{count} as its name does; the shards are mixed up: {DOWNLOAD_HINT}"
        )
    key = "split.tensors.count"
    totals = (shard.int_value(key, default=-1), first.int_value(key, default=-1))
    if totals[0] != totals[1]:
        raise GgufError(
            f"{shard.path}: belongs to a model of {totals[0]} tensors, but {first.path.name} to "
            f"one of {totals[1]}; the shards are of different models"
        )


def _check_num_tensors(headers: list[Header]) -> None:
    expected = headers[0].int_value("split.tensors.count", default=-1)
    found = sum(len(header.tensors) for header in headers)
    if expected not in (-1, found):
        raise GgufError(
            f"{headers[0].path}: its {len(headers)} shards hold {found} tensors, {expected} were "
            "split; the shards are of different models"
        )
