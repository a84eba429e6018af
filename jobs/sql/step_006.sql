ALTER TABLE job ADD COLUMN after TEXT REFERENCES job (id) ON DELETE SET NULL;
ALTER TABLE job ADD COLUMN waits INTEGER NOT NULL DEFAULT 0 CHECK (waits IN (0, 1));
ALTER TABLE job ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
DROP INDEX job_waiting;
CREATE INDEX job_waiting ON job (priority DESC, num) WHERE state IN ('queued', 'interrupted');
CREATE INDEX job_after ON job (after) WHERE after IS NOT NULL;
CREATE TABLE hook (
    id INTEGER PRIMARY KEY,
    job_id TEXT NOT NULL REFERENCES job (id) ON DELETE CASCADE,
    event TEXT NOT NULL CHECK (event IN ('finish', 'failure')),
    target TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'idle' CHECK (state IN (
        'idle',
        'due',
        'running',
        'delivered',
        'failed'
    )),
    num_ends INTEGER NOT NULL DEFAULT 0,
    num_attempts INTEGER NOT NULL DEFAULT 0,
    next_at REAL,
    pid INTEGER,
    pid_start_time REAL,
    boot_id TEXT,
    exit_status INTEGER,
    error TEXT,
    tried_at REAL,
    UNIQUE (job_id, event)
) STRICT;
CREATE INDEX hook_open ON hook (next_at) WHERE state IN ('due', 'running');
CREATE TRIGGER hook_falls_due AFTER UPDATE OF state ON job
WHEN NEW.state IN ('completed', 'failed', 'cancelled') AND NEW.state != OLD.state
BEGIN
    UPDATE hook
    SET state = 'due', num_ends = num_ends + 1, num_attempts = 0, next_at = 0, pid = NULL,
        exit_status = NULL, error = NULL, tried_at = NULL
    WHERE job_id = NEW.id AND (event = 'finish' OR NEW.state = 'failed');
END;
CREATE TRIGGER hook_is_taken_back AFTER UPDATE OF state ON job
WHEN OLD.state IN ('completed', 'failed', 'cancelled')
    AND NEW.state NOT IN ('completed', 'failed', 'cancelled')
BEGIN
    UPDATE hook SET state = 'idle', next_at = NULL WHERE job_id = NEW.id AND state = 'due';
END;
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
