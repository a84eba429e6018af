-- insert_job --
-- Add a job to the end of the queue.
INSERT INTO job (
    id, state, spec, manifest, environment, results_dir, created_at, total, key, retry_of,
    fingerprint, after, priority
) VALUES (
    :id, 'queued', :spec, :manifest, :environment, :results_dir, :now, :total, :key, :retry_of,
    :fingerprint, :after, :priority
);

-- insert_selection --
-- A job runs these output rows of its input alone.
INSERT INTO selection (job_id, num_rows, row_keys) VALUES (:job_id, :num_rows, :row_keys);

-- select_selection --
-- The output rows of a job that does not run its whole input.
SELECT row_keys FROM selection WHERE job_id = :job_id;

-- select_job_by_key --
-- The job that was submitted with a key.
SELECT * FROM job_with_hooks WHERE key = :key;

-- select_retries --
-- Retries of a job, theirs, and so on; oldest first.
WITH RECURSIVE retry (id) AS (
    SELECT id FROM job WHERE retry_of = :job_id
    UNION
    SELECT job.id FROM job JOIN retry ON job.retry_of = retry.id
)
SELECT job_with_hooks.* FROM job_with_hooks JOIN retry USING (id) ORDER BY num;

-- delete_job --
-- Forget a job with all that hangs on it, unless a runner works on it.
DELETE FROM job WHERE id = :id AND state != 'running' RETURNING id;

-- select_readers --
-- Jobs that are not over, or failed with a chain that can come back, and read what a job has: its
-- results, or the copy of another's results that a retry shares with it.
SELECT id, state FROM job
WHERE (after = :id OR (retry_of = :id AND json_extract(spec, '$.after') IS NOT NULL))
    AND (state NOT IN ('completed', 'failed', 'cancelled') OR (state = 'failed' AND waits))
ORDER BY num;

-- select_chained --
-- Jobs whose lot hangs on another job's, that one always before them. The plus sign has the index of
-- such jobs serve this, not the order of all.
SELECT id FROM job
WHERE after IS NOT NULL
    AND (state IN ('queued', 'paused', 'interrupted') OR (state = 'failed' AND waits))
ORDER BY +num;

-- move_chained --
-- A job follows the one that it comes after.
UPDATE job
SET state = :state, waits = :waits, reason = :reason,
    finished_at = iif(:state = 'failed', :now, NULL)
WHERE id = :id;

-- set_waits --
-- A job is about to fail for what is in the results that it was to read.
UPDATE job SET waits = 1 WHERE id = :id RETURNING id;

-- take_input --
-- A job has a copy of the results that it was to read.
UPDATE job SET manifest = :manifest, record = :record, after = NULL WHERE id = :id RETURNING id;

-- set_priority --
-- A job goes before those of lower priority from now on.
UPDATE job SET priority = :priority
WHERE id = :id AND state NOT IN ('completed', 'failed', 'cancelled')
RETURNING id;

-- release_folder --
-- Another job takes a folder; a job that is not over keeps it.
UPDATE job SET results_dir = :new_dir, reason = :reason
WHERE id = :id AND state IN ('completed', 'failed', 'cancelled')
RETURNING id;

-- select_job --
-- One job by its whole id.
SELECT * FROM job_with_hooks WHERE id = :id;

-- select_jobs_by_prefix --
-- Jobs whose id begins with a prefix, oldest first.
SELECT * FROM job_with_hooks WHERE substr(id, 1, length(:prefix)) = :prefix ORDER BY num;

-- select_jobs --
-- Every job, oldest first.
SELECT * FROM job_with_hooks ORDER BY num;

-- select_folder_owner --
-- The job that a results folder belongs to.
SELECT id FROM job WHERE results_dir = :results_dir;

-- claim_job --
-- Take the oldest waiting job of the highest priority, unless another process does so first, or
-- it is to be passed over.
UPDATE job
SET state = 'running', reason = NULL, request = NULL, attempt = attempt + 1, finished_at = NULL,
    started_at = coalesce(started_at, :now)
WHERE num = (
    SELECT num FROM job WHERE state IN ('queued', 'interrupted') AND NOT waits
        AND id NOT IN (SELECT value FROM json_each(:passed_over))
    ORDER BY priority DESC, num LIMIT 1
)
RETURNING id;

