"""`ntx-batch plan`: what it reads, what it says, and what it refuses; nothing is queued."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.devices import DeviceChoice
from engine.gguf_file import GgufFile
from engine.hparams import read_hparams
from jobs.dataset import build_manifest
from jobs.home import Home
from jobs.store import JobStore
from jobs.workload import (
    EXCERPT_NBYTES,
    SAMPLE_ROWS,
    ModelText,
    RowSample,
    sample_ranges,
    sample_rows,
)
from ntx_batch.render_plan import print_plan
from ntx_batch.spec import build_spec
from scripts.synth_gguf import Shape, write_model
from tests.cli_helpers import MODEL, Ran, run_here, write_prompts

MIB = 1 << 20
Command = Callable[..., Ran]
# 30 MB of F16: its least budget is small, and it takes no second to write.
SHAPE = Shape(num_layers=12, hidden=256, ffn=1024, num_heads=4, vocab_size=2000, context_length=512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_model(path, SHAPE, type_name="F16")
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "in.parquet", [f"question {n}" for n in range(500)])


@pytest.fixture
def ntx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.setenv("NTX_HOME", str(tmp_path / "home"))
    return lambda *arguments: run_here(capsys, *arguments)


def plan(ntx: Command, *arguments: str | Path) -> dict[str, Any]:
    ran = ntx("plan", *arguments, "--json")
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_a_model_that_fits_stays_in_memory(ntx: Command, prompts: Path, model: Path) -> None:
    found = plan(ntx, prompts, "--model", model, "--max-tokens", "20", "--kv-memory", "64MiB")
    assert found["placement"]["resident_layers"] == found["placement"]["layers"] == 12
    assert found["placement"]["streamed_nbytes"] == 0
    assert found["placement"]["reader"] == "mmap"
    assert found["rates"]["disk_nbytes_per_s"] is None
    assert found["rows"]["num_rows"] == 500
    assert found["rows"]["num_sampled"] == SAMPLE_ROWS
    assert found["rows"]["max_output_tokens"] == 20
    assert found["rows"]["expected_output_tokens"] == 10  # they may end before
    assert found["predicted"]["limited_by"] == "compute"
    assert found["predicted"]["hours"] * 3600 == pytest.approx(found["predicted"]["job_s"])


def test_a_budget_below_the_model_streams_and_holds(
    ntx: Command, prompts: Path, model: Path
) -> None:
    found = plan(
        ntx,
        *(prompts, "--model", model, "--memory", "75MiB", "--sweep-tokens", "64"),
        *("--ring-memory", "8MiB", "--limit", "30", "--max-tokens", "9"),
    )
    memory, placement = found["memory"], found["placement"]
    assert memory["asked_nbytes"] == memory["budget_nbytes"] == 75 * MIB
    assert memory["used_nbytes"] <= 75 * MIB
    parts = ("weights_nbytes", "ring_nbytes", "work_nbytes", "kv_nbytes")
    assert sum(memory[part] for part in parts) == memory["used_nbytes"]
    assert memory["ring_nbytes"] == 8 * MIB
    assert placement["streamed_nbytes"] > 0
    assert placement["reader"] == "direct"
    assert placement["picture"].count("d") + placement["picture"].count("r") == 13
    assert found["rates"]["disk_nbytes_per_s"] > 0
    assert (found["rows"]["num_rows"], found["rows"]["num_sampled"]) == (30, 30)
    assert found["predicted"]["rows_on_board"] <= 30


def test_what_else_there_was_to_choose_is_told(ntx: Command, prompts: Path, model: Path) -> None:
    found = plan(
        ntx, *(prompts, "--model", model, "--memory", "75MiB", "--max-tokens", "9"), "--kv-type=f16"
    )
    others = {(each["decision"], each["instead"]): each for each in found["alternatives"]}
    assert others["KV type", "f32"]["is_asked"] and ("KV type", "f16") not in others
    assert "bytes more than there are" in others["weights", "as float32"]["refusal"]
    assert others["weights", "as float32"]["job_s"] is None
    fitting = [each for each in found["alternatives"] if each["refusal"] is None]
    assert {each["decision"] for each in fitting} >= {"resident layers", "KV pages", "KV type"}
    for each in fitting:
        job_s = found["predicted"]["job_s"]
        assert each["times"] == pytest.approx(each["job_s"] / job_s)
        if each["decision"] != "KV type":
            assert each["tokens_per_s"] <= 1.02 * found["predicted"]["tokens_per_s"]


def test_shared_beginnings_and_copies_count_once(ntx: Command, model: Path, tmp_path: Path) -> None:
    beginning = "the same words in each prompt " * 20
    each = [f"{beginning}{n}" for n in range(90)]
    path = write_prompts(tmp_path / "shared.parquet", [*each, *each[:60]])
    found = plan(ntx, path, "--model", model, "--max-tokens", "9")
    rows = found["rows"]
    assert (rows["num_rows"], rows["num_computed"]) == (150, 90)
    assert rows["computed_prompt_tokens"] < 0.1 * rows["prompt_tokens"]
    assert found["predicted"]["computed_prompt_tokens"] == rows["computed_prompt_tokens"]
    shown = ntx("plan", path, "--model", model, "--max-tokens", "9").out
    assert "about 90 outputs are computed, the others are copies" in " ".join(shown.split())
    every = plan(ntx, path, "--model", model, "--max-tokens", "9", "--no-dedupe")["rows"]
    assert every["num_computed"] == 150


def test_the_cache_holds_the_longest_row_or_one_is_told(
    ntx: Command, model: Path, tmp_path: Path
) -> None:
    path = write_prompts(tmp_path / "uneven.parquet", ["a"] * 9 + ["a b c d " * 60])
    options = (path, "--model", model, "--max-tokens", "4", "--memory", "90MiB")
    found = plan(ntx, *options)
    longest = found["rows"]["longest_tokens"]
    assert longest > 200 and found["memory"]["kv_pages"] >= -(-longest // 32)
    assert found["rows"]["num_too_long"] == 0
    small = (*options, "--kv-memory", "2MiB")
    assert plan(ntx, *small)["rows"]["num_too_long"] == 1
    assert "1 of 10 rows read" in ntx("plan", *small).out


def test_more_threads_than_cores_are_refused(ntx: Command, prompts: Path, model: Path) -> None:
    for command in ("plan", "submit"):
        refused = ntx(command, prompts, "--model", model, "--threads", "6400")
        assert (refused.code, refused.out) == (2, "")
        assert "threads is 6400" in refused.err and "cores" in refused.err


def test_budgets_that_no_gpu_could_work_with_are_refused(
    ntx: Command, prompts: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with a GPU: before one is asked for anything."""
    gpu = DeviceChoice("gpu", "one is there")
    monkeypatch.setattr("ntx_batch.preflight.choose_job_device", lambda config: gpu)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    refused = ntx("submit", prompts, "--model", model, "--memory", "64MiB")
    assert (refused.code, refused.out) == (2, "")
    assert "on a GPU" in refused.err and "the smallest that works here" in refused.err
    for command in ("plan", "submit"):
        refused = ntx(command, prompts, "--model", model, "--host-memory", "900TiB")
        assert (refused.code, refused.out) == (2, "")
        assert "this machine can pin" in refused.err


