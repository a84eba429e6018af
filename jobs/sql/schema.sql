-- The state of all jobs. The runner alone writes progress; `submit` inserts a job, clients set `request`.
-- Version: PRAGMA user_version, the number of the last step applied (step_NNN.sql).

CREATE TABLE job (
    num INTEGER PRIMARY KEY AUTOINCREMENT,  -- order of submission, whatever the clock does
    id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN (
        'queued',       -- -> running, paused, cancelled
        'running',      -- -> paused, interrupted, completed, failed, cancelled
        'paused',       -- -> queued, cancelled
        'interrupted',  -- its runner died -> running, paused, cancelled
        'completed',    -- every row is finished, at least one ok or none there
        'failed',       -- no row ok, or the job could not run -> queued
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
    CHECK (total IS NULL OR num_ok + num_error <= total)
) STRICT;

-- Serves claim_job: the oldest job that waits.
CREATE INDEX job_waiting ON job (num) WHERE state IN ('queued', 'interrupted');

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
