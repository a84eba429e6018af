"""What people see: tables and answers on stdout, notes and progress on stderr."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
)
from rich.table import Table
from rich.text import Text

from jobs.hooks import shown_target
from jobs.records import Hook, Job
from jobs.uris import base_name
from ntx_batch.status import Rates, rates_of, reused_share, took_s

STATE_STYLES = {
    "running": "cyan",
    "completed": "green",
    "failed": "red",
    "cancelled": "yellow",
    "paused": "yellow",
    "interrupted": "yellow",
}
# Titles of `list` and their least widths.
JOB_COLUMNS = {
    "JOB": 12,
    "STATE": 11,
    "ROWS": 9,
    "FAILED": 6,
    "TOKENS/S": 8,
    "CREATED": 11,
    "INPUT": 8,
}
PLAIN_INTERVAL_S = 10.0  # between progress lines where stderr is not a terminal
PIPE_WIDTH = 10_000  # no line is longer
CELL_CHARS = 400  # longer texts are cut in tables, never in files
MAX_CARRIED = 2
_ROW_COLUMNS = ("ended", "text", "tokens")
_ERROR_COLUMNS = ("error_code", "error_message")


def out() -> Console:
    return Console(highlight=False, soft_wrap=False)


def err() -> Console:
    return Console(stderr=True, highlight=False)


def print_table(table: Table) -> None:
    """A table on stdout: as wide as the terminal, or for a program as wide as its longest lines."""
    console = out()
    if console.is_terminal:
        console.print(table)
        return
    wide = Console(width=PIPE_WIDTH, highlight=False)
    with wide.capture() as capture:
        wide.print(table)
    for line in capture.get().splitlines():
        print(line.rstrip())


def note(text: str) -> None:
    """One line on stderr, as it is: never wrapped, never read as markup."""
    err().print(Text(text), soft_wrap=True)


def error(text: str) -> None:
    message = Text("error: ", style="bold red")
    err().print(message.append(text, style="not bold default"), soft_wrap=True)


def print_json(value: Any) -> None:
    """JSON alone on stdout, whatever the terminal."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def duration(seconds: float | None) -> str:
    """1:02:03, 2:05 or 0:07; "-" for None."""
    if seconds is None:
        return "-"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def nbytes_text(nbytes: int) -> str:
    """Bytes as people write them: 512 B, 1.5 KiB, 8.0 GiB."""
    value, units = float(nbytes), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if value < 1024 or unit == units[-1]:
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def print_json_rows(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A JSON list of one object for each row, one a line, as they come."""
    print("[", end="")
    for number, row in enumerate(rows):
        print(",\n" if number else "\n", end="")
        print(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False), end="")
    print("\n]")


def print_rows(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Rows of any columns as a table, numbers to the right."""
    rows = list(rows)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for idx, name in enumerate(names):
        numbers = all(isinstance(row[idx], int | float | None) for row in rows)
        table.add_column(Text(name), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    print_table(table)


# ---- jobs ------------------------------------------------------------------------------------


def print_facts(facts: Mapping[str, Any]) -> None:
    """A two-column table of names and values."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, _cell("-" if value is None else value))
    print_table(table)


def print_status(job: Job, now: float) -> None:
    rates = rates_of(job, now)
    print_facts(
        {
            "job": job.id,
            "state": job.state if job.reason is None else f"{job.state}: {job.reason}",
            **({"retries": job.retry_of} if job.retry_of else {}),
            **({"schedule": f"{job.schedule}, run {job.run}"} if job.schedule else {}),
            **({"key": job.key} if job.key else {}),
            **({"priority": job.priority} if job.priority else {}),
            **_chain_facts(job),
            "rows": _counts(job),
            **_saved_facts(job),
            "speed": _speed(job, now),
            **({"time left": duration(rates.eta_s)} if job.state == "running" else {}),
            "took": duration(took_s(job, now)),
            "input": job.spec.input,
            "model": job.spec.model,
            "results": job.results_dir,
            **device_facts(job),
            **engine_facts(job),
            **achieved_facts(job),
            **_kv_facts(job),
            **{f"on {hook.event}": _hook_text(hook) for hook in job.hooks},
        }
    )


def _chain_facts(job: Job) -> dict[str, str]:
    """The job whose results this one reads, and how many rows of them."""
    if job.spec.after is None:
        return {}
    text = f"job {job.spec.after}"
    if facts := job.record.get("after"):
        text += f", {facts['rows']} rows"
        if facts["not_ok"]:
            fate = "left out" if facts["left_out"] else "read like others"
            text += f"; {facts['not_ok']} not ok, {fate}"
    return {"after": text}


_HOOK_STATES = {"idle": "waits for that", "due": "to be told", "running": "being told"}


def _hook_text(hook: Hook) -> str:
    text = f"{shown_target(hook.target)}: {_HOOK_STATES.get(hook.state, hook.state)}"
    if hook.num_attempts > 1 or hook.error:
        text += f", attempt {hook.num_attempts}"
    return f"{text}: {hook.error}" if hook.error else text


def _saved_facts(job: Job) -> dict[str, str]:
    """What did not have to be computed, where there is any."""
    facts = {}
    if job.num_copied:
        one = "1 row is a copy of an equal one"
        more = f"{job.num_copied} rows are copies of equal ones"
        facts["copied"] = one if job.num_copied == 1 else more
    if job.reused_tokens:
        share = reused_share(job)
        facts["reused"] = f"{job.reused_tokens:,} prompt tokens, {share:.0%} of all"
    return facts


def _kv_facts(job: Job) -> dict[str, str]:
    """What a KV cache that approximates changed, on the job's first rows."""
    found = job.record.get("kv_accuracy")
    if not found:
        return {}
    if "error" in found:
        return {"KV cache": f"{found['kv_type']}; what it changes is not known: {found['error']}"}
    return {
        "KV cache": f"{found['kv_type']}; of the last {found['num_tokens']} tokens of "
        f"{found['num_rows']} rows {found['greedy_agreement']:.1%} have the same most likely one "
        f"as with {found['reference']}, log-probabilities differ by "
        f"{found['mean_logprob_difference']:.2g} in the mean "
        f"({found['measure_s']:.0f} s to measure)"
    }


def device_facts(job: Job) -> dict[str, str]:
    """What computes the job, once that is settled, and why that."""
    record = job.record
    if "device_name" not in record:
        return {}
    text = record["device_name"]
    if nbytes := record.get("device_nbytes"):
        budget_nbytes = record["device_budget_nbytes"] or record["device_free_nbytes"]
        text += f", {nbytes_text(budget_nbytes)} of its {nbytes_text(nbytes)}"
        text += f", driver {record['driver_version']}, CUDA {record['cuda_runtime']}"
    reason = record.get("device_reason")
    return {"device": f"{text} ({reason})" if reason else text}


def engine_facts(job: Job) -> dict[str, str]:
    """Each of a job's engines, where it has several or lost one."""
    engines = job.record.get("engines") or []
    if len(engines) < 2 and not any(engine["num_lost"] for engine in engines):
        return {}
    return {f"engine {number}": _engine_text(each) for number, each in enumerate(engines)}


def _engine_text(engine: Mapping[str, Any]) -> str:
    speed, num_lost = engine["tokens_per_s"], engine["num_lost"]
    text = f"{engine['node']}: {engine['rows_on_board']} rows on board"
    text += "" if speed is None else f", {speed:.1f} tokens/s"
    if num_lost:
        times = "once" if num_lost == 1 else f"{num_lost} times"
        text += f"; lost {times}, the last time: {engine['losses'][-1]}"
    return text


def achieved_facts(job: Job) -> dict[str, str]:
    """What the job's sweeps achieved, against what was predicted where that was."""
    achieved, predicted = job.record.get("achieved"), job.record.get("predicted") or {}
    if not achieved or not achieved["num_sweeps"]:
        return {}
    facts = {
        "sweep": _against(achieved["sweep_s"], predicted.get("sweep_s"), "{:.3g} s"),
        "tokens/s": _against(achieved["tokens_per_s"], predicted.get("tokens_per_s"), "{:.1f}"),
        "computing": _against(achieved["job_s"], predicted.get("job_s"), "{:.1f} s"),
    }
    if achieved.get("disk_nbytes_per_s"):
        share = achieved["probe_share"]
        facts["streamed"] = (
            f"{nbytes_text(achieved['streamed_nbytes'])} at "
            f"{achieved['disk_nbytes_per_s'] / 1e9:.2f} GB/s"
            + (f", {share:.0%} of the probed rate" if share else "")
            + f"; {job.record['read_path']}; waited {achieved['wait_s']:.1f} s for the disk"
        )
        facts["placement"] = (
            f"{job.record['resident_layers']} of {job.record['layers']} layers in memory, "
            f"{job.record['streamed_parcels']} parcels streamed"
        )
    return facts


def _against(achieved: float | None, predicted: float | None, form: str) -> str:
    text = "-" if achieved is None else form.format(achieved)
    return text if predicted is None else f"{text}, predicted {form.format(predicted)}"


def print_jobs(jobs: Iterable[Job], now: float) -> None:
    jobs = list(jobs)
    columns = dict(JOB_COLUMNS)
    if has_priorities := any(job.priority for job in jobs):
        columns |= {"PRIORITY": 8, "INPUT": columns.pop("INPUT")}
    table = Table(box=None, padding=(0, 2, 0, 0))
    # In a narrow terminal the input's name is cut, and nothing else.
    for name, width in columns.items():
        table.add_column(name, no_wrap=True, min_width=width)
    for job in jobs:
        speed = rates_of(job, now).tokens_per_s
        total = "?" if job.total is None else job.total
        table.add_row(
            job.id,
            Text(job.state, style=STATE_STYLES.get(job.state, "")),
            f"{job.num_ok + job.num_error}/{total}",
            str(job.num_error),
            "-" if speed is None else f"{speed:.1f}",
            time.strftime("%m-%d %H:%M", time.localtime(job.created_at)),
            *([str(job.priority)] if has_priorities else []),
            _input_name(job) + (f" ({job.schedule} {job.run})" if job.schedule else ""),
        )
    print_table(table)


def _input_name(job: Job) -> str:
    return f"after {job.spec.after}" if job.spec.after else base_name(job.spec.input)


def summary(job: Job, now: float) -> str:
    """One line about a job that is over, or no longer waited for."""
    reason = f" ({job.reason})" if job.reason else ""
    text = f"job {job.id} {job.state}{reason}: {_counts(job)}"
    speed = _speed(job, now)
    return text if speed is None else f"{text}; {speed}"


def _counts(job: Job) -> str:
    total = "?" if job.total is None else str(job.total)
    text = f"{job.num_ok} ok, {job.num_error} failed of {total}"
    return f"{text}, {job.num_cancelled} cancelled" if job.num_cancelled else text


def _speed(job: Job, now: float) -> str | None:
    """Rates of a job, or what comes before there are any; None where none will come."""
    rates = rates_of(job, now)
    if rates.tokens_per_s is not None and rates.prompt_tokens_per_s is not None:
        generated, read = rates.tokens_per_s, rates.prompt_tokens_per_s
        return f"{generated:.1f} tokens/s generated, {read:.1f} read"
    if job.state == "running":
        return "the engine gets ready (for a first job it compiles its kernels, about a minute)"
    return None if job.exit_code is not None else "not begun"


# ---- progress --------------------------------------------------------------------------------


class _RatesColumn(ProgressColumn):
    """Tokens per second and the time left, as the job's own numbers have them."""

    def render(self, task: Task) -> Text:
        rates: Rates = task.fields["rates"]
        speed = "-" if rates.tokens_per_s is None else f"{rates.tokens_per_s:.1f}"
        return Text(f"{speed} tokens/s  ETA {duration(rates.eta_s)}", style="cyan")


def show_progress(snapshots: Iterable[Job]) -> Iterator[Job]:
    """Pass a job's snapshots on and show each on stderr: a bar on a terminal, else lines."""
    return _show_bar(snapshots) if err().is_terminal else _show_lines(snapshots)


def _show_bar(snapshots: Iterable[Job]) -> Iterator[Job]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        _RatesColumn(),
    )
    with Progress(*columns, console=err(), transient=True) as progress:
        task = progress.add_task("", total=None, rates=Rates())
        for job in snapshots:
            progress.update(
                task,
                description=f"{job.id} {job.state}",
                total=job.total,
                completed=job.num_ok + job.num_error,
                rates=rates_of(job, time.time()),
            )
            yield job


def _show_lines(snapshots: Iterable[Job]) -> Iterator[Job]:
    said_state, said_at = "", 0.0
    for job in snapshots:
        now = time.monotonic()
        if job.exit_code is None and (job.state != said_state or now - said_at > PLAIN_INTERVAL_S):
            said_state, said_at = job.state, now
            note(f"{job.id} {job.state}: {_progress_text(job, time.time())}")
        yield job


def _progress_text(job: Job, now: float) -> str:
    if job.state == "queued" and job.waits and job.reason:
        return job.reason
    eta_s = rates_of(job, now).eta_s
    parts = [_counts(job), _speed(job, now), None if eta_s is None else f"ETA {duration(eta_s)}"]
    return "; ".join(part for part in parts if part is not None)


# ---- results ---------------------------------------------------------------------------------


def print_results(
    names: Sequence[str], rows: Iterable[Sequence[Any]], *, prefix: str, errors: bool
) -> None:
    """Result rows as a table: their index, the first carried columns, and what came of them.

    Of a row's samples the second is 7.1, after 7.

    names: columns of `rows`, carried ones first
    prefix: what the job puts before the names of our columns
    """
    carried = list(names[: names.index(prefix + "row_index")])[:MAX_CARRIED]
    ours = _ERROR_COLUMNS if errors else _ROW_COLUMNS
    table = Table(show_lines=True)
    for name in ("row", *carried, *ours):
        table.add_column(name, overflow="fold")
    for row in rows:
        values = dict(zip(names, row, strict=True))
        own = {name.removeprefix(prefix): value for name, value in values.items()}
        sample = f".{own['sample_index']}" if own["sample_index"] else ""
        shown = [f"{own['row_index']}{sample}", *(values[name] for name in carried)]
        shown += [own[name] for name in ours] if errors else _outcome(own)
        table.add_row(*map(_cell, shown))
    if table.row_count:
        out().print(table)
    else:
        note("no failed rows so far" if errors else "no rows finished so far")


def _outcome(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Values of _ROW_COLUMNS; a failed row shows its code and message."""
    if row["status"] == "error":
        return row["error_code"], row["error_message"], None
    ended = row["finish_reason"] or row["status"]
    return ended, row["generated_text"], row["completion_tokens"]


def _cell(value: Any) -> Text:
    text = "" if value is None else str(value)
    return Text(text if len(text) <= CELL_CHARS else text[: CELL_CHARS - 1] + "…")


# ---- models ----------------------------------------------------------------------------------


def print_model(found: Mapping[str, Any]) -> None:
    """A model file's description: facts, layers, bytes per type, metadata."""
    types = {name: nbytes_text(nbytes) for name, nbytes in found["types"].items()}
    print_facts(
        {
            "file": ", ".join(found["files"]),
            "GGUF version": found["version"],
            "architecture": found["architecture"],
            "name": found["name"],
            "size": nbytes_text(found["nbytes"]),
            "problem": found["problem"] or "none: this version can run it",
            **{f"in {name}": size for name, size in types.items()},
        }
    )
    _print_section("layers", {_layer_name(run): _layer_text(run) for run in _runs(found["layers"])})
    _print_section("metadata", found["metadata"])


def print_tokens(found: Mapping[str, Any]) -> None:
    """Token ids, one a line, with each token's text; warnings on stderr."""
    for warning in found["warnings"]:
        note(f"warning: {warning}")
    for token_id, token in zip(found["ids"], found["tokens"], strict=True):
        print(f"{token_id}\t{token!r}")


def _print_section(title: str, facts: Mapping[str, Any]) -> None:
    out().print(Text(f"\n{title}", style="bold"))
    print_facts(facts)


def _runs(layers: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Neighbouring layers of the same make, together."""
    runs: list[list[dict[str, Any]]] = []
    for layer in layers:
        same = runs and runs[-1][0] | {"layer": layer["layer"]} == layer
        if same and layer["layer"] is not None:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def _layer_name(run: list[dict[str, Any]]) -> str:
    first, last = run[0]["layer"], run[-1]["layer"]
    if first is None:
        return "outside layers"
    return f"layer {first}" if first == last else f"layers {first} to {last}, each"


def _layer_text(run: list[dict[str, Any]]) -> str:
    types = ", ".join(f"{nbytes_text(n)} {name}" for name, n in run[0]["types"].items())
    return f"{run[0]['tensors']} tensors, {types}"