def test_people_see_placement_memory_and_time(ntx: Command, prompts: Path, model: Path) -> None:
    shown = ntx(
        *("plan", prompts, "--model", model, "--memory", "75MiB", "--sweep-tokens", "64"),
        *("--reader", "mmap"),
    )
    assert shown.code == 0
    names = [line.split("  ")[0].strip() for line in shown.out.splitlines()]
    for name in ("placement", "memory", "rows on board", "sweep", "T*", "speed", "time"):
        assert name in names, shown.out
    assert "ring" in shown.out and "by the mmap reader" in shown.out
    assert "limited by" in names


def test_people_see_the_tiers_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Only letters that occur are explained; the link and host memory have their lines."""
    placement = {
        "picture": "hrhh h",
        "streamed_nbytes": 40 * MIB,
        "disk_nbytes": 0,
        "reader": "direct",
        "sweep_tokens": 2048,
    }
    memory = dict.fromkeys(
        ("budget_nbytes", "used_nbytes", "weights_nbytes", "ring_nbytes", "work_nbytes"), 64 * MIB
    )
    memory |= {"kv_nbytes": MIB, "kv_pages": 9, "host_budget_nbytes": 80 * MIB}
    memory |= {"host_kv_pages": 0, "host_kv_nbytes": 0, "kv_staging_nbytes": 0}
    memory |= {"host_nbytes": 50 * MIB, "asked_nbytes": None, "kv_type": "f16"}
    rates = {"disk_nbytes_per_s": None, "link_nbytes_per_s": 5e10, "num_threads": 1}
    predicted = {
        **dict.fromkeys(("rows_on_board", "kv_rows", "sweep_used_tokens", "tokens_at_balance"), 7),
        **dict.fromkeys(("sweep_s", "compute_s", "tokens_per_s", "job_s", "hours"), 0.25),
        "link_s": 0.5,
        "host_kv_s": 0.0,
        "host_kv_pages": 0.0,
        "disk_s": 0.0,
        "rows_limited_by": "rows",
        "limited_by": "link",
    }
    report = {
        "engines": 1,
        "model": {"file": "m.gguf", "layers": 4, "nbytes": MIB},
        "rows": {
            "num_rows": 5,
            "num_samples": 1,
            "is_estimate": False,
            "num_sampled": 5,
            "num_bad": 0,
            "num_computed": 5,
            "prompt_tokens": 3.0,
            "computed_prompt_tokens": 3.0,
            "max_output_tokens": 4.0,
            "expected_output_tokens": 2.0,
            "longest_tokens": 6,
            "num_too_long": 0,
        },
        "placement": placement,
        "memory": memory,
        "rates": {**rates, "flops_per_s": 6e14, "values_per_s": {}},
        "predicted": predicted,
        "alternatives": [],
    }
    print_plan(report)
    shown = " ".join(capsys.readouterr().out.split())
    assert "hrhh r stays in memory, h comes from host memory; the head: h" in shown
    assert "from host memory" in shown and "host memory 50" in shown
    assert "link 50.00 GB/s" in shown and "link 0.5 s" in shown
    assert "off the disk" not in shown and "disk 0" not in shown
    assert "the link to the GPU: more --memory keeps more layers on it" in shown
    assert "KV cache 1.0 MiB in f16: 9 pages, 7 rows of this job" in shown
    assert "KV pages" not in shown
    memory |= {"host_kv_pages": 1234, "host_kv_nbytes": 30 * MIB, "kv_staging_nbytes": 3 * MIB}
    predicted |= {"host_kv_s": 0.25, "host_kv_pages": 1100.4, "rows_limited_by": "kv"}
    print_plan(report)
    shown = " ".join(capsys.readouterr().out.split())
    assert "KV cache 1.0 MiB in f16: 9 pages KV in passing 3.0 MiB" in shown
    assert "KV cache there 30.0 MiB: 1,234 pages more, 7 rows of this job in all; 1,100" in shown
    assert "link 0.5 s, 0.25 s of it KV pages" in shown
    assert "more --memory or --host-memory, or --kv-type int8, brings more rows" in shown
    placement |= {"picture": "hrhd d", "disk_nbytes": 20 * MIB}
    predicted |= {"limited_by": "disk", "disk_s": 0.75, "rows_limited_by": "rows"}
    print_plan(report)
    shown = " ".join(capsys.readouterr().out.split())
    assert "h comes from host memory, d comes off the disk; the head: d" in shown
    assert "of it by the direct reader" in shown and "disk 0.75 s" in shown
    assert "the disk: more --host-memory" in shown


def test_an_impossible_budget_names_one_that_works(
    ntx: Command, prompts: Path, model: Path
) -> None:
    refused = ntx("plan", prompts, "--model", model, "--memory", "10MiB")
    assert (refused.code, refused.out) == (2, "")
    words = refused.err.split("the smallest that works here is ")[1]
    smallest = words.split(":")[0].replace(",", "")
    found = plan(ntx, prompts, "--model", model, "--memory", smallest)
    assert found["memory"]["used_nbytes"] <= int(smallest)


def test_nothing_is_queued_and_no_folder_claimed(
    ntx: Command, prompts: Path, model: Path, tmp_path: Path
) -> None:
    plan(ntx, prompts, "--model", model, "--kv-memory", "32MiB")
    with JobStore(Home.open(tmp_path / "home").state_path) as store:
        assert store.list_jobs() == []
    assert not (tmp_path / "home" / "runner.lock").exists()


def test_what_submit_would_refuse_plan_refuses(ntx: Command, prompts: Path) -> None:
    ran = ntx("plan", prompts, "--model", MODEL, "--prompt-column", "nothing")
    assert (ran.code, ran.out) == (2, "")
    assert "nothing" in ran.err


def test_only_plan_and_doctor_load_numba() -> None:
    code = (
        "import sys, ntx_batch.cli, ntx_batch.submission, ntx_batch.planning, ntx_batch.doctor;"
        "print('numba' in sys.modules, 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# ---- the sample --------------------------------------------------------------------------


def sample(path: Path, **options: Any) -> RowSample:
    spec = build_spec(path, model=MODEL, **options)
    file = GgufFile.open(MODEL)
    text = ModelText.of(file, read_hparams(file), None)
    return sample_rows(spec, build_manifest(path), text, created_at=0.0)


def test_sampled_rows_are_spread_over_the_input(tmp_path: Path) -> None:
    lengths = [1] * 5000 + [101] * 5000
    found = sample(write_prompts(tmp_path / "in.parquet", ["a " * n for n in lengths]))
    assert found.num_sampled == SAMPLE_ROWS
    short, long = (
        sample(write_prompts(tmp_path / f"{n}.parquet", ["a " * n])).prompt_tokens for n in (1, 101)
    )
    assert found.prompt_tokens == pytest.approx((short + long) / 2)
    assert not found.is_estimate


@pytest.mark.parametrize("num_rows", [0, 1, 7, SAMPLE_ROWS, SAMPLE_ROWS + 1, 1000, 10**9])
def test_ranges_lie_in_the_input_and_do_not_overlap(num_rows: int) -> None:
    ranges = sorted(sample_ranges(num_rows))
    assert sum(end - begin for begin, end in ranges) == min(num_rows, SAMPLE_ROWS)
    ends = [0, *(end for _, end in ranges)]
    assert all(begin >= end for (begin, _), end in zip(ranges, ends, strict=False))
    assert ends[-1] == num_rows


def test_rows_that_cannot_run_are_counted_and_left_out(tmp_path: Path) -> None:
    found = sample(write_prompts(tmp_path / "in.parquet", ["a b", None, "", "a b"]))
    assert (found.num_rows, found.num_sampled, found.num_bad) == (4, 4, 2)
    assert found.prompt_tokens > 1


def test_answers_end_where_the_context_does(tmp_path: Path) -> None:
    found = sample(write_prompts(tmp_path / "in.parquet", ["a b"]), max_tokens=10**6)
    hparams = read_hparams(GgufFile.open(MODEL))
    assert found.output_tokens == hparams.context_length - found.prompt_tokens


def test_rows_of_a_column_set_their_own_length(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "in.parquet", ["a", "a"], max_tokens=[10, 30])
    assert sample(path, param_columns="max_tokens").output_tokens == 20


def test_rows_of_long_text_are_estimated_from_its_beginning(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "a b c", "note": "x" * 1000}) + "\n"
    num_rows = 3 * EXCERPT_NBYTES // len(line)
    (tmp_path / "in.jsonl").write_text(line * num_rows)
    found = sample(tmp_path / "in.jsonl")
    assert found.is_estimate
    assert found.num_rows == pytest.approx(num_rows, rel=0.01)
    assert (found.num_sampled, found.num_bad) == (SAMPLE_ROWS, 0)
    few = sample(tmp_path / "in.jsonl", limit=50)
    assert (few.num_rows, few.is_estimate) == (50, False)


def test_short_text_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("prompt;x\n" + "a b;1\n" * 40)
    found = sample(tmp_path / "in.csv")
    assert (found.num_rows, found.num_bad, found.is_estimate) == (40, 0, False)