-- mark_interrupted --
-- No runner is there: what was running has none any more. What a client had asked for is done.
UPDATE job
SET state = CASE request
        WHEN 'cancel' THEN 'cancelled' WHEN 'pause' THEN 'paused' ELSE 'interrupted'
    END,
    reason = iif(request IS NULL, 'its runner ended without finishing it', NULL),
    finished_at = iif(request = 'cancel', :now, NULL),
    request = NULL
WHERE state = 'running'
RETURNING id;

-- set_state --
-- Move a job to a state, if it is in one that leads there. A cancel that came too late to be seen
-- by the runner that lets go of it is still obeyed.
UPDATE job
SET state = iif(request = 'cancel' AND :state IN ('interrupted', 'paused'), 'cancelled', :state),
    reason = :reason, request = NULL,
    finished_at = iif(:final OR request = 'cancel', :now, NULL)
WHERE id = :id AND state IN (SELECT value FROM json_each(:from_states))
RETURNING id;

-- set_request --
-- Ask the runner to pause or cancel a running job; a waiting one changes at once.
UPDATE job
SET request = CASE WHEN state != 'running' THEN NULL
        WHEN request = 'cancel' THEN request  -- a pause after it takes nothing back
        ELSE :request
    END,
    finished_at = iif(state != 'running' AND :request = 'cancel', :now, finished_at),
    reason = iif(:request = 'cancel' AND state != 'running', NULL, reason),
    state = CASE
        WHEN state = 'running' THEN state
        WHEN :request = 'cancel' THEN 'cancelled'
        ELSE 'paused'
    END
WHERE id = :id AND (
    state IN ('queued', 'running', 'interrupted') OR (state = 'paused' AND :request = 'cancel')
)
RETURNING id;

-- set_total --
-- The number of rows has become known.
UPDATE job SET total = :total WHERE id = :id RETURNING id;

-- set_manifest --
-- Replace the input's manifest.
UPDATE job SET manifest = :manifest WHERE id = :id RETURNING id;

-- set_fingerprint --
-- More has become known of the model.
UPDATE job SET fingerprint = :fingerprint WHERE id = :id RETURNING id;

-- set_record --
-- Replace what the engine reported.
UPDATE job SET record = :record WHERE id = :id RETURNING id;

-- insert_progress_point --
-- Keep what a job had done at a moment.
INSERT INTO progress_point (
    job_id, at, work_s, num_ok, num_error, prompt_tokens, completion_tokens, sweep_s, wait_s,
    streamed_nbytes, energy_j
) VALUES (
    :job_id, :at, :work_s, :num_ok, :num_error, :prompt_tokens, :completion_tokens, :sweep_s,
    :wait_s, :streamed_nbytes, :energy_j
);

-- thin_progress_points --
-- Where a job has more points than it may, every second one goes; the newest stays.
DELETE FROM progress_point WHERE id IN (
    SELECT id FROM (
        SELECT id, row_number() OVER (ORDER BY id DESC) AS age, count(*) OVER () AS num_points
        FROM progress_point WHERE job_id = :job_id
    )
    WHERE num_points > :max_points AND age % 2 = 0
);

-- select_progress_points --
-- What a job had done at some moments, in the order of time.
SELECT at, work_s, num_ok, num_error, prompt_tokens, completion_tokens, sweep_s, wait_s,
    streamed_nbytes, energy_j
FROM progress_point WHERE job_id = :job_id ORDER BY id;

-- add_counts --
-- Count newly finished rows.
UPDATE job
SET num_ok = num_ok + :num_ok, num_error = num_error + :num_error,
    prompt_tokens = prompt_tokens + :prompt_tokens,
    completion_tokens = completion_tokens + :completion_tokens,
    reused_tokens = reused_tokens + :reused_tokens, num_copied = num_copied + :num_copied
WHERE id = :id
RETURNING num_ok + num_error AS num_finished;

-- insert_spool_batch --
-- Keep a batch of finished rows.
INSERT INTO spool_batch (job_id, num_rows, created_at, ipc)
VALUES (:job_id, :num_rows, :now, :ipc);

