"""What a job took against what it was predicted to, by rates probed before it and by its own."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import ntx_batch
from engine.devices import open_ops
from engine.gguf_file import GgufFile
from engine.hparams import read_hparams
from engine.loading import make_planner
from engine.planner import DEFAULT_RATES, Plan, Workload
from engine.sweep_fit import FittedCost
from engine.tokenizer import Tokenizer
from jobs.records import JobSpec
from ntx_batch import client
from ntx_batch.spec import build_spec
from scripts.bench_job import random_prompts
from scripts.bench_report import Report


def job_options(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": options.model,
        "max_tokens": options.new_tokens,
        "ignore_eos": True,
        "kv_type": options.kv_type,
        "threads": options.threads,
        "memory": options.memory,
        "device": options.device,
    }


def bench_plan(options: argparse.Namespace) -> Report:
    """Predicted over achieved seconds of one job, `--repeats` times."""
    rows = options.job_rows
    report = Report(f"plan of {rows} rows, {options.context} in, {options.new_tokens} out")
    tokenizer = Tokenizer.from_gguf(GgufFile.open(options.model))
    with tempfile.TemporaryDirectory() as name:
        home, data = Path(name) / "home", Path(name) / "prompts.parquet"
        prompts = random_prompts(tokenizer, rows, options.context)
        pq.write_table(pa.table({"prompt": prompts}), data)
        for _ in range(options.repeats):
            planned = client.plan(data, home=home, **job_options(options))
            job = ntx_batch.submit(data, home=home, **job_options(options))
            code = job.wait()
            assert code == 0, job.logs()
            record = dict(job.snapshot().record)
            client.stop_runner(home=home)
            spec = build_spec(data, **job_options(options))
            _compare(report, planned, record, repredicted(spec, planned, record))
    return report


def _compare(
    report: Report, planned: Mapping[str, Any], record: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    before, achieved = planned["predicted"], record["achieved"]
    job_s = record["last_commit_at"] - record["first_admission_at"]
    report.facts["placement"] = record["placement"]
    report.facts["KV pages, sweep tokens"] = f"{record['kv_pages']}, {record['sweep_tokens']}"
    report.facts["costs of a sweep"] = achieved["costs"]
    report.add("probe, s", planned["rates"]["probe_s"])
    report.add("achieved: job, s", job_s)
    report.add("achieved: sweeps", achieved["num_sweeps"])
    report.add("achieved: in sweeps, s", achieved["sweep_s"] * achieved["num_sweeps"])
    for name, predicted in (("probed rates", before), ("the run's rates", own)):
        report.add(f"{name}: job, s", predicted["job_s"])
        report.add(f"{name}: sweeps", predicted["num_sweeps"])
        report.add(f"{name}: predicted / achieved", predicted["job_s"] / job_s)
    for name in ("disk_s", "compute_s"):
        report.add(f"probed rates: mean sweep, {name}", before[name])
        report.add(f"the run's rates: mean sweep, {name}", own[name])


def repredicted(
    spec: JobSpec, planned: Mapping[str, Any], record: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The prediction of the plan that ran, by what its sweeps were measured to cost."""
    file = GgufFile.open(spec.model)
    hparams, achieved = read_hparams(file), record["achieved"]
    rates = replace(
        DEFAULT_RATES,
        disk_nbytes_per_s=achieved.get("read_nbytes_per_s") or DEFAULT_RATES.disk_nbytes_per_s,
        link_nbytes_per_s=achieved.get("copy_nbytes_per_s"),
    )
    rows = planned["rows"]
    workload = Workload(
        num_rows=rows["num_computed"],
        prompt_tokens=rows["prompt_tokens"],
        output_tokens=rows["max_output_tokens"],
        reused_tokens=rows["prompt_tokens"] - rows["computed_prompt_tokens"],
    )
    ops = open_ops(spec.engine)
    try:
        planner = make_planner(file, hparams, spec.engine, ops, rates=rates, workload=workload)
        cost = FittedCost(**achieved["costs"]).sweep_cost
        return planner.predicted(recorded_plan(record), cost).predicted
    finally:
        ops.close()


def recorded_plan(record: Mapping[str, Any]) -> Plan:
    """A plan out of a job's record."""
    *layers, head = record["placement"].replace(" ", "")
    places = {
        "resident": tuple(letter == "r" for letter in layers),
        "host": tuple(letter == "h" for letter in layers),
        "head_resident": head == "r",
        "head_in_host": head == "h",
        "predicted": {},
    }
    names = [field.name for field in fields(Plan) if field.name not in places]
    return Plan(**places, **{name: record[name] for name in names})
