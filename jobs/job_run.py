"""One claimed job in the runner: which rows are still to run, and what becomes of finished ones.

It knows the store and the results folder; it knows nothing of processes.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from jobs.achieved import together
from jobs.chain_input import take_input
from jobs.dataset import OnProgress, count_rows
from jobs.id_counts import IdCounter
from jobs.isolation import Isolation
from jobs.messages import BatchDone, Progress
from jobs.progress_log import ProgressLog
from jobs.publish import claim_folder, give_back_unused
from jobs.records import Job, JobError, JobState, Part, Shard, UnreachableError
from jobs.resume_check import check_unchanged_job, new_input_files
from jobs.store import JobStore

RECORD_INTERVAL_S = 2.0
WINDOW_SHARDS = 64
MAX_LOSSES_KEPT = 5  # of one engine, in the job's record
PUBLISH_RETRY_S = 60.0  # to ask takes seconds, in which no batch is committed
MAX_SPOOLED_PARTS = 8  # that wait for the store of the results, about
# Asked for rows [begin, end): their outputs that are not to run, as in `Shard.done`, ascending.
Settled = Callable[[int, int], npt.NDArray[np.int64]]
_EXCUSED = "errors_excused"  # in the job's record
_DEVICES: Mapping[str, Literal["cpu", "gpu"]] = {"cpu": "cpu", "cuda": "gpu"}
_COUNTS = (
    "rows_on_board",
    "rows_waiting",
    "num_sweeps",
    "prompt_tokens",
    "completion_tokens",
    "num_preempted",
)

log = logging.getLogger("jobs.job_run")


@dataclass(slots=True)
class _EngineTold:
    """What one of the engines has told. losses: why it was lost, each time"""

    facts: dict[str, Any] = field(default_factory=dict)
    progress: Progress | None = None
    losses: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        progress = self.progress
        return {
            "node": self.facts.get("node"),
            "device_name": self.facts.get("device_name"),
            "num_threads": self.facts.get("num_threads"),
            "load_s": self.facts.get("load_s"),
            "rows_on_board": progress.rows_on_board if progress else 0,
            "rows_waiting": progress.rows_waiting if progress else 0,
            "tokens_per_s": progress.achieved.get("tokens_per_s") if progress else None,
            "losses": self.losses[-MAX_LOSSES_KEPT:],
            "num_lost": len(self.losses),
        }


class Publisher(Protocol):
    """Makes a part's file appear in the results folder, whole; accepts one already there."""

    def __call__(self, job: Job, part: Part, blobs: Sequence[bytes]) -> None: ...


