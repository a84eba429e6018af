-- The state of all jobs. The runner alone writes progress; `submit` inserts a job, clients set `request`.
-- Version: PRAGMA user_version, the number of the last step applied (step_NNN.sql).

CREATE TABLE job (
    num INTEGER PRIMARY KEY AUTOINCREMENT,  -- order of submission, whatever the clock does
    id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN (
        'queued',       -- -> running, paused, cancelled, failed (with the job that it waits for)
        'running',      -- -> paused, interrupted, completed, failed, cancelled
        'paused',       -- -> queued, cancelled, failed (as above)
        'interrupted',  -- its runner died -> running, paused, cancelled
        'completed',    -- every row is finished, at least one ok or none there
        'failed',       -- no row ok, or the job could not run -> queued (also when the job that it waits for is resumed)
        'cancelled'     -- -> queued
    )),
    request TEXT CHECK (request IN ('pause', 'cancel')),  -- of a client, to the runner
    reason TEXT,
    spec TEXT NOT NULL,
    manifest TEXT NOT NULL,
    environment TEXT NOT NULL,
    record TEXT NOT NULL DEFAULT '{}',
    results_dir TEXT NOT NULL UNIQUE,  -- one folder belongs to one job
    created_at REAL NOT NULL,
    started_at REAL,
    finished_at REAL,
    attempt INTEGER NOT NULL DEFAULT 0,
    total INTEGER,
    num_ok INTEGER NOT NULL DEFAULT 0,
    num_error INTEGER NOT NULL DEFAULT 0,
    prompt_tokens INTEGER NOT NULL DEFAULT 0,
    completion_tokens INTEGER NOT NULL DEFAULT 0,
    key TEXT,  -- of `submit --key`: no two jobs have the same
    retry_of TEXT REFERENCES job (id) ON DELETE SET NULL,  -- whose failed rows it runs again
    fingerprint TEXT,  -- of the model, and the numerics revision
    reused_tokens INTEGER NOT NULL DEFAULT 0,  -- of prompt_tokens, not computed again
    num_copied INTEGER NOT NULL DEFAULT 0,  -- rows that are copies of others
    schedule TEXT,  -- the name of the schedule that made it
    run INTEGER,  -- which of that schedule's runs it is
    after TEXT REFERENCES job (id) ON DELETE SET NULL,  -- whose results it is to read; null once it has them
    waits INTEGER NOT NULL DEFAULT 0 CHECK (waits IN (0, 1)),  -- for that job; of a failed one: failed with that job
    priority INTEGER NOT NULL DEFAULT 0,  -- higher ones run first
    CHECK (total IS NULL OR num_ok + num_error <= total)
) STRICT;

-- Serves claim_job: of the jobs with the highest priority, the oldest one.
CREATE INDEX job_waiting ON job (priority DESC, num) WHERE state IN ('queued', 'interrupted');

-- Serves the search for jobs that wait for others.
CREATE INDEX job_after ON job (after) WHERE after IS NOT NULL;

-- Serves `submit --key`: the first of several at once wins.
CREATE UNIQUE INDEX job_key ON job (key);

-- Serves the search for a job's retries.
CREATE INDEX job_retry ON job (retry_of) WHERE retry_of IS NOT NULL;

-- The output rows of a job that does not run its whole input. row_keys: packed (store.pack_keys).
CREATE TABLE selection (
    job_id TEXT PRIMARY KEY NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    num_rows INTEGER NOT NULL,
    row_keys BLOB NOT NULL
) STRICT;

-- Published Parquet files. row_keys: the part's (row, sample) pairs, packed (store.pack_keys), so
-- that finished rows stay known after the spool forgets them.
CREATE TABLE part (
    job_id TEXT NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN (
        'publishing',  -- its rows are chosen; the file may be there or not -> committed
        'committed'    -- the file is there and its rows have left the spool
    )),
    num_rows INTEGER NOT NULL,
    first_row INTEGER,
    last_row INTEGER,
    row_keys BLOB NOT NULL,
    PRIMARY KEY (job_id, number),
    CHECK ((num_rows = 0) = (first_row IS NULL))
) STRICT;