-- insert_spool_row --
-- Keep the key of one finished row; refused when it is there.
INSERT INTO spool_row (job_id, row_index, sample_index, batch_id)
VALUES (:job_id, :row_index, :sample_index, :batch_id);

-- select_spool_rows --
-- Keys of the spool's rows within a range of rows.
SELECT row_index, sample_index FROM spool_row
WHERE job_id = :job_id AND row_index >= :begin AND row_index < :end
ORDER BY row_index, sample_index;

-- select_part_keys --
-- Packed keys of the committed parts that reach into a range of rows.
SELECT row_keys FROM part
WHERE job_id = :job_id AND state = 'committed' AND first_row < :end AND last_row >= :begin
ORDER BY number;

-- select_spool_size --
-- Bytes, rows and age of what no part has taken yet.
SELECT coalesce(sum(length(ipc)), 0) AS nbytes, coalesce(sum(num_rows), 0) AS num_rows,
    min(created_at) AS oldest_at
FROM spool_batch WHERE job_id = :job_id AND part_number IS NULL;

-- select_spool_blobs --
-- Rows that are in no committed part, in the order they came.
SELECT ipc FROM spool_batch WHERE job_id = :job_id ORDER BY id;

-- select_part_blobs --
-- Rows that a part has taken, in the order they came.
SELECT ipc FROM spool_batch WHERE job_id = :job_id AND part_number = :number ORDER BY id;

-- select_next_part_number --
-- Parts are numbered from 0 without gaps.
SELECT coalesce(max(number) + 1, 0) AS number FROM part WHERE job_id = :job_id;

-- insert_part --
-- Announce a part before its file can exist.
INSERT INTO part (job_id, number, name, state, num_rows, first_row, last_row, row_keys)
VALUES (:job_id, :number, :name, 'publishing', :num_rows, :first_row, :last_row, :row_keys);

-- take_spool_batches --
-- Give a part every batch that no other part has.
UPDATE spool_batch SET part_number = :number WHERE job_id = :job_id AND part_number IS NULL;

-- select_untaken_rows --
-- Keys of the rows that no part has taken.
SELECT row_index, sample_index
FROM spool_batch JOIN spool_row ON spool_row.batch_id = spool_batch.id
WHERE spool_batch.job_id = :job_id AND part_number IS NULL
ORDER BY row_index, sample_index;

-- select_parts --
-- The parts of a job.
SELECT number, name, state, num_rows FROM part WHERE job_id = :job_id ORDER BY number;

-- commit_part --
-- The part's file is published.
UPDATE part SET state = 'committed'
WHERE job_id = :job_id AND number = :number AND state = 'publishing'
RETURNING number;

-- delete_part_batches --
-- Forget the spool rows of a part (their keys go with them).
DELETE FROM spool_batch WHERE job_id = :job_id AND part_number = :number;

-- set_runner --
-- Say which process is the runner.
INSERT OR REPLACE INTO runner
    (id, pid, pid_start_time, boot_id, host, state, environment, started_at, heartbeat_at)
VALUES (1, :pid, :pid_start_time, :boot_id, :host, 'running', :environment, :now, :now);

-- set_heartbeat --
-- The runner lives.
UPDATE runner SET heartbeat_at = :now WHERE pid = :pid;

-- select_runner --
-- The runner that last said it runs.
SELECT * FROM runner;

-- set_stopping --
-- The runner claims no more jobs.
UPDATE runner SET state = 'stopping';

-- stop_if_idle --
-- The runner claims no more jobs, if none can run, none runs, no schedule may make one, and all are
-- told of who want to be.
UPDATE runner SET state = 'stopping'
WHERE NOT EXISTS (
        SELECT 1 FROM job WHERE state IN ('queued', 'running', 'interrupted') AND NOT waits
    )
    AND NOT EXISTS (SELECT 1 FROM hook WHERE state IN ('due', 'running'))
    AND NOT EXISTS (SELECT 1 FROM schedule WHERE paused_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM schedule_run WHERE held = 'window')
RETURNING id;

-- delete_runner --
-- The runner has ended in good order.
DELETE FROM runner WHERE pid = :pid;
