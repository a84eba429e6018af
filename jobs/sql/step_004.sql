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
CREATE INDEX progress_point_of_job ON progress_point (job_id);