-- Finished rows that are in no committed part: Arrow IPC streams.
CREATE TABLE spool_batch (
    id INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    part_number INTEGER,
    num_rows INTEGER NOT NULL,
    created_at REAL NOT NULL,
    ipc BLOB NOT NULL,
    FOREIGN KEY (job_id, part_number) REFERENCES part (job_id, number)
) STRICT;

-- Serves every query of one job's spool, and the choice of batches that no part has taken.
CREATE INDEX spool_batch_of_part ON spool_batch (job_id, part_number);

-- Keys of the spool's rows: no row twice.
CREATE TABLE spool_row (
    job_id TEXT NOT NULL,
    row_index INTEGER NOT NULL CHECK (row_index >= 0),
    sample_index INTEGER NOT NULL CHECK (sample_index >= 0),
    batch_id INTEGER NOT NULL REFERENCES spool_batch (id) ON DELETE CASCADE,
    PRIMARY KEY (job_id, row_index, sample_index)
) STRICT, WITHOUT ROWID;

-- Serves the deletion of a batch and of its keys.
CREATE INDEX spool_row_of_batch ON spool_row (batch_id);

-- What a job had done at some moments, as sums from its first row on: progress_log.ProgressPoint.
CREATE TABLE progress_point (
    id INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    at REAL NOT NULL,
    work_s REAL NOT NULL,
    num_ok INTEGER NOT NULL,
    num_error INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    sweep_s REAL NOT NULL,
    wait_s REAL NOT NULL,
    streamed_nbytes INTEGER NOT NULL,
    energy_j REAL
) STRICT;

-- Serves the reading and thinning of a job's points.
CREATE INDEX progress_point_of_job ON progress_point (job_id);

-- The runner that last held runner.lock. It informs; the lock decides.
CREATE TABLE runner (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    pid INTEGER NOT NULL,
    pid_start_time REAL NOT NULL,
    boot_id TEXT NOT NULL,
    host TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN (
        'running',  -- -> stopping
        'stopping'  -- claims no more jobs -> running, by the next runner
    )),
    environment TEXT NOT NULL,
    started_at REAL NOT NULL,
    heartbeat_at REAL NOT NULL
) STRICT;

-- What runs by the clock. spec: as in jobs/schedule_store.py. A name is one for people; num_runs counts on,
-- so that no two runs have the same number.
CREATE TABLE schedule (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    spec TEXT NOT NULL,
    environment TEXT NOT NULL,
    created_at REAL NOT NULL,
    paused_at REAL,  -- null where it is not paused
    looked_at REAL NOT NULL,  -- occurrences up to here are decided on
    next_at REAL,  -- the first occurrence after that, null where there is none
    num_runs INTEGER NOT NULL DEFAULT 0
) STRICT;

-- What became of each occurrence, and of runs by hand. That an occurrence is here says that it is decided on.
CREATE TABLE schedule_run (
    id INTEGER PRIMARY KEY,
    schedule_id INTEGER NOT NULL REFERENCES schedule (id) ON DELETE CASCADE,
    scheduled_at REAL,  -- the occurrence; null for a run by hand, and for what was missed
    decided_at REAL NOT NULL,
    number INTEGER,  -- null where no job was made
    state TEXT NOT NULL CHECK (state IN (
        'waiting',  -- for the run before it -> as its job, nothing, refused
        'skipped',  -- the run before it was not over
        'missed',  -- no runner was there, and the schedule does not catch up
        'nothing',  -- there was nothing to do
        'refused',  -- no job could be made
        'queued', 'running', 'paused', 'interrupted', 'completed', 'failed', 'cancelled'  -- its job is
    )),
    reason TEXT,
    num_missed INTEGER NOT NULL DEFAULT 0,  -- earlier occurrences that it stands for
    job_id TEXT REFERENCES job (id) ON DELETE SET NULL,
    held TEXT CHECK (held IN ('window', 'max_runtime')),  -- why its schedule has paused the job
    ran_s REAL NOT NULL DEFAULT 0,  -- how long the job ran since it was last queued
    UNIQUE (schedule_id, scheduled_at)
) STRICT;

-- Serves the triggers below and the runner's look at its job.
CREATE INDEX schedule_run_of_job ON schedule_run (job_id) WHERE job_id IS NOT NULL;

