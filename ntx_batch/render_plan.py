"""How a plan and a doctor's findings look to people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from ntx_batch.render import duration, nbytes_text, print_facts, print_table

CHECK_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}
_LIMITS = {
    "rows": "all rows of the job",
    "kv": "as many as the KV cache holds",
    "sweep": "as many as a sweep can refill",
}
_PLACES = {"r": "r stays in memory", "h": "h comes from host memory", "d": "d comes off the disk"}
_SMALLER_KV = {"f32": "--kv-type f16 or int8", "f16": "--kv-type int8"}
PICTURE_WIDTH = 60


def rate_text(nbytes_per_s: float | None) -> str:
    return "-" if nbytes_per_s is None else f"{nbytes_per_s / 1e9:.2f} GB/s"


def print_plan(report: Mapping[str, Any]) -> None:
    """The plan of a job: where weights are, where memory goes, and what that should give."""
    print_facts(dict(_plan_facts(report)))
    print_table(_alternatives_table(report))


def _alternatives_table(report: Mapping[str, Any]) -> Table:
    """What would come of the job if one decision were another."""
    table = Table(
        box=None, padding=(0, 2, 0, 0), title="One decision changed", title_justify="left"
    )
    for name in ("decision", "chosen", "instead"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "time", "times"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("", overflow="fold")
    predicted = report["predicted"]
    table.add_row("this plan", *("", ""), *_speed_cells(predicted, 1.0), "")
    for other in report["alternatives"]:
        cells = ("-",) * 3 if other["refusal"] else _speed_cells(other, other["times"])
        note = f"does not fit: {other['refusal']}" if other["refusal"] else ""
        if other["is_asked"]:
            note = "; ".join(["your choice", *([note] if note else [])])
        table.add_row(other["decision"], other["chosen"], other["instead"], *cells, note)
    return table


def _speed_cells(found: Mapping[str, Any], times: float) -> tuple[str, str, str]:
    return f"{found['tokens_per_s']:.1f}", duration(found["job_s"]), f"{times:.2f}"


def _plan_facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model, rows = report["model"], report["rows"]
    yield "model", f"{model['file']}: {model['layers']} layers, {nbytes_text(model['nbytes'])}"
    if report["engines"] > 1:
        yield "engines", f"{report['engines']}; memory and passes below are those of one of them"
    yield "rows", _rows_text(rows)
    yield from _reuse_facts(rows)
    yield from _placement_facts(report["placement"])
    yield from _memory_facts(report["memory"], report["predicted"])
    yield "this machine", _rates_text(report["rates"])
    kv_type = report["memory"]["kv_type"]
    yield from _predicted_facts(report["placement"], report["predicted"], kv_type)


def _rows_text(rows: Mapping[str, Any]) -> str:
    about = "about " if rows["is_estimate"] else ""
    each = f" of {rows['num_samples']} samples each" if rows["num_samples"] > 1 else ""
    bad = f", {rows['num_bad']} of them cannot run" if rows["num_bad"] else ""
    most, expected = rows["max_output_tokens"], rows["expected_output_tokens"]
    answers = f"{most:.0f}, the most that they may have"
    if expected < most:
        answers = f"{expected:.0f} expected, of {most:.0f} that they may have at most"
    return (
        f"{about}{rows['num_rows']:,}{each}; prompts of {rows['prompt_tokens']:.0f} tokens "
        f"({rows['num_sampled']} rows read{bad}), answers of {answers}"
    )


def _reuse_facts(rows: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What need not be computed, and what cannot be, where there is any."""
    parts = []
    if rows["num_computed"] < rows["num_rows"] * rows["num_samples"]:
        parts.append(f"about {rows['num_computed']:,} outputs are computed, the others are copies")
        if rows["num_bad"]:
            parts[-1] += " or cannot run"
    if rows["computed_prompt_tokens"] <= rows["prompt_tokens"] - 1:
        tokens = rows["computed_prompt_tokens"]
        parts.append(f"of each prompt about {tokens:.0f} tokens are computed, the others shared")
    if parts:
        yield "reuse", "; ".join(parts)
    if rows["num_too_long"]:
        yield (
            "too long",
            f"{rows['num_too_long']} of {rows['num_sampled']} rows read, of up to "
            f"{rows['longest_tokens']:,} tokens with their answers: the KV cache holds none of "
            "them; raise --memory or --kv-memory, or lower --max-tokens",
        )


