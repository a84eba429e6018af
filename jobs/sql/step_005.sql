ALTER TABLE job ADD COLUMN schedule TEXT;
ALTER TABLE job ADD COLUMN run INTEGER;
CREATE TABLE schedule (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    spec TEXT NOT NULL,
    environment TEXT NOT NULL,
    created_at REAL NOT NULL,
    paused_at REAL,
    looked_at REAL NOT NULL,
    next_at REAL,
    num_runs INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE schedule_run (
    id INTEGER PRIMARY KEY,
    schedule_id INTEGER NOT NULL REFERENCES schedule (id) ON DELETE CASCADE,
    scheduled_at REAL,
    decided_at REAL NOT NULL,
    number INTEGER,
    state TEXT NOT NULL CHECK (state IN (
        'waiting',
        'skipped',
        'missed',
        'nothing',
        'refused',
        'queued', 'running', 'paused', 'interrupted', 'completed', 'failed', 'cancelled'
    )),
    reason TEXT,
    num_missed INTEGER NOT NULL DEFAULT 0,
    job_id TEXT REFERENCES job (id) ON DELETE SET NULL,
    held TEXT CHECK (held IN ('window', 'max_runtime')),
    ran_s REAL NOT NULL DEFAULT 0,
    UNIQUE (schedule_id, scheduled_at)
) STRICT;
CREATE INDEX schedule_run_of_job ON schedule_run (job_id) WHERE job_id IS NOT NULL;
CREATE INDEX schedule_run_open ON schedule_run (schedule_id)
WHERE state IN ('waiting', 'queued', 'running', 'paused', 'interrupted');
CREATE TABLE schedule_item (
    schedule_id INTEGER NOT NULL REFERENCES schedule (id) ON DELETE CASCADE,
    item TEXT NOT NULL,
    run_id INTEGER NOT NULL REFERENCES schedule_run (id) ON DELETE CASCADE,
    PRIMARY KEY (schedule_id, item)
) STRICT, WITHOUT ROWID;
CREATE INDEX schedule_item_of_run ON schedule_item (run_id);
CREATE TRIGGER schedule_run_follows AFTER UPDATE OF state ON job WHEN NEW.schedule IS NOT NULL
BEGIN
    UPDATE schedule_run
    SET state = NEW.state, reason = NEW.reason,
        held = iif(NEW.state = 'paused', held, NULL),
        ran_s = iif(NEW.state = 'queued', 0, ran_s)
    WHERE job_id = NEW.id;
END;
CREATE TRIGGER schedule_run_loses BEFORE DELETE ON job
WHEN OLD.schedule IS NOT NULL AND OLD.state NOT IN ('completed', 'failed', 'cancelled')
BEGIN
    UPDATE schedule_run SET state = 'cancelled', reason = 'its job was removed', held = NULL
    WHERE job_id = OLD.id;
END;