-- Serves the search for runs that are not over.
CREATE INDEX schedule_run_open ON schedule_run (schedule_id)
WHERE state IN ('waiting', 'queued', 'running', 'paused', 'interrupted');

-- Input files or ids that runs of a schedule took, each with the last run that did. They are done when that run's job
-- has completed, and free again when it failed or was cancelled.
CREATE TABLE schedule_item (
    schedule_id INTEGER NOT NULL REFERENCES schedule (id) ON DELETE CASCADE,
    item TEXT NOT NULL,
    run_id INTEGER NOT NULL REFERENCES schedule_run (id) ON DELETE CASCADE,
    PRIMARY KEY (schedule_id, item)
) STRICT, WITHOUT ROWID;

-- Serves the deletion of a run.
CREATE INDEX schedule_item_of_run ON schedule_item (run_id);

-- A run is in the state of its job.
CREATE TRIGGER schedule_run_follows AFTER UPDATE OF state ON job WHEN NEW.schedule IS NOT NULL
BEGIN
    UPDATE schedule_run
    SET state = NEW.state, reason = NEW.reason,
        held = iif(NEW.state = 'paused', held, NULL),
        ran_s = iif(NEW.state = 'queued', 0, ran_s)
    WHERE job_id = NEW.id;
END;

-- A job that is removed before its end has done nothing for good.
CREATE TRIGGER schedule_run_loses BEFORE DELETE ON job
WHEN OLD.schedule IS NOT NULL AND OLD.state NOT IN ('completed', 'failed', 'cancelled')
BEGIN
    UPDATE schedule_run SET state = 'cancelled', reason = 'its job was removed', held = NULL
    WHERE job_id = OLD.id;
END;

-- Whom a job tells of its end. target: JSON, a URL, or a command and its folder. What is due is done at least once: the
-- row says so from the transaction of the job's end until the one after the delivery.
CREATE TABLE hook (
    id INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    event TEXT NOT NULL CHECK (event IN ('finish', 'failure')),
    target TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'idle' CHECK (state IN (
        'idle',       -- the job is not over -> due
        'due',        -- at next_at -> running; -> idle when the job goes on
        'running',    -- pid is at it -> delivered, failed, due again
        'delivered',  -- -> due when the job ends once more
        'failed'      -- given up -> due when the job ends once more
    )),
    num_ends INTEGER NOT NULL DEFAULT 0,  -- which end of the job this is about
    num_attempts INTEGER NOT NULL DEFAULT 0,  -- for this end
    next_at REAL,
    pid INTEGER,
    pid_start_time REAL,
    boot_id TEXT,
    exit_status INTEGER,  -- of the last attempt: a command's, or an HTTP status
    error TEXT,
    tried_at REAL,
    UNIQUE (job_id, event)
) STRICT;

-- Serves the runner's look at what is due.
CREATE INDEX hook_open ON hook (next_at) WHERE state IN ('due', 'running');

-- A job is over: whoever is to be told is, from the same transaction on.
CREATE TRIGGER hook_falls_due AFTER UPDATE OF state ON job
WHEN NEW.state IN ('completed', 'failed', 'cancelled') AND NEW.state != OLD.state
BEGIN
    UPDATE hook
    SET state = 'due', num_ends = num_ends + 1, num_attempts = 0, next_at = 0, pid = NULL,
        exit_status = NULL, error = NULL, tried_at = NULL
    WHERE job_id = NEW.id AND (event = 'finish' OR NEW.state = 'failed');
END;

-- A job goes on: there is no end to tell of any more.
CREATE TRIGGER hook_is_taken_back AFTER UPDATE OF state ON job
WHEN OLD.state IN ('completed', 'failed', 'cancelled')
    AND NEW.state NOT IN ('completed', 'failed', 'cancelled')
BEGIN
    UPDATE hook SET state = 'idle', next_at = NULL WHERE job_id = NEW.id AND state = 'due';
END;

-- Jobs as programs read them.
CREATE VIEW job_with_hooks AS
SELECT job.*, (
    SELECT json_group_array(json_object(
        'id', id, 'event', event, 'target', json(target), 'state', state,
        'num_attempts', num_attempts, 'exit_status', exit_status, 'error', error,
        'tried_at', tried_at
    ))
    FROM hook WHERE job_id = job.id
) AS hooks
FROM job;
