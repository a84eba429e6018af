"""`results --sql`: a SELECT over the rows of a job, and out of reach of everything else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import ntx_batch
from jobs.home import Home
from jobs.records import Job, JobError, SpecError
from jobs.store import JobStore
from ntx_batch.results_sql import query_dataset
from tests.cli_helpers import Ran, queue_job, run_here, write_prompts
from tests.job_factories import bad_row, finish_rows, ok_row
from tests.test_results import publish

Command = Callable[..., Ran]
COUNT = "SELECT status, count(*) AS n FROM results GROUP BY status ORDER BY n"
ROWS = ds.dataset(pa.table({"row_index": [0, 1, 2], "status": ["ok", "ok", "error"]}))


@pytest.fixture
def ntx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.setenv("NTX_HOME", str(tmp_path / "home"))
    return lambda *arguments: run_here(capsys, *arguments)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A completed job of 30 rows, the first 10 in a part, the others in the spool."""
    langs = [f"l{row % 3}" for row in range(30)]
    prompts = write_prompts(tmp_path / "prompts.parquet", ["x"] * 30, lang=langs)
    job = queue_job(tmp_path / "home", prompts)
    rows = [ok_row(row) if row % 5 else bad_row(row) for row in range(30)]
    with JobStore(Home.open(tmp_path / "home").state_path) as store:
        store.claim_job()
        publish(store, job)
        store.commit_batch(job.id, finish_rows(job, rows[:10]))
        publish(store, job)
        store.commit_batch(job.id, finish_rows(job, rows[10:]))
        store.set_state(job.id, "completed")
        return store.job(job.id)


# ---- what is found ---------------------------------------------------------------------------


def test_a_query_sees_parts_and_spool_as_one_table(ntx: Command, job: Job) -> None:
    ran = ntx("results", job.id, "--sql", COUNT)
    assert ran.code == 0, ran.err
    assert [line.split() for line in ran.out.splitlines()] == [
        ["status", "n"],
        ["error", "6"],
        ["ok", "24"],
    ]


def test_json_is_alone_on_stdout(ntx: Command, job: Job) -> None:
    ran = ntx("results", job.id, "--sql", COUNT, "--json")
    assert json.loads(ran.out) == [{"status": "error", "n": 6}, {"status": "ok", "n": 24}]
    assert ran.err == ""


def test_json_of_no_row_is_an_empty_list(ntx: Command, job: Job) -> None:
    ran = ntx("results", job.id, "--sql", "SELECT * FROM results WHERE row_index > 99", "--json")
    assert json.loads(ran.out) == []


def test_results_alone_are_json_too(ntx: Command, job: Job) -> None:
    rows = json.loads(ntx("results", job.id, "--json", "--head", "7").out)
    assert [row["row_index"] for row in rows] == list(range(7))
    assert rows[1]["lang"] == "l1" and rows[0]["error_code"] == "empty_prompt"
    assert len(json.loads(ntx("results", job.id, "--json", "--errors").out)) == 6


def test_a_file_takes_what_is_found(ntx: Command, job: Job, tmp_path: Path) -> None:
    target = tmp_path / "found.parquet"
    ran = ntx("results", job.id, "--sql", COUNT, "-o", target)
    assert "wrote 2 rows" in ran.err
    assert pq.read_table(target).to_pydict() == {"status": ["error", "ok"], "n": [6, 24]}
    ran = ntx("results", job.id, "--sql", "SELECT 1 AS a", "-o", tmp_path / "prompts.parquet")
    assert ran.code == 2 and "is an input file" in ran.err


def test_a_long_answer_is_cut_in_the_table_and_says_so(ntx: Command, job: Job) -> None:
    ran = ntx("results", job.id, "--sql", "SELECT row_index FROM results ORDER BY 1")
    assert len(ran.out.splitlines()) == 21
    assert "20 of 30 rows" in ran.err
    ran = ntx("results", job.id, "--sql", "SELECT row_index FROM results ORDER BY 1", "--head", "5")
    assert len(ran.out.splitlines()) == 6 and ran.err == ""