def _placement_facts(placement: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not placement["streamed_nbytes"]:
        how = "as float32" if placement["expanded"] else "as in the file"
        yield "placement", f"all weights stay in memory, {how}"
        return
    *layers, head = placement["picture"].replace(" ", "")
    picture = "".join(layers)
    lines = [picture[at : at + PICTURE_WIDTH] for at in range(0, len(picture), PICTURE_WIDTH)]
    meanings = ", ".join(text for letter, text in _PLACES.items() if letter in [*layers, head])
    yield "placement", "\n".join([*lines, f"{meanings}; the head: {head}"])
    disk_nbytes, streamed = placement["disk_nbytes"], nbytes_text(placement["streamed_nbytes"])
    by = f"by the {placement['reader']} reader"
    if disk_nbytes == placement["streamed_nbytes"]:
        yield "streamed", f"{streamed} in each sweep, {by}"
    elif disk_nbytes:
        yield "streamed", f"{streamed} in each sweep; {nbytes_text(disk_nbytes)} of it {by}"
    else:
        yield "streamed", f"{streamed} in each sweep, from host memory"


def _memory_facts(
    memory: Mapping[str, Any], predicted: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    budget, asked = nbytes_text(memory["budget_nbytes"]), memory["asked_nbytes"]
    if asked is None:
        source = "nine tenths of what is free"
    elif asked > memory["budget_nbytes"]:
        source = f"all that is free; {nbytes_text(asked)} were asked for"
    else:
        source = "as asked for"
    yield "memory", f"{nbytes_text(memory['used_nbytes'])} of {budget} ({source})"
    yield "  weights", nbytes_text(memory["weights_nbytes"])
    if memory["ring_nbytes"]:
        yield "  ring", nbytes_text(memory["ring_nbytes"])
    yield "  work buffers", nbytes_text(memory["work_nbytes"])
    rows = f"{predicted['kv_rows']:,} rows of this job"
    beside = memory["host_kv_pages"]
    yield (
        "  KV cache",
        f"{nbytes_text(memory['kv_nbytes'])} in {memory['kv_type']}: {memory['kv_pages']:,} pages"
        + ("" if beside else f", {rows}"),
    )
    if beside:
        yield "  KV in passing", nbytes_text(memory["kv_staging_nbytes"])
    if memory["host_budget_nbytes"] is not None:
        host = nbytes_text(memory["host_budget_nbytes"])
        yield "host memory", f"{nbytes_text(memory['host_nbytes'])} of {host}, pinned"
    if beside:
        yield (
            "  KV cache there",
            f"{nbytes_text(memory['host_kv_nbytes'])}: {beside:,} pages more, {rows} in all; "
            f"{predicted['host_kv_pages']:,.0f} of them come over the link in the mean sweep",
        )


def _rates_text(rates: Mapping[str, Any]) -> str:
    passes = ", ".join(f"{rate / 1e9:.1f}e9 {n}/s" for n, rate in rates["values_per_s"].items())
    links = {"disk": rates["disk_nbytes_per_s"], "link": rates["link_nbytes_per_s"]}
    return (
        "".join(f"{name} {rate_text(rate)}; " for name, rate in links.items() if rate)
        + f"{rates['num_threads']} threads, {rates['flops_per_s'] / 1e9:.0f} GFLOP/s; "
        + f"a pass over weights: {passes}"
    )


def _predicted_facts(
    placement: Mapping[str, Any], predicted: Mapping[str, Any], kv_type: str
) -> Iterator[tuple[str, str]]:
    limit = _LIMITS[predicted["rows_limited_by"]]
    yield "rows on board", f"{predicted['rows_on_board']:,}: {limit}"
    yield (
        "sweep",
        f"{predicted['sweep_s']:.3g} s with {predicted['sweep_used_tokens']:.0f} tokens (at most "
        f"{placement['sweep_tokens']}): computing {predicted['compute_s']:.3g} s"
        + "".join(
            f", {name} {predicted[name + '_s']:.3g} s"
            for name in ("link", "disk")
            if predicted.get(name + "_s")
        )
        + (f", {predicted['host_kv_s']:.3g} s of it KV pages" if predicted["host_kv_s"] else ""),
    )
    if placement["streamed_nbytes"]:
        balance = predicted["tokens_at_balance"]
        ride = f"{balance:.0f} tokens: up to so many ride along at no cost"
        yield (
            "T*",
            ride
            if balance >= 1
            else "none: one token takes longer to compute than all that streams",
        )
    yield "speed", f"{predicted['tokens_per_s']:.1f} tokens/s generated"
    yield "time", f"{duration(predicted['job_s'])} ({predicted['hours']:.2f} hours)"
    yield "limited by", _limited_text(predicted, kv_type)


def _limited_text(predicted: Mapping[str, Any], kv_type: str) -> str:
    if predicted["limited_by"] == "compute":
        return "computing: faster or more cores would help, a faster disk would not"
    by_link = predicted["limited_by"] == "link"
    what = "the link to the GPU" if by_link else "the disk"
    if predicted["rows_limited_by"] == "kv":
        more = "--memory or --host-memory" if predicted["host_kv_s"] else "--memory"
        smaller = _SMALLER_KV.get(kv_type)
        more = f"more {more}, or {smaller}," if smaller else f"more {more}"
        return f"{what}, and KV memory: {more} brings more rows on board"
    if predicted["limited_by"] == "disk" and "link_s" in predicted:
        return "the disk: more --host-memory keeps more layers in it"
    return f"{what}: more --memory keeps more layers {'on it' if by_link else 'in it'}"


def print_checks(report: Mapping[str, Any]) -> None:
    """A doctor's findings: one line for each, and below it what to do."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for check in report["checks"]:
        detail = Text(check["detail"])
        if check["advice"]:
            detail.append(f"\n{check['advice']}", style="bold")
        status = Text(check["status"], style=CHECK_STYLES[check["status"]])
        table.add_row(status, check["name"], detail)
    print_table(table)
