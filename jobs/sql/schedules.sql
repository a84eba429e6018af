-- insert_schedule --
-- A new schedule.
INSERT INTO schedule (name, spec, environment, created_at, looked_at, next_at)
VALUES (:name, :spec, :environment, :now, :now, :next_at);

-- select_schedule --
-- The schedule of a name.
SELECT * FROM schedule WHERE name = :name;

-- select_schedules --
-- Every schedule by name.
SELECT * FROM schedule ORDER BY name;

-- select_schedules_to_serve --
-- Schedules of which an occurrence has come, or may come again since the clock was set back; and
-- those whose waiting run has nothing to wait for any more.
SELECT * FROM schedule
WHERE paused_at IS NULL AND (
    next_at <= :now OR looked_at > :now
    OR (
        SELECT max(state = 'waiting') AND NOT max(state != 'waiting') FROM schedule_run
        WHERE schedule_id = schedule.id
            AND state IN ('waiting', 'queued', 'running', 'paused', 'interrupted')
    )
)
ORDER BY next_at;

-- delete_schedule --
-- Forget a schedule with its history; its jobs stay.
DELETE FROM schedule WHERE id = :id;

-- set_schedule_paused --
-- Pause a schedule, or let it go on from now.
UPDATE schedule SET paused_at = :paused_at WHERE id = :id;

-- set_schedule_looked --
-- Occurrences up to an instant are decided on.
UPDATE schedule SET looked_at = :looked_at, next_at = :next_at WHERE id = :id;

-- take_run_number --
-- Give out a run's number, unless another process has done so.
UPDATE schedule SET num_runs = :number WHERE id = :id AND num_runs = :number - 1 RETURNING id;

-- insert_schedule_run --
-- What becomes of an occurrence, or of a run by hand.
INSERT INTO schedule_run (schedule_id, scheduled_at, decided_at, state, reason, num_missed)
VALUES (:schedule_id, :scheduled_at, :now, :state, :reason, :num_missed);

-- forget_old_occurrences --
-- Of occurrences of which no job was made, those before the newest ones of the schedule go. A run of
-- which one was made stays: what it took of the input is known by it.
DELETE FROM schedule_run
WHERE schedule_id = :schedule_id AND number IS NULL
    AND state IN ('skipped', 'missed', 'nothing', 'refused')
    AND scheduled_at < (
        SELECT scheduled_at FROM schedule_run
        WHERE schedule_id = :schedule_id AND scheduled_at IS NOT NULL
        ORDER BY scheduled_at DESC LIMIT 1 OFFSET :num_kept - 1
    );

-- settle_waiting_run --
-- The turn of a waiting run has come, unless another process saw so first.
UPDATE schedule_run SET state = :state, reason = :reason, decided_at = :now
WHERE id = :id AND state = 'waiting'
RETURNING id;

-- set_run_job --
-- The job of a run is there.
UPDATE schedule_run SET number = :number, job_id = :job_id WHERE id = :id;

-- set_job_run --
-- Whose run a job is.
UPDATE job SET schedule = :schedule, run = :run WHERE id = :id;

-- select_schedule_runs --
-- The history of a schedule, the newest first.
SELECT * FROM schedule_run WHERE schedule_id = :schedule_id ORDER BY id DESC LIMIT :limit;

-- select_open_runs --
-- Runs of a schedule that are not over, oldest first.
SELECT * FROM schedule_run
WHERE schedule_id = :schedule_id
    AND state IN ('waiting', 'queued', 'running', 'paused', 'interrupted')
ORDER BY id;

-- select_settled --
-- Occurrences after an instant that are decided on.
SELECT scheduled_at FROM schedule_run
WHERE schedule_id = :schedule_id AND scheduled_at > :since;

-- select_taken_items --
-- What of these a run has done, or is about to do. CROSS JOIN keeps the order: from the few asked
-- for to the many that are done.
SELECT item FROM json_each(:items)
CROSS JOIN schedule_item ON schedule_item.schedule_id = :schedule_id AND item = value
CROSS JOIN schedule_run ON schedule_run.id = run_id
WHERE state NOT IN ('failed', 'cancelled');

-- insert_items --
-- A run takes these.
INSERT OR REPLACE INTO schedule_item (schedule_id, item, run_id)
SELECT :schedule_id, value, :run_id FROM json_each(:items);

-- select_old_jobs --
-- Jobs of a schedule that are over, all but those of its newest runs.
SELECT job_id FROM (
    SELECT job_id, number FROM schedule_run
    WHERE schedule_id = :schedule_id AND number IS NOT NULL
    ORDER BY number DESC LIMIT -1 OFFSET :num_kept
) JOIN job ON job.id = job_id
WHERE state IN ('completed', 'failed', 'cancelled')
ORDER BY number;

-- select_bounded_runs --
-- Runs with a job that waits or is held, of schedules that bound when it runs. The plus sign has
-- the index of open runs serve this, not the one of all jobs.
SELECT schedule_run.job_id, schedule_run.state, schedule_run.held, schedule_run.ran_s,
    schedule.spec
FROM schedule_run JOIN schedule ON schedule.id = schedule_id
WHERE state IN ('waiting', 'queued', 'running', 'paused', 'interrupted')
    AND +job_id IS NOT NULL AND state IN ('queued', 'interrupted', 'paused')
    AND (held IS NOT NULL OR json_extract(spec, '$.window') IS NOT NULL);

-- select_run_of_job --
-- How a job's schedule bounds it.
SELECT schedule_run.job_id, schedule_run.state, schedule_run.held, schedule_run.ran_s,
    schedule.spec
FROM schedule_run JOIN schedule ON schedule.id = schedule_id
WHERE job_id = :job_id;

-- set_held --
-- Note why a job is about to be paused by its schedule.
UPDATE schedule_run SET held = :held WHERE job_id = :job_id;

-- add_run_time --
-- A run's job has run on.
UPDATE schedule_run SET ran_s = ran_s + :seconds WHERE job_id = :job_id;