class JobRun:
    """What the runner does with a job's rows, from its claim to its end.

    publish: makes part files
    clock: Unix seconds
    """

    def __init__(
        self,
        store: JobStore,
        job: Job,
        publish: Publisher,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.job = job
        self.isolations: defaultdict[int, Isolation] = defaultdict(Isolation)  # of each engine
        self._store = store
        self._publish = publish
        self._clock = clock
        self._record: dict[str, Any] = dict(job.record)
        self._recorded_at = 0.0
        self._engines: dict[int, _EngineTold] = {}
        self._progress_log = ProgressLog(next(reversed(store.progress_points(job.id)), None))
        self._num_done = job.num_ok + job.num_error
        self._num_ok = job.num_ok
        self.total = job.total or 0
        self._num_rows = self.total
        self.num_samples = job.spec.samples
        # A row of many samples counts as many, so that a shard is about as much work for any job.
        self._shard_rows = max(1, job.spec.shard_rows // job.spec.samples)
        self._selection: npt.NDArray[np.int64] | None = None
        self._publish_at = 0.0  # of the monotonic clock, after the store did not answer

    # ---- before the first row ------------------------------------------------------------

    def open(self, on_progress: OnProgress = lambda _: None) -> None:
        """Look for changes since the submit; count the rows; finish what an earlier runner began.

        on_progress: called now and then while the model is read and rows are counted, or copied
            from an earlier job; may raise to stop that

        Raises ChangedError: the input, the model or the program has changed.
        Raises JobError: the results of the job before it are not to be read.
        """
        if self.job.spec.after is not None and not self.job.manifest.files:
            self.job = take_input(self._store, self.job, on_progress)
            self._record.update(self.job.record)
        self._refuse_changes(on_progress)
        self._count_rows(on_progress)
        claim_folder(self.job.results_dir, self.job.id)
        self._complete_begun_parts()
        if not self._store.parts(self.job.id):
            self._complete_part(*self._store.begin_part(self.job.id))

    def _refuse_changes(self, on_progress: OnProgress) -> None:
        job = self.job
        found = check_unchanged_job(job, self._store.parts(job.id), on_progress)
        if found != job.fingerprint:
            self._store.set_fingerprint(job.id, found)
            self.job = replace(job, fingerprint=found)
        for path in new_input_files(job):
            log.warning("job %s: %s came after the submit and is not read", job.id, path)

    def _count_rows(self, on_progress: OnProgress) -> None:
        job, limit = self.job, self.job.spec.limit
        ids = None if "input" in self._record else IdCounter(limit)
        manifest = count_rows(
            job.manifest,
            self._store.job_dir(job.id),
            job.spec.on_bad_utf8,
            ids=ids,
            on_progress=on_progress,
        )
        if manifest is not job.manifest:
            self._store.set_manifest(job.id, manifest)
            self.job = replace(job, manifest=manifest)
        assert manifest.num_rows is not None
        self._num_rows = manifest.num_rows if limit is None else min(manifest.num_rows, limit)
        selection = self._store.selection(job.id)
        self._selection = None if selection is None else self._outputs(selection)
        outputs = self._num_rows * self.num_samples
        self.total = outputs if self._selection is None else len(self._selection)
        self._store.set_total(job.id, self.total)
        if ids is not None:
            self.note({"input": ids.facts()})

    @property
    def began_on(self) -> Literal["cpu", "gpu"] | None:
        """What computed the rows that are finished; on another device others would differ."""
        if not self._num_done:
            return None
        return _DEVICES.get(self._record.get("device", ""))

    @property
    def is_complete(self) -> bool:
        return self._num_done == self.total

    @property
    def num_done(self) -> int:
        return self._num_done

    def shards(self, without: Collection[int] = ()) -> Iterator[Shard]:
        """What is to run, in order, as row ranges. without: rows that are not"""
        settled = self._settled_without(without)
        return plan_shards(self._num_rows, self._shard_rows, settled, self.num_samples)

    def shards_of(self, rows: Sequence[int]) -> Iterator[Shard]:
        """The same for these rows alone, ascending."""
        return shards_of(rows, self._shard_rows, self.num_samples, self._settled)

    def rest_of(self, shard: Shard, without: Collection[int] = ()) -> Shard | None:
        """What is still to run of a shard; None where that is nothing."""
        done = np.union1d(self._settled_without(without)(shard.begin, shard.end), shard.done)
        rest = replace(shard, done=tuple(done.astype(np.int64).tolist()))
        return rest if self.num_outputs(rest) else None

    def _settled_without(self, rows: Collection[int]) -> Settled:
        if not rows:
            return self._settled
        samples = np.arange(self.num_samples)
        left_out = np.array(sorted(rows), np.int64)

        def settled(begin: int, end: int) -> npt.NDArray[np.int64]:
            mine = left_out[(left_out >= begin) & (left_out < end)]
            outputs = mine[:, None] * self.num_samples + samples
            return np.union1d(self._settled(begin, end), outputs.ravel())

        return settled

    def num_outputs(self, shard: Shard) -> int:
        """Outputs that a shard is to bring."""
        return (shard.end - shard.begin) * self.num_samples - len(shard.done)

    def _outputs(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Each pair of row and sample index as one number, as in `Shard.done`."""
        return keys[:, 0] * self.num_samples + keys[:, 1]

    def _settled(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Outputs of the rows [begin, end) that are finished, or that the job does not have."""
        done = self._outputs(self._store.done_keys(self.job.id, begin, end))
        if self._selection is None:
            return done
        outputs = np.arange(begin * self.num_samples, end * self.num_samples)
        return np.union1d(done, np.setdiff1d(outputs, self._selection))

    def whole_rows(self, rows: Iterable[int]) -> set[int]:
        """Those of these rows, of which an output has just ended, that have no other to come."""
        whole = set(rows)
        if self.num_samples == 1:
            return whole
        return {row for row in whole if len(self._settled(row, row + 1)) == self.num_samples}

    def too_many_errors(self) -> str | None:
        """Why the job must pause by its own limit; None where it need not.

        Rows that had failed when it last paused so count no more.
        """
        limit = error_limit(self.job.spec.max_errors, self.total)
        num_error = self._num_done - self._num_ok
        if limit is None or num_error - self._record.get(_EXCUSED, 0) <= limit:
            return None
        return (
            f"{num_error} of {self._num_done} finished rows failed, --max-errors "
            f"{self.job.spec.max_errors} allows {limit}; see them with `ntx-batch results "
            f"{self.job.id} --errors`; `ntx-batch resume {self.job.id}` goes on and counts anew"
        )

    def excuse_errors(self) -> None:
        """Let the job go on after a pause by its own limit."""
        self._record[_EXCUSED] = self._num_done - self._num_ok

    # ---- finished rows -------------------------------------------------------------------

    def commit(self, event: BatchDone) -> None:
        """Keep a batch; from the return of this on, its rows are never computed again."""
        batch = event.batch
        if batch is not None and batch.row_indices:
            self._num_done = self._store.commit_batch(self.job.id, batch)
            self._num_ok += batch.num_ok
        progress = event.progress
        began = (self._record.get("first_admission_at"), progress.first_admission_at)
        self._record["first_admission_at"] = min(
            (at for at in began if at is not None), default=None
        )
        self._record["last_commit_at"] = self._clock()
        if progress.kv_accuracy is not None:
            self._record["kv_accuracy"] = dict(progress.kv_accuracy)
        self._engine(event.engine).progress = progress
        self._note_progress()
        self._progress_log.take(
            event.attempt,
            progress,
            num_ok=self._num_ok,
            num_error=self._num_done - self._num_ok,
            now=self._clock(),
            engine=event.engine,
        )
        if self._clock() - self._recorded_at >= RECORD_INTERVAL_S:
            self.save_record()

    def cut_part_if_due(self) -> None:
        """Publish what the spool holds when it is large or old enough.

        Where the store of the results does not answer, rows stay in the spool for a while.

        Raises UnreachableError: there are very many by now.
        """
        if time.monotonic() < self._publish_at:
            return
        spec, size = self.job.spec, self._store.spool_size(self.job.id)
        age_s = 0.0 if size.oldest_at is None else self._clock() - size.oldest_at
        # A negative age says that the clock was set back, and not how old the rows are.
        is_due = size.nbytes >= spec.part_nbytes or not 0 <= age_s < spec.part_interval_s
        if not (self._publish_at or (is_due and size.num_rows)):
            return
        try:
            if self._publish_at:
                self._complete_begun_parts()
            if is_due and size.num_rows:
                self._complete_part(*self._store.begin_part(self.job.id))
            self._publish_at = 0.0
        except UnreachableError as error:
            if size.nbytes >= MAX_SPOOLED_PARTS * spec.part_nbytes:
                raise
            log.warning("job %s: finished rows stay in the spool: %s", self.job.id, error)
            self._publish_at = time.monotonic() + PUBLISH_RETRY_S

    def note(self, facts: Mapping[str, Any]) -> None:
        """Add facts to the job's record."""
        self._record.update(facts)
        self.save_record()

    def note_engine(self, number: int, facts: Mapping[str, Any]) -> None:
        """Add facts about one of the engines; those of the first stand for all."""
        self._engine(number).facts.update(facts)
        if number == min(self._engines):
            self._record.update(facts)
        counted = [
            each.facts["energy"] for each in self._engines.values() if "energy" in each.facts
        ]
        if counted:
            self._record["energy"] = _merged(counted)
        self._note_progress()
        self.save_record()

    def note_loss(self, number: int, reason: str) -> None:
        """An engine is lost: nothing is on board there."""
        engine = self._engine(number)
        engine.losses.append(reason)
        if engine.progress is not None:
            engine.progress = replace(engine.progress, rows_on_board=0, rows_waiting=0)
        self._note_progress()

    def forget_engines(self) -> None:
        """All of them are gone, and others come."""
        self._engines.clear()

    def _engine(self, number: int) -> _EngineTold:
        return self._engines.setdefault(number, _EngineTold())

    def _note_progress(self) -> None:
        """Put what the engines do together, and each of them, into the record."""
        told = [each.progress for each in self._engines.values() if each.progress is not None]
        if told:
            self._record["progress"] = {key: sum(getattr(p, key) for p in told) for key in _COUNTS}
        if parts := [progress.achieved for progress in told if progress.achieved]:
            self._record["achieved"] = together(parts)
        self._record["engines"] = [
            self._engines[number].record() for number in sorted(self._engines)
        ]

    def save_record(self, *, is_last: bool = False) -> None:
        """Keep the record, and how far the job is. is_last: the job leaves the runner"""
        self._recorded_at = self._clock()
        point = self._progress_log.next_point(is_last=is_last)
        self._store.set_record(self.job.id, self._record, point)

    # ---- the end -------------------------------------------------------------------------

    def finish(self) -> JobState:
        """All rows are in: publish the rest and say how the job ended."""
        self._publish_rest()
        self.save_record(is_last=True)
        if self.total and not self._num_ok:
            reason = f"none of {self.total} rows succeeded; see error_code in its results"
            self._store.set_state(self.job.id, "failed", reason=reason)
            return "failed"
        self._store.set_state(self.job.id, "completed")
        return "completed"

    def stop(self, state: JobState, reason: str | None = None) -> None:
        """The job leaves the runner with rows still to run; those in the spool stay readable."""
        if state in ("failed", "cancelled"):
            try:
                self._publish_rest()
            except (JobError, OSError):
                log.exception("job %s: its last part is not published", self.job.id)
        self.save_record(is_last=True)
        self._store.set_state(self.job.id, state, reason=reason)

    def _publish_rest(self) -> None:
        self._complete_begun_parts()
        if self._store.spool_size(self.job.id).num_rows:
            self._complete_part(*self._store.begin_part(self.job.id))

    def _complete_begun_parts(self) -> None:
        """Parts whose files may be there or not: an earlier runner, or a store, left them so."""
        for part, blobs in self._store.unfinished_parts(self.job.id):
            self._complete_part(part, blobs)

    def _complete_part(self, part: Part, blobs: list[bytes]) -> None:
        self._publish(self.job, part, blobs)
        self._store.commit_part(self.job.id, part.number)
        blobs.clear()
        give_back_unused()


def _merged(facts: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """What the meters of several engines count, and what they leave out, each thing once."""
    return {
        key: list(dict.fromkeys(name for each in facts for name in each[key]))
        for key in ("counted", "left_out")
    }


def error_limit(max_errors: str | None, total: int) -> int | None:
    """The failed rows that a job of `total` rows may have: "10" is ten, "5%" a share of all."""
    if max_errors is None:
        return None
    if max_errors.endswith("%"):
        return int(total * float(max_errors[:-1]) / 100)
    return int(max_errors)


def plan_shards(
    num_rows: int,
    shard_rows: int,
    settled: Settled,
    num_samples: int = 1,
    window_shards: int = WINDOW_SHARDS,
) -> Iterator[Shard]:
    """Cut [0, num_rows) into row ranges, leaving out those that are finished whole.

    settled: asked for `window_shards` shards at a time, since each call reads whole parts
    """
    window_rows = shard_rows * window_shards
    for first in range(0, num_rows, window_rows):
        last = min(first + window_rows, num_rows)
        done = np.unique(settled(first, last))
        for begin in range(first, last, shard_rows):
            end = min(begin + shard_rows, last)
            bounds = np.searchsorted(done, [begin * num_samples, end * num_samples])
            mine = done[slice(*bounds)]
            if len(mine) < (end - begin) * num_samples:
                number = begin // shard_rows
                yield Shard(number=number, begin=begin, end=end, done=tuple(mine.tolist()))


def shards_of(
    rows: Sequence[int], shard_rows: int, num_samples: int, settled: Settled
) -> Iterator[Shard]:
    """Row ranges, none longer than `shard_rows`, that hold these rows, ascending, and no others."""
    for number, some in itertools.groupby(rows, key=lambda row: row // shard_rows):
        members = np.array(list(some))
        begin, end = int(members[0]), int(members[-1]) + 1
        outputs = np.arange(begin * num_samples, end * num_samples)
        others = outputs[~np.isin(outputs // num_samples, members)]
        done = np.union1d(others, settled(begin, end))
        yield Shard(number=number, begin=begin, end=end, done=tuple(done.tolist()))