def test_text_of_users_is_no_markup(ntx: Command, job: Job) -> None:
    ran = ntx("results", job.id, "--sql", "SELECT '[red]x[/red]' AS \"[b]name\"")
    assert "[red]x[/red]" in ran.out and "[b]name" in ran.out


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('{path}')",
        "SELECT * FROM '{path}'",
        "SELECT * FROM read_text('{path}')",
        "SELECT * FROM glob('{folder}/*')",
    ],
)
def test_files_are_out_of_reach(tmp_path: Path, sql: str) -> None:
    path = tmp_path / "secret.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(SpecError, match="disabled by configuration"):
        query_dataset(ROWS, sql.format(path=path, folder=tmp_path))


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("COPY results TO 'out.csv'", "COPY"),
        ("ATTACH 'other.db'", "ATTACH"),
        ("SET enable_external_access = true", "SET"),
        ("INSTALL httpfs", "LOAD"),
        ("DELETE FROM results", "DELETE"),
        ("SELECT 1; SELECT 2", "SELECT, SELECT"),
        ("", "nothing"),
    ],
)
def test_only_one_select_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=f"takes one SELECT, this is {kind}"):
        query_dataset(ROWS, sql)
    assert list(tmp_path.iterdir()) == []


def test_variables_of_the_program_are_no_tables() -> None:
    rows = pa.table({"x": [1]})
    assert rows.num_rows == 1
    with pytest.raises(SpecError, match="Table with name rows does not exist"):
        query_dataset(ROWS, "SELECT * FROM rows")


def test_an_error_of_the_query_is_told_and_is_a_wrong_use(ntx: Command, job: Job) -> None:
    ran = ntx("results", job.id, "--sql", "SELECT nonsense FROM results")
    assert ran.code == 2
    assert "nonsense" in ran.err and "Traceback" not in ran.err
    assert ntx("results", job.id, "--sql", "SELECT 1", "--errors").code == 2


def test_columns_of_one_name_are_refused() -> None:
    with pytest.raises(SpecError, match="more than one column 'a'"):
        query_dataset(ROWS, "SELECT 1 AS a, 2 AS a")


def test_without_duckdb_the_command_to_install_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(JobError, match=r"pip install 'ntx-batch\[sql\]'"):
        query_dataset(ROWS, "SELECT 1")


# ---- from Python -----------------------------------------------------------------------------


def test_python_has_the_same(job: Job, tmp_path: Path) -> None:
    handle = ntx_batch.job(job.id, home=tmp_path / "home")
    assert handle.sql(COUNT).column("n").to_pylist() == [6, 24]
    assert handle.dataset().count_rows() == 30


def test_polars_takes_results_and_scans_the_dataset(job: Job, tmp_path: Path) -> None:
    handle = ntx_batch.job(job.id, home=tmp_path / "home")
    frame = pl.from_arrow(handle.results())
    assert isinstance(frame, pl.DataFrame)
    assert frame["row_index"].to_list() == list(range(30))
    scanned = pl.scan_pyarrow_dataset(handle.dataset()).filter(pl.col("status") == "error")
    assert sorted(scanned.select("row_index").collect()["row_index"]) == [0, 5, 10, 15, 20, 25]


def test_pandas_takes_results(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    frame = ntx_batch.job(job.id, home=tmp_path / "home").to_pandas()
    assert list(frame["row_index"]) == list(range(30))
    assert frame["generated_text"][1] == "answer"


def test_without_pandas_the_command_to_install_it_is_named(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(JobError, match="pip install pandas"):
        ntx_batch.job(job.id, home=tmp_path / "home").to_pandas()


def test_a_type_that_parquet_lacks_is_refused_by_its_column(
    ntx: Command, job: Job, tmp_path: Path
) -> None:
    query = "SELECT row_index, interval 3 month AS pause FROM results"
    ran = ntx("results", job.id, "--sql", query, "-o", tmp_path / "out.parquet")
    assert ran.code == 2, ran.err
    assert "column 'pause' has type" in ran.err and "Traceback" not in ran.err
    assert not list(tmp_path.glob("*out.parquet*"))
    assert ntx("results", job.id, "--sql", query, "-o", tmp_path / "out.jsonl").code == 0
