"""Names and values for the page's tables, from what the job's record has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine import SamplingParams
from jobs.records import Job
from ntx_batch.report import words
from ntx_batch.report.power import Energy, Price, per_million
from ntx_batch.status import reused_share

Fact = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure as predicted and as achieved; ratio: achieved over predicted"""

    name: str
    predicted: str
    achieved: str
    ratio: str


# Names of figures, the fields of what was predicted and achieved, and how they are shown.
_COMPARED = (
    ("time of work", "job_s", "job_s", words.duration),
    ("generated tokens per second", "tokens_per_s", "tokens_per_s", words.number),
    ("passes over the layers", "num_sweeps", "num_sweeps", words.count),
    ("time of a pass", "sweep_s", "sweep_s", words.duration),
    ("tokens in a pass", "sweep_used_tokens", "sweep_tokens", words.number),
)


def comparisons(record: Mapping[str, Any]) -> list[Comparison]:
    """What the plan predicted beside what was achieved, as far as both are known."""
    predicted, achieved = record.get("predicted") or {}, record.get("achieved") or {}
    found = []
    for name, before_key, after_key, show in _COMPARED:
        before, after = predicted.get(before_key), achieved.get(after_key)
        if before and after:
            ratio = f"{after / before:.2f}"
            found.append(Comparison(name, show(before), show(after), ratio))
    return found


def saved_facts(job: Job) -> list[Fact]:
    """What did not have to be computed."""
    reused = words.count(job.reused_tokens)
    return [
        ("prompt tokens of rows that are ok", words.count(job.prompt_tokens)),
        ("of these, taken from other rows", reused),
        ("as a share", words.share(reused_share(job), 1.0)),
        ("rows copied from equal ones", words.count(job.num_copied)),
    ]


def stream_facts(record: Mapping[str, Any]) -> list[Fact]:
    """What came through the links in the last attempt; nothing where all weights are resident."""
    achieved = record.get("achieved") or {}
    if not achieved.get("streamed_nbytes"):
        return []
    return [*_stream_facts(record, achieved)]


def _stream_facts(record: Mapping[str, Any], achieved: Mapping[str, Any]) -> Iterator[Fact]:
    yield "weights streamed", words.size(achieved["streamed_nbytes"])
    yield "over the time of passes", _rate(achieved["disk_nbytes_per_s"])
    if achieved.get("probe_share"):
        yield "of the rate measured beforehand", words.share(achieved["probe_share"], 1.0)
    if achieved.get("read_nbytes_per_s"):
        yield "disk, while it read", _rate(achieved["read_nbytes_per_s"])
        yield "read past the page cache", words.size(achieved["direct_nbytes"])
        yield "read through it", words.size(achieved["buffered_nbytes"])
    if achieved.get("copy_nbytes_per_s"):
        yield "link to the device, while it copied", _rate(achieved["copy_nbytes_per_s"])
    yield "read by", str(record.get("read_path", "-"))
    yield "computing waited for weights", words.duration(achieved["wait_s"])
    yield "as a share of the passes", words.share(achieved["wait_s"], achieved["sweeps_s"])


def _rate(nbytes_per_s: float) -> str:
    return f"{words.number(nbytes_per_s / 1e9)}{words.THIN_SPACE}GB/s"


def energy_facts(energy: Energy, price: Price) -> list[Fact]:
    """Energy, power and cost; nothing where energy is not known."""
    return [*_energy_facts(energy, price)] if energy.joules is not None else []


def _energy_facts(energy: Energy, price: Price) -> Iterator[Fact]:
    kwh = energy.kwh or 0.0
    yield "energy", words.energy(kwh)
    if energy.work_s:
        watts = (energy.joules or 0.0) / energy.work_s
        yield "mean power", f"{words.number(watts)}{words.THIN_SPACE}W"
    tokens = (
        ("generated", energy.completion_tokens),
        ("in all", energy.prompt_tokens + energy.completion_tokens),
    )
    for name, num_tokens in tokens:
        if (each := per_million(kwh, num_tokens)) is not None:
            yield f"per million tokens {name}", words.energy(each)
    if price.kwh is None:
        return
    yield "price of a kWh", words.price(price.kwh, price.currency)
    yield "cost of the job", words.price(kwh * price.kwh, price.currency)
    for name, num_tokens in tokens:
        if (each := per_million(kwh * price.kwh, num_tokens)) is not None:
            yield f"cost per million tokens {name}", words.price(each, price.currency)


