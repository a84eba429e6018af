"""Jobs over JSON lines, CSV and partitioned folders through the real runner, Ray and engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ntx_batch
from jobs.control import stop_runner
from jobs.records import DatasetError, SpecError
from ntx_batch.client import JobHandle
from ntx_batch.preflight import check_job
from ntx_batch.spec import build_spec
from tests.cli_helpers import MODEL
from tests.runner_helpers import make_home


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a state folder `home`, whose runner is stopped in the end."""
    folder = tmp_path_factory.mktemp("text")
    home = make_home(folder / "home")
    yield folder
    stop_runner(home)


def run(work: Path, input_path: str | Path, code: int, **options: Any) -> tuple[JobHandle, Any]:
    """A job with its results as rows; checks its exit code."""
    values: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "kv_memory": "64MiB"} | options
    job = ntx_batch.submit(input_path, model=MODEL, home=work / "home", **values)
    assert job.wait(timeout_s=120) == code, job.logs()
    return job, job.results()


def test_json_lines_of_any_shape(work: Path) -> None:
    """Cases 26 and 44: mixed types, blank and torn lines; each row alone is ok or an error."""
    folder = work / "lines" / "lang=de%20AT"
    folder.mkdir(parents=True)
    (folder / "in.jsonl").write_bytes(
        b'\xef\xbb\xbf{"id": 1, "prompt": "one", "temperature": null}\r\n'
        b"\n"
        b'{"id": "two", "prompt": ["two"]}\n'
        b'{"id": 3, "prompt": "three", "temperature": 0.5, "late": {"a": [1]}}\n'
        b'{"id": 3, "prompt": "four", "temperature": "hot"}\n'
        b'{"id": 4, "prompt": "fi'
    )
    job, table = run(work, work / "lines", 3, param_columns=["temperature"])
    assert table.schema.names[:4] == ["id", "temperature", "late", "lang"]
    assert table.column("id").to_pylist() == ["1", "two", "3", "3", None]
    assert table.column("late").to_pylist() == [None, None, '{"a": [1]}', None, None]
    assert table.column("lang").to_pylist() == ["de AT"] * 5
    codes = [None, "invalid_prompt", None, "invalid_parameter", "invalid_row"]
    assert table.column("error_code").to_pylist() == codes
    assert "line 6 is not JSON" in table.column("error_message")[4].as_py()
    params = [text and json.loads(text) for text in table.column("sampling_params").to_pylist()]
    assert (params[0]["temperature"], params[2]["temperature"]) == (0.0, 0.5)
    assert job.status()["total"] == 5
    assert job.status()["warnings"] == ["1 row repeats an id that came before; all rows run"]


def test_json_lines_of_messages_with_parameters(work: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": "hi"}], "sampling_params": {"max_tokens": 2}},
        {"messages": json.dumps([{"role": "user", "content": "hi"}]), "sampling_params": None},
    ]
    path = work / "talks.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    template = work / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    _, table = run(
        work, path, 0, param_columns=["sampling_params"], chat_template=template, keep=[]
    )
    assert table.column("completion_tokens").to_pylist() == [2, 3]
    assert table.column("prompt_tokens")[0] == table.column("prompt_tokens")[1]


def test_sheet_with_numbers_that_are_text(work: Path) -> None:
    """Case 35: a semicolon sheet with a byte order mark, a field of two lines, and a bad row."""
    path = work / "sheet.csv"
    path.write_bytes(
        b'\xef\xbb\xbf"id";"prompt";"max_tokens"\r\n'
        b'007;"two\r\nlines";2\r\n'
        b"1e5;NA;\r\n"
        b"8;too;many;fields\r\n"
        b'9;"";2\r\n'
    )
    said: list[str] = []
    _, table = run(work, path, 3, param_columns=["max_tokens"], say=said.append)
    assert "CSV in utf-8, delimiter semicolon (found; --delimiter names another)" in said
    assert table.column("id").to_pylist() == ["007", "1e5", None, "9"]
    assert table.column("completion_tokens").to_pylist()[:2] == [2, 3]
    codes = [None, None, "invalid_row", "empty_prompt"]
    assert table.column("error_code").to_pylist() == codes
    assert table.column("error_message")[2].as_py().startswith("the row in line 5 has 4 fields")


def test_replaced_bytes_are_marked_in_their_row(work: Path) -> None:
    """Case 86: --on-bad-utf8 replace."""
    path = work / "bad.csv"
    path.write_bytes(b"id,prompt\n1,caf\xe9\n2,tea\n")
    with pytest.raises(DatasetError, match=r"byte 0xe9 at offset 15 \(line 2\)"):
        ntx_batch.submit(path, model=MODEL, home=work / "home")
    _, table = run(work, path, 0, on_bad_utf8="replace", max_tokens=1)
    warnings = [json.loads(text or "{}") for text in table.column("warnings").to_pylist()]
    assert [row.get("replaced_utf8") for row in warnings] == [["prompt"], None]


@pytest.mark.parametrize("kind", ["csv", "no group", "empty group"])
def test_input_without_rows_completes_with_all_columns(work: Path, kind: str) -> None:
    """Case 85: no rows: complete at once, a part with the full schema, the model not loaded."""
    path = work / f"{kind}.parquet"
    schema = pa.schema([("id", pa.string()), ("prompt", pa.string())])
    if kind == "csv":
        path = work / "none.csv"
        path.write_text("id,prompt\n")
    else:
        with pq.ParquetWriter(path, schema) as writer:
            if kind == "empty group":
                writer.write_table(schema.empty_table())
    job, table = run(work, path, 0)
    assert table.num_rows == 0 and table.schema.names[:2] == ["id", "row_index"]
    parts = list(Path(job.snapshot().results_dir).iterdir())
    assert [pq.read_schema(part).names for part in parts] == [table.schema.names]
    assert "load_s" not in job.snapshot().record


def test_pattern_over_partitions(work: Path) -> None:
    for date in ("2025-09-17", "__HIVE_DEFAULT_PARTITION__"):
        folder = work / "days" / f"date={date}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"prompt": ["a"]}), folder / "0.parquet")
    _, table = run(work, work / "days" / "**" / "*.parquet", 0)
    assert table.column("date").to_pylist() == ["2025-09-17", None]


# ---- submit ------------------------------------------------------------------------------


def test_column_that_comes_after_the_first_rows_is_found_at_submit(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with open(path, "w") as sink:
        sink.writelines(f'{{"prompt": "{row:0100d}"}}\n' for row in range(50_000))
        sink.write('{"prompt": "last", "note": "here"}\n')
    spec = build_spec(path, model=MODEL)
    assert check_job(spec).manifest.num_rows is None
    spec = build_spec(path, model=MODEL, keep=["note"])
    assert check_job(spec).manifest.num_rows == 50_001
    with pytest.raises(SpecError, match="keep: the input has no column nota; did you mean note"):
        check_job(build_spec(path, model=MODEL, keep=["nota"]))


@pytest.mark.parametrize("option", [{"encoding": "cp1252"}, {"delimiter": ";"}])
def test_csv_options_are_refused_for_other_formats(tmp_path: Path, option: dict[str, Any]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(SpecError, match=f"{next(iter(option))} is for CSV files"):
        check_job(build_spec(path, model=MODEL, **option))


def test_lines_of_which_none_is_an_object_are_refused_at_submit(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("not json\n[]\n")
    with pytest.raises(SpecError, match="no prompt or messages column"):
        check_job(build_spec(path, model=MODEL))
