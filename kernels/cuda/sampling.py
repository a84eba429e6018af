"""Next tokens of rows of logits on the device; only ids and wanted log-probabilities come back.

The kernel gives integers, sums of probabilities among them; logarithms are taken here. So choices
and log-probabilities are those of `kernels.cpu.sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt

from kernels.choices import MOST_LOGPROBS, ONE_WEIGHT, Choices, Edits, new_choices
from kernels.cuda.matrix import DeviceArray
from kernels.cuda.modules import get_kernel
from kernels.cuda.scratch import Scratch
from kernels.cuda.uploads import Uploads

ROOM = "weight"  # the buffer that it shares
ROOM_NBYTES = 64 << 20  # of rows that are chosen for at once, for what top_k, top_p and min_p need
_ALIGNMENT = 16
_THREADS = 1024
_NUM_LISTS = 5  # of all rows: those of the edits, and their waves
_TOP_NBYTES = 8 * MOST_LOGPROBS  # of a row: ids, and values of all rows behind those of all rows
_OUTCOME = np.dtype(
    [
        ("total", np.int64),
        ("high", np.float32),
        ("logit", np.float32),
        ("token", np.int32),
        ("status", np.int32),
    ]
)


def choose(
    logits: DeviceArray,
    specs: npt.NDArray[np.void],
    edits: Edits,
    num_tokens: int,
    scratch: Scratch,
    uploads: Uploads,
) -> Choices:
    """See `kernels.ops.Ops.choose`."""
    num_rows = len(specs)
    if num_rows == 0:
        return new_choices(0)
    num_top = num_rows if (specs["num_logprobs"] > 0).any() else 0
    results = cp.empty(num_rows * _OUTCOME.itemsize + num_top * _TOP_NBYTES, cp.uint8)
    top_ids = results.data.ptr + num_rows * _OUTCOME.itemsize
    top_values = top_ids + num_top * _TOP_NBYTES // 2
    num_gathered, num_weights = _room(specs, num_tokens)
    waves = _waves(specs, edits.ids)
    chunks = list(_chunks(8 * (num_gathered + num_weights)))
    rooms = [_rooms(num_gathered[rows], num_weights[rows]) for rows in chunks]
    all_specs, *lists = _bring(uploads, [specs, *edits, waves, *rooms])
    originals = cp.empty(len(edits.seen_ids) + len(edits.ids), cp.float32)
    stride = logits.strides[0] // 4
    for index, rows in enumerate(chunks):
        num_kept, num_weighed = int(num_gathered[rows].sum()), int(num_weights[rows].sum())
        values, ids, weights = scratch.take_all(
            ROOM,
            (((num_kept,), cp.float32), ((num_kept,), cp.int32), ((num_weighed,), cp.int64)),
        )
        first = rows.start
        get_kernel("sampling.cu", "choose_rows")(
            (rows.stop - first,),
            (_THREADS,),
            (
                np.int32(num_tokens),
                np.int64(stride),
                np.uint64(logits.data.ptr + first * stride * 4),
                np.uint64(all_specs + first * specs.itemsize),
                *(np.uint64(address) for address in lists[:_NUM_LISTS]),
                np.int32(waves.max(initial=-1) + 1),
                originals,
                np.int32(len(edits.seen_ids)),
                np.uint64(lists[_NUM_LISTS + index]),
                values,
                ids,
                weights,
                np.uint64(results.data.ptr + first * _OUTCOME.itemsize),
                np.uint64(top_ids + first * _TOP_NBYTES // 2),
                np.uint64(top_values + first * _TOP_NBYTES // 2),
            ),
        )
    return _choices(specs, num_tokens, cp.asnumpy(results))


def _bring(uploads: Uploads, arrays: list[npt.NDArray[Any]]) -> list[int]:
    """Addresses of arrays on the device, to which they come together."""
    parts, ends = [], [0]
    for array in arrays:
        data = array.tobytes()
        parts.append(data + bytes(-len(data) % _ALIGNMENT))
        ends.append(ends[-1] + len(parts[-1]))
    (there,) = uploads.bring([np.frombuffer(b"".join(parts), np.uint8)])
    return [int(there.data.ptr) + begin for begin in ends[:-1]]


def _room(
    specs: npt.NDArray[np.void], num_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """By row, how many values top_k keeps, and how many weights top_p and min_p look at."""
    draws = specs["temperature"] > 0
    if not draws.any():
        none = np.zeros(len(specs), np.int64)
        return none, none
    gathers = draws & (specs["top_k"] > 0) & (specs["top_k"] < num_tokens)
    cuts = draws & ((specs["top_p"] < 1) | (specs["min_p"] > 0))
    num_gathered = np.where(gathers, specs["top_k"], 0)
    return num_gathered, np.where(cuts, np.where(gathers, specs["top_k"], num_tokens), 0)


def _rooms(
    num_gathered: npt.NDArray[np.int64], num_weights: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """(num_rows, 2): where what a row needs begins, one row behind the other; -1 for none."""
    counts = np.stack([num_gathered, num_weights], axis=1)
    return np.where(counts > 0, np.cumsum(counts, axis=0) - counts, -1)


def _chunks(nbytes: npt.NDArray[np.int64]) -> Iterator[slice]:
    """Rows that fit `ROOM_NBYTES` together; at least one at a time."""
    ends = np.cumsum(nbytes)
    begin = 0
    while begin < len(ends):
        before = ends[begin] - nbytes[begin]
        end = int(np.searchsorted(ends, before + ROOM_NBYTES, side="right"))
        yield slice(begin, max(end, begin + 1))
        begin = max(end, begin + 1)


def _waves(specs: npt.NDArray[np.void], ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """By edit, how many edits before it are of the same token of the same row."""
    if len(ids) == 0:
        return np.empty(0, np.int32)
    rows = np.repeat(np.arange(len(specs)), specs["edit_end"] - specs["edit_begin"])
    keys = rows << 32 | ids
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    waves = np.empty(len(ids), np.int32)
    waves[order] = np.arange(len(ids)) - np.repeat(starts, np.diff(starts, append=len(ids)))
    return waves


def _choices(
    specs: npt.NDArray[np.void], num_tokens: int, results: npt.NDArray[np.uint8]
) -> Choices:
    choices, outcomes_nbytes = new_choices(len(specs)), len(specs) * _OUTCOME.itemsize
    found, top = results[:outcomes_nbytes].view(_OUTCOME), results[outcomes_nbytes:]
    choices.token_ids[:], choices.status[:] = found["token"], found["status"]
    choices.logprobs[:] = found["logit"]
    wanted = specs["num_logprobs"]
    if (wanted < 0).all():
        return choices
    half = len(top) // 2
    ids = top[:half].view(np.int32).reshape(-1, MOST_LOGPROBS)
    values = top[half:].view(np.float32).reshape(-1, MOST_LOGPROBS)
    for row in np.flatnonzero((wanted >= 0) & (found["total"] > 0)):
        norm = float(found["high"][row]) + math.log(float(found["total"][row]) / ONE_WEIGHT)
        choices.logprobs[row] -= norm
        count = min(int(wanted[row]), num_tokens)
        if count:
            logprobs = values[row, :count].astype(np.float64) - norm
            order = np.argsort(-logprobs, kind="stable")
            choices.top_ids[row, :count] = ids[row, :count][order]
            choices.top_logprobs[row, :count] = logprobs[order]
    return choices