# ---- engine and job --------------------------------------------------------------------------


def engine_facts(record: Mapping[str, Any]) -> list[Fact]:
    """What computed, with how much memory, and where the weights lay."""
    return [*_engine_facts(record)] if "device" in record else []


def _engine_facts(record: Mapping[str, Any]) -> Iterator[Fact]:
    yield "device", _device(record)
    if reason := record.get("device_reason"):
        yield "why", reason
    engines = record.get("engines") or []
    if len(engines) > 1:
        for number, engine in enumerate(engines):
            yield f"engine {number}", _engine(engine)
    for name, key, show in (
        ("threads", "num_threads", words.count),
        ("architecture", "architecture", str),
        ("layers", "placement", _placement),
        ("weights in memory", "weights_nbytes", words.size),
        ("pinned host memory", "host_nbytes", words.size),
        ("ring for streaming", "ring_nbytes", words.size),
        ("KV type", "kv_type", str),
        ("KV cache", "kv_nbytes", words.size),
        ("KV pages", "kv_pages", words.count),
        ("KV cache in pinned host memory", "host_kv_nbytes", words.size),
        ("KV pages there", "host_kv_pages", words.count),
        ("rows on board at most", "max_rows", words.count),
        ("tokens in a pass at most", "sweep_tokens", words.count),
        ("context length", "context_length", words.count),
        ("layout of weights", "weight_layout", str),
        ("time to load", "load_s", words.duration),
        ("time to compile", "compile_s", words.duration),
    ):
        if record.get(key):
            yield name, show(record[key])
    if limit := (record.get("predicted") or {}).get("limited_by"):
        yield "limited by, as predicted", limit


def _engine(engine: Mapping[str, Any]) -> str:
    """One of several engines: where, how fast, and how often it was lost."""
    speed = engine["tokens_per_s"]
    text = f"{engine['device_name']} on {engine['node']}"
    text += "" if speed is None else f", {words.number(speed)} tokens/s generated"
    return f"{text}, lost {engine['num_lost']} times" if engine["num_lost"] else text


def _placement(letters: str) -> str:
    """Where layers lie, from a letter for each as in `Plan.placement`."""
    layers, _, head = letters.partition(" ")
    places = {"r": "resident", "h": "in host memory", "d": "on disk"}
    said = [
        f"{layers.count(letter)} {place}" for letter, place in places.items() if letter in layers
    ]
    return f"{', '.join(said)}; the head {places[head]}"


def _device(record: Mapping[str, Any]) -> str:
    name = str(record.get("device_name", record["device"]))
    if not record.get("device_nbytes"):
        return name
    versions = f"driver {record.get('driver_version')}, CUDA {record.get('cuda_runtime')}"
    return f"{name}, {words.size(record['device_nbytes'])}, {versions}"


def job_facts(job: Job) -> list[Fact]:
    """What was asked for, and when it was done."""
    return [*_job_facts(job)]


def _job_facts(job: Job) -> Iterator[Fact]:
    spec = job.spec
    yield "job", job.id
    if job.retry_of:
        yield "runs failed rows of", job.retry_of
    yield "state", job.state if job.reason is None else f"{job.state}: {job.reason}"
    yield "input", spec.input
    yield "model", spec.model
    yield "results", job.results_dir
    yield "sampling", _sampling(spec.params)
    if spec.samples > 1:
        yield "answers for each row", words.count(spec.samples)
    if spec.param_columns:
        yield "set for each row by", ", ".join(spec.param_columns)
    for name, unix_s in (
        ("submitted", job.created_at),
        ("started", job.started_at),
        ("first row admitted", job.record.get("first_admission_at")),
        ("finished", job.finished_at),
    ):
        if unix_s is not None:
            yield name, words.moment(unix_s)
    if job.attempt > 1:
        yield "times a runner took it", words.count(job.attempt)


def _sampling(params: SamplingParams) -> str:
    """Parameters that are not their defaults."""
    usual = SamplingParams()
    values = [(each.name, getattr(params, each.name)) for each in fields(params)]
    said = [f"{name}={value!r}" for name, value in values if value != getattr(usual, name)]
    return ", ".join(said) or "greedy, as by default"
