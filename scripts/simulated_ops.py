"""A compute backend that computes nothing: the engine's own policy runs on it at full speed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.choices import OK, Choices, Edits, Rows, new_choices
from kernels.cpu.pages import page_nbytes, row_nbytes
from kernels.host_pages import pages_read, pages_written, runs_of
from kernels.ops import Batch, Float32, KvPool, KvShape, KvTravel, KvType
from kernels.quants import BlockTensor
from nvme import ReadRequest, ReadStats

Lengths = npt.NDArray[np.int64]  # tokens that each row generates, by its index


@dataclass(frozen=True, slots=True)
class RowEnds:
    """When rows end, known to nobody but the backend.

    end_id: ends a row that has it as a stop token; other_id: ends none
    """

    lengths: Lengths
    end_id: int
    other_id: int

    def applied(self, chosen: npt.NDArray[np.int32], specs: Rows) -> npt.NDArray[np.int32]:
        """Choices of rows with `end_id` where a row ends, and nowhere else."""
        ends = self.lengths[specs["row_index"]] == specs["position"] + 1
        others = np.where(chosen == self.end_id, self.other_id, chosen)
        return np.where(ends, self.end_id, others).astype(np.int32)


@dataclass(frozen=True, slots=True)
class BlankPool:
    """A KV pool of which nothing but the size is there."""

    num_pages: int
    num_host_pages: int
    kv_type: KvType
    page_nbytes: int


@dataclass(frozen=True, slots=True)
class BlankMatrix:
    """A weight of which nothing but the shape is there."""

    num_outputs: int
    num_inputs: int
    nbytes: int
    layout: str = "gguf-rows"


class SimulatedOps:
    """Answers what an engine asks around a sweep; operations of the sweep itself it has none.

    It counts the KV pages in host memory that a device would copy.
    """

    name = "simulated"
    num_workers = 1
    default_kv_type: KvType = "f16"
    product_way = "none"
    runs_in_order = True
    frees_pages = False
    copies = None

    def __init__(self, ends: RowEnds) -> None:
        self.ends = ends
        self._pool = BlankPool(0, 0, "f16", 0)
        self._in_nbytes = self._out_nbytes = 0

    def close(self) -> None:
        pass

    def run_sweep(self, plan: Any, key: Hashable, body: Callable[[int], None]) -> None:
        pass

    def plan(self, batch: Batch, shape: KvShape, num_heads: int) -> None:
        pool = self._pool
        if pool.num_host_pages:
            read = runs_of(pages_read(batch, pool.num_pages, pool.kv_type))
            written = pages_written(batch, pool.num_pages, pool.kv_type)
            self._in_nbytes += int((read[:, 1] - read[:, 0]).sum()) * pool.page_nbytes
            self._out_nbytes += len(written) * pool.page_nbytes

    def pack(self, tensors: Sequence[BlockTensor], *, expand: bool) -> BlankMatrix:
        num_outputs = sum(tensor.num_outputs for tensor in tensors)
        nbytes = sum(tensor.data.nbytes for tensor in tensors)
        return BlankMatrix(num_outputs, tensors[0].num_inputs, nbytes)

    def empty(self, num_rows: int, width: int) -> Float32:
        return np.empty((num_rows, width), np.float32)

    def shared(self, nbytes: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        memory = np.empty(nbytes, np.uint8)
        return memory, memory

    def put(self, array: Float32) -> Float32:
        return array

    def get(self, array: Float32) -> Float32:
        return array

    def kv_pool(
        self,
        shape: KvShape,
        *,
        num_pages: int,
        kv_type: KvType,
        num_rows: int = 0,
        num_host_pages: int = 0,
    ) -> KvPool:
        nbytes = page_nbytes(shape, kv_type)
        self._pool = BlankPool(num_pages, num_host_pages, kv_type, nbytes)
        return self._pool

    def kv_travel(self, pool: KvPool) -> KvTravel:
        return KvTravel(in_nbytes=self._in_nbytes, out_nbytes=self._out_nbytes)

    def kv_page_nbytes(self, shape: KvShape, kv_type: KvType) -> int:
        return page_nbytes(shape, kv_type)

    def kv_row_nbytes(self, shape: KvShape, kv_type: KvType) -> int:
        return row_nbytes(shape, kv_type)

    def kv_copy(self, pool: KvPool, source: int, target: int) -> None:
        pass

    def choose(self, logits: Float32, specs: Rows, edits: Edits, num_tokens: int) -> Choices:
        choices = new_choices(len(specs))
        choices.status[:] = OK
        choices.token_ids[:] = self.ends.other_id
        return choices._replace(token_ids=self.ends.applied(choices.token_ids, specs))


class BlankReader:
    """A reader that leaves what it is to fill as it is."""

    name = "blank"
    path_taken = "nothing is read"
    alignment = 1
    max_transfer_nbytes = 1 << 30
    reaches_device = False

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def submit(self, requests: Sequence[ReadRequest]) -> None:
        return None

    def done(self, ticket: None) -> bool:
        return True

    def wait(self, ticket: None) -> None:
        pass

    def stats(self) -> ReadStats:
        return ReadStats()

    def close(self) -> None:
        pass
