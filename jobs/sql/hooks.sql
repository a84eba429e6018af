-- insert_hook --
-- A job tells of its end.
INSERT INTO hook (job_id, event, target) VALUES (:job_id, :event, :target);

-- select_due_hooks --
-- Hooks whose time has come, those that wait longest first. Both states are named as in the index.
SELECT id FROM hook
WHERE state IN ('due', 'running') AND state = 'due' AND next_at <= :now
ORDER BY next_at, id;

-- select_running_hooks --
-- Hooks that a process is at, or was.
SELECT * FROM hook WHERE state IN ('due', 'running') AND state = 'running' ORDER BY +id;

-- count_open_hooks --
-- Hooks that a runner is needed for.
SELECT count(*) FROM hook WHERE state IN ('due', 'running');

-- begin_hook --
-- An attempt is about to be made, unless another one is.
UPDATE hook
SET state = 'running', num_attempts = num_attempts + 1, pid = NULL, tried_at = :now
WHERE id = :id AND state = 'due'
RETURNING *;

-- set_hook_process --
-- Who makes an attempt.
UPDATE hook SET pid = :pid, pid_start_time = :pid_start_time, boot_id = :boot_id
WHERE id = :id AND num_ends = :num_ends AND num_attempts = :number AND state = 'running';

-- end_hook --
-- What came of an attempt; nothing where the job has ended once more since, which is due anew. Where
-- the job goes on there is nothing to try again.
UPDATE hook
SET state = iif(
        :state = 'due' AND EXISTS (
            SELECT 1 FROM job
            WHERE job.id = job_id AND job.state NOT IN ('completed', 'failed', 'cancelled')
        ),
        'idle', :state
    ),
    exit_status = :exit_status, error = :error, next_at = :next_at, pid = NULL
WHERE id = :id AND num_ends = :num_ends AND num_attempts = :number AND state = 'running';
