"""How a sweep's tokens and attention are split over the workers; made once a sweep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.cpu.attention import task_tokens
from kernels.ops import PAGE_TOKENS, Batch, Float32, Int32, KvShape

_TASK_COST = 4  # of starting and finishing a task, in pages of one row


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """num_tokens: of the sweep
    ranges: token range [begin, end) of each worker for token-wise operations
    tasks: each worker's attention tasks, (num_tasks, 3) int32: KV head, begin, end
    scratch: each worker's attention scratch
    """

    num_tokens: int
    ranges: tuple[tuple[int, int], ...]
    tasks: tuple[Int32, ...]
    scratch: tuple[Float32, ...]


def token_range(num_tokens: int, worker: int, num_workers: int) -> tuple[int, int]:
    return num_tokens * worker // num_workers, num_tokens * (worker + 1) // num_workers


def attention_tasks(batch: Batch, shape: KvShape, num_heads: int) -> tuple[Int32, Int32]:
    """All tasks of a sweep, by segment, KV head and token, and their costs.

    Returns tasks (num_tasks, 3) and costs (num_tasks,), in query rows times pages.
    """
    group = num_heads // shape.num_kv_heads
    step = task_tokens(group)
    begins, ends = batch.segments[:, 0], batch.segments[:, 1]
    pieces = (ends - begins + step - 1) // step
    segment = np.repeat(np.arange(len(begins)), pieces * shape.num_kv_heads)
    inside = np.arange(len(segment)) - np.repeat(
        np.cumsum(pieces * shape.num_kv_heads) - pieces * shape.num_kv_heads,
        pieces * shape.num_kv_heads,
    )
    kv_head, piece = np.divmod(inside, pieces[segment])
    begin = begins[segment] + piece * step
    end = np.minimum(begin + step, ends[segment])
    pages = batch.positions[end - 1] // PAGE_TOKENS + 1
    tasks = np.stack([kv_head, begin, end], axis=1).astype(np.int32)
    return tasks, ((end - begin) * group * pages + _TASK_COST).astype(np.int32)


def split_by_cost(costs: Int32, num_workers: int) -> npt.NDArray[np.int64]:
    """Bounds (num_workers + 1,) of consecutive ranges of about equal cost."""
    done = np.cumsum(costs, dtype=np.int64)
    total = done[-1] if len(done) else 0
    bounds = np.searchsorted(done, total * np.arange(1, num_workers) / num_workers)
    return np.concatenate([[0], bounds, [len(costs)]])


def plan_sweep(
    batch: Batch, shape: KvShape, num_heads: int, scratch: tuple[Float32, ...]
) -> SweepPlan:
    """Plan for one worker per scratch array."""
    num_workers = len(scratch)
    tasks, costs = attention_tasks(batch, shape, num_heads)
    bounds = split_by_cost(costs, num_workers)
    return SweepPlan(
        num_tokens=batch.num_tokens,
        ranges=tuple(token_range(batch.num_tokens, w, num_workers) for w in range(num_workers)),
        tasks=tuple(tasks[bounds[w] : bounds[w + 1]] for w in range(num_workers)),
        scratch=scratch,
    )
