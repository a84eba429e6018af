"""Next tokens of rows of logits on the device; only ids and wanted log-probabilities come back.

The kernel gives integers, sums of probabilities among them; logarithms are taken here. So choices
and log-probabilities are those of `kernels.cpu.sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

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
_THREADS = 1024
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
    wants_top = bool((specs["num_logprobs"] > 0).any())
    num_top = num_rows if wants_top else 0
    outcomes = cp.empty((num_rows, _OUTCOME.itemsize), cp.uint8)
    top_ids = cp.empty((num_top, MOST_LOGPROBS), cp.int32)
    top_values = cp.empty((num_top, MOST_LOGPROBS), cp.float32)
    num_gathered, num_weights = _room(specs, num_tokens)
    waves = _waves(specs, edits.ids)
    chunks = list(_chunks(8 * (num_gathered + num_weights)))
    rooms = [
        np.stack([_places(num_gathered[rows]), _places(num_weights[rows])], axis=1)
        for rows in chunks
    ]
    of_chunks = [
        array for rows, room in zip(chunks, rooms, strict=True) for array in (specs[rows], room)
    ]
    num_lists = len(edits) + 1
    brought = uploads.bring([*edits, waves, *of_chunks])
    lists, there = brought[:num_lists], brought[num_lists:]
    originals = cp.empty(len(edits.seen_ids) + len(edits.ids), cp.float32)
    for index, rows in enumerate(chunks):
        num_kept, num_weighed = int(num_gathered[rows].sum()), int(num_weights[rows].sum())
        values, ids, weights = scratch.take_all(
            ROOM,
            [((num_kept,), cp.float32), ((num_kept,), cp.int32), ((num_weighed,), cp.int64)],
        )
        get_kernel("sampling.cu", "choose_rows")(
            (rows.stop - rows.start,),
            (_THREADS,),
            (
                np.int32(num_tokens),
                np.int64(logits.strides[0] // 4),
                logits[rows],
                there[2 * index],
                *lists,
                np.int32(waves.max(initial=-1) + 1),
                originals,
                np.int32(len(edits.seen_ids)),
                there[2 * index + 1],
                values,
                ids,
                weights,
                outcomes[rows],
                top_ids[rows],
                top_values[rows],
            ),
        )
    return _choices(specs, num_tokens, outcomes, top_ids, top_values)


def _room(
    specs: npt.NDArray[np.void], num_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """By row, how many values top_k keeps, and how many weights top_p and min_p look at."""
    draws = specs["temperature"] > 0
    gathers = draws & (specs["top_k"] > 0) & (specs["top_k"] < num_tokens)
    cuts = draws & ((specs["top_p"] < 1) | (specs["min_p"] > 0))
    num_gathered = np.where(gathers, specs["top_k"], 0)
    return num_gathered, np.where(cuts, np.where(gathers, specs["top_k"], num_tokens), 0)


def _places(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where each of so many items begins, one behind the other; -1 for none."""
    return np.where(counts > 0, np.cumsum(counts) - counts, -1)


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
    rows = np.repeat(np.arange(len(specs)), specs["edit_end"] - specs["edit_begin"])
    keys = rows << 32 | ids
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    waves = np.empty(len(ids), np.int32)
    waves[order] = np.arange(len(ids)) - np.repeat(starts, np.diff(starts, append=len(ids)))
    return waves


def _choices(
    specs: npt.NDArray[np.void],
    num_tokens: int,
    outcomes: DeviceArray,
    top_ids: DeviceArray,
    top_values: DeviceArray,
) -> Choices:
    found = cp.asnumpy(outcomes).view(_OUTCOME)[:, 0]
    ids, values = cp.asnumpy(top_ids), cp.asnumpy(top_values)
    choices = new_choices(len(specs))
    choices.token_ids[:], choices.status[:] = found["token"], found["status"]
    choices.logprobs[:] = found["logit"]
    for row in np.flatnonzero((specs["num_logprobs"] >= 0) & (found["total"] > 0)):
        norm = float(found["high"][row]) + math.log(float(found["total"][row]) / ONE_WEIGHT)
        choices.logprobs[row] -= norm
        count = min(int(specs["num_logprobs"][row]), num_tokens)
        if count:
            logprobs = values[row, :count].astype(np.float64) - norm
            order = np.argsort(-logprobs, kind="stable")
            choices.top_ids[row, :count] = ids[row, :count][order]
            choices.top_logprobs[row, :count] = logprobs[order]
    return choices
