"""What a job would do on this machine, found out without running it: for `ntx-batch plan`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from engine.alternatives import Alternative
from engine.gguf_file import GgufFile
from engine.hparams import Hparams, read_hparams
from engine.kv_cache import pages_for
from engine.loading import reader_name
from jobs.achieved import of_all_engines
from jobs.budget import beside_object_store, engines_here, share_here
from jobs.home import Home
from jobs.job_device import choose_job_device
from jobs.job_plan import JobPlan, plan_alternatives, plan_job
from jobs.ray_cluster import OBJECT_STORE_NBYTES
from jobs.records import JobSpec
from jobs.workload import ModelText, RowSample, part_of, sample_rows
from ntx_batch.preflight import check_job
from ntx_batch.status import plain


def make_report(spec: JobSpec, home: Home) -> dict[str, Any]:
    """The plan of a job and what it should give, as plain JSON values.

    Reads the model's header and some rows, and measures products and, where weights stream, the
    disk: a few seconds.

    Raises SpecError, DatasetError, EngineError: the job cannot run as asked.
    """
    manifest = check_job(replace(spec, output=None), checks_budget=False).manifest
    file = GgufFile.open(spec.model)
    hparams = read_hparams(file)
    text = ModelText.of(file, hparams, spec.engine.pre_tokenizer)
    sample = sample_rows(spec, manifest, text, created_at=time.time())
    # Numba comes with it; no other command needs it.
    from engine.devices import open_ops, resolved

    device = choose_job_device(spec.engine).device
    num_engines = engines_here(device, spec.engines)
    spec = replace(spec, engine=share_here(spec.engine, device, spec.engines))
    ops = open_ops(spec.engine)
    spec = replace(spec, engine=resolved(spec.engine, ops))
    if ops.name != "cpu":
        on_gpu = replace(spec.engine, device="gpu")
        spec = replace(spec, engine=beside_object_store(on_gpu, OBJECT_STORE_NBYTES))
    try:
        planned = plan_job(
            file,
            hparams,
            spec.engine,
            ops,
            sample=lambda: part_of(sample.workload, num_engines),
            cache_dir=home.probes_dir,
            always_probe=True,
        )
        return {
            "model": _model(file, hparams),
            "engines": num_engines,
            "memory": _memory(spec, planned),
            "placement": _placement(spec, planned),
            "rows": _rows(sample, planned),
            "rates": _rates(ops.num_workers, planned),
            "predicted": _predicted(planned, num_engines),
            "alternatives": [
                _alternative(planned, other, num_engines)
                for other in plan_alternatives(planned, file, hparams, spec.engine, ops)
            ],
        }
    finally:
        ops.close()


def _model(file: GgufFile, hparams: Hparams) -> dict[str, Any]:
    return {
        "file": str(file.path),
        "architecture": hparams.architecture,
        "layers": hparams.num_layers,
        "nbytes": sum(tensor.nbytes for tensor in file.tensors.values()),
    }


def _memory(spec: JobSpec, planned: JobPlan) -> dict[str, Any]:
    """work_nbytes: buffers of a sweep and what workers and Python take beside it; host: pinned
    memory beside a GPU, None on a CPU; kv_staging_nbytes: of the device's memory, for KV pages that
    come from there"""
    plan, budget = planned.plan, planned.budget
    return {
        "asked_nbytes": spec.engine.memory_nbytes,
        "budget_nbytes": budget.device_nbytes,
        "used_nbytes": plan.device_nbytes,
        "weights_nbytes": plan.weights_nbytes,
        "ring_nbytes": plan.ring_nbytes,
        "work_nbytes": plan.activations_nbytes,
        "work_fixed_nbytes": budget.fixed_nbytes,
        "kv_nbytes": plan.kv_nbytes,
        "kv_pages": plan.kv_pages,
        "kv_type": spec.engine.kv_type,
        "host_kv_pages": plan.host_kv_pages,
        "host_kv_nbytes": plan.host_kv_nbytes,
        "kv_staging_nbytes": plan.kv_staging_nbytes,
        "host_asked_nbytes": spec.engine.host_memory_nbytes,
        "host_budget_nbytes": budget.host_nbytes,
        "host_nbytes": plan.host_nbytes,
    }


def _placement(spec: JobSpec, planned: JobPlan) -> dict[str, Any]:
    plan = planned.plan
    return {
        "expanded": plan.expand,
        "layers": len(plan.resident),
        "resident_layers": sum(plan.resident),
        "head_resident": plan.head_resident,
        "picture": plan.placement,
        "streamed_nbytes": plan.streamed_nbytes,
        "disk_nbytes": plan.disk_nbytes,
        "reader": reader_name(spec.engine, plan),
        "sweep_tokens": plan.sweep_tokens,
        "max_rows": plan.max_rows,
    }


def _rows(sample: RowSample, planned: JobPlan) -> dict[str, Any]:
    """num_computed: outputs that are no copies, about; computed_prompt_tokens: of each of them;
    num_too_long: sampled rows that the KV cache does not hold even alone"""
    pages = [pages_for(stored) for stored in sample.stored_tokens]
    return {
        "num_rows": sample.num_rows,
        "num_samples": sample.num_samples,
        "is_estimate": sample.is_estimate,
        "num_sampled": sample.num_sampled,
        "num_bad": sample.num_bad,
        "num_computed": sample.workload.num_rows,
        "prompt_tokens": round(sample.prompt_tokens, 1),
        "computed_prompt_tokens": planned.plan.predicted["computed_prompt_tokens"],
        "max_output_tokens": round(sample.output_tokens, 1),
        "expected_output_tokens": round(sample.output_tokens * sample.expected_share, 1),
        "longest_tokens": sample.workload.longest_tokens,
        "num_too_long": sum(count > planned.plan.total_kv_pages for count in pages),
    }


def _rates(num_threads: int, planned: JobPlan) -> dict[str, Any]:
    rates = planned.rates
    assert rates is not None
    return {
        "num_threads": num_threads,
        "disk_nbytes_per_s": rates.disk_nbytes_per_s if planned.plan.disk_nbytes else None,
        "link_nbytes_per_s": rates.link_nbytes_per_s,
        "values_per_s": plain(rates.values_per_s),
        "flops_per_s": rates.flops_per_s,
        "decode_position_s": rates.decode_position_s,
        "prefill_position_s": rates.prefill_position_s,
        "choice_s": rates.choice_s,
        "probe_s": planned.probe_s,
    }


def _predicted(planned: JobPlan, num_engines: int) -> dict[str, Any]:
    predicted = of_all_engines(planned.plan.predicted, num_engines)
    return {**predicted, "hours": predicted["job_s"] / 3600}


def _alternative(planned: JobPlan, other: Alternative, num_engines: int) -> dict[str, Any]:
    """times: seconds of the job over those of the plan; is_asked: not the planner's to decide"""
    predicted = other.plan and of_all_engines(other.plan.predicted, num_engines)
    return {
        "decision": other.decision,
        "chosen": other.chosen,
        "instead": other.instead,
        "is_asked": other.is_asked,
        "refusal": other.refusal or None,
        "tokens_per_s": predicted and predicted["tokens_per_s"],
        "job_s": predicted and predicted["job_s"],
        "times": predicted and predicted["job_s"] / planned.plan.predicted["job_s"],
    }
