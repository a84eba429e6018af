CREATE TABLE job (
    num INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL CHECK (state IN (
        'queued',
        'running',
        'paused',
        'interrupted',
        'completed',
        'failed',
        'cancelled'
    )),
    request TEXT CHECK (request IN ('pause', 'cancel')),
    reason TEXT,
    spec TEXT NOT NULL,
    manifest TEXT NOT NULL,
    environment TEXT NOT NULL,
    record TEXT NOT NULL DEFAULT '{}',
    results_dir TEXT NOT NULL UNIQUE,
    created_at REAL NOT NULL,
    started_at REAL,
    finished_at REAL,
    attempt INTEGER NOT NULL DEFAULT 0,
    total INTEGER,
    num_ok INTEGER NOT NULL DEFAULT 0,
    num_error INTEGER NOT NULL DEFAULT 0,
    prompt_tokens INTEGER NOT NULL DEFAULT 0,
    completion_tokens INTEGER NOT NULL DEFAULT 0,
    CHECK (total IS NULL OR num_ok + num_error <= total)
) STRICT;
CREATE INDEX job_waiting ON job (num) WHERE state IN ('queued', 'interrupted');
CREATE TABLE part (
    job_id TEXT NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN (
        'publishing',
        'committed'
    )),
    num_rows INTEGER NOT NULL,
    first_row INTEGER,
    last_row INTEGER,
    row_keys BLOB NOT NULL,
    PRIMARY KEY (job_id, number),
    CHECK ((num_rows = 0) = (first_row IS NULL))
) STRICT;
CREATE TABLE spool_batch (
    id INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    part_number INTEGER,
    num_rows INTEGER NOT NULL,
    created_at REAL NOT NULL,
    ipc BLOB NOT NULL,
    FOREIGN KEY (job_id, part_number) REFERENCES part (job_id, number)
) STRICT;
CREATE INDEX spool_batch_of_part ON spool_batch (job_id, part_number);
CREATE TABLE spool_row (
    job_id TEXT NOT NULL,
    row_index INTEGER NOT NULL CHECK (row_index >= 0),
    sample_index INTEGER NOT NULL CHECK (sample_index >= 0),
    batch_id INTEGER NOT NULL REFERENCES spool_batch (id) ON DELETE CASCADE,
    PRIMARY KEY (job_id, row_index, sample_index)
) STRICT, WITHOUT ROWID;
CREATE INDEX spool_row_of_batch ON spool_row (batch_id);
CREATE TABLE runner (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    pid INTEGER NOT NULL,
    pid_start_time REAL NOT NULL,
    boot_id TEXT NOT NULL,
    host TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN (
        'running',
        'stopping'
    )),
    environment TEXT NOT NULL,
    started_at REAL NOT NULL,
    heartbeat_at REAL NOT NULL
) STRICT;
