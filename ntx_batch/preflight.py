"""What `submit` checks in about a second: the model's header, the input's footers, the templates.

Nothing large is read: no tensor, no row. What is wrong here would only end the job later.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Literal

from engine.chat import DEFAULT_TEMPLATE_KEY, TEMPLATE_KEY, ChatTemplate, PromptTemplate
from engine.devices import DeviceChoice
from engine.gguf_file import GgufFile
from engine.hparams import Hparams, check_tensors, read_hparams
from engine.params import validate_params
from engine.pretokenizers import find_pre_tokenizer
from engine.requests import MemoryBudgetError, RowError, TokenizerError
from jobs.budget import (
    check_budget,
    check_engines,
    check_host_memory,
    check_threads,
    share_here,
)
from jobs.columns import bind_columns
from jobs.dataset import SAMPLE_NBYTES, Schema, build_manifest, read_schema
from jobs.fingerprint import read_fingerprint
from jobs.formats.csv_file import name_of
from jobs.job_device import choose_job_device, device_notes
from jobs.output_folder import OwnFile, find_own_files, refuse_input_place
from jobs.publish import claim_folder
from jobs.ray_cluster import cluster_address
from jobs.records import Binding, Fingerprint, JobSpec, Manifest, SpecError

TOKENIZER_KINDS = ("llama", "gpt2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A job that can be queued.

    notes: what was bound, and what its owner may want to know
    overwrites: files in the results folder that are to be removed
    """

    manifest: Manifest
    notes: tuple[str, ...]
    fingerprint: Fingerprint
    overwrites: tuple[OwnFile, ...] = ()


def check_job(
    spec: JobSpec,
    *,
    overwrite: bool = False,
    checks_budget: bool = True,
    only: Container[str] | None = None,
    schema: Schema | None = None,
) -> Checked:
    """Check a spec against its model and its input.

    overwrite: parts of other jobs may be in the results folder
    checks_budget: refuse a --memory in which no row at all could run; who plans refuses more
    only: paths; other files of the input are left out as if they were not there
    schema: of an input that is not there yet

    Raises SpecError, DatasetError, ResultsError, EngineError: what does not fit, with what to do.
    """
    choice = _choose_device(spec)
    file = GgufFile.open(spec.model)
    hparams = _check_model(spec, file)
    check_threads(spec.engine)
    check_engines(spec.engine, choice.device, spec.engines)
    if choice.device == "gpu":
        check_host_memory(spec.engine)
    if checks_budget:
        _check_budget(spec, choice.device, file, hparams)
    _check_tokenizer(spec, file)
    if schema is None:
        manifest, binding = _check_input(spec, only)
    else:
        manifest, binding = Manifest(files=()), bind_columns(spec, schema)
    overwrites = _check_output(spec, manifest, overwrite=overwrite)
    _check_templates(spec, file, uses_chat=spec.chat or binding.source == "messages")
    notes = (
        *_input_notes(spec, manifest, binding),
        *_chat_notes(spec, file, binding),
        *device_notes(spec.engine, choice, spec.engines),
    )
    if overwrites:
        notes += (f"{len(overwrites)} parts of other jobs in {spec.output} will be removed",)
    return Checked(
        manifest=manifest,
        notes=notes,
        fingerprint=read_fingerprint(file),
        overwrites=tuple(overwrites),
    )


def _check_budget(
    spec: JobSpec, device: Literal["cpu", "gpu"], file: GgufFile, hparams: Hparams
) -> None:
    share = share_here(spec.engine, device, spec.engines)
    try:
        check_budget(share, device, file, hparams)
    except MemoryBudgetError as error:
        if share == spec.engine:
            raise
        raise MemoryBudgetError(
            f"the engines divide the memory, and for one of them {error}; or lower --engines"
        ) from error


def _choose_device(spec: JobSpec) -> DeviceChoice:
    if spec.engine.device == "gpu" and cluster_address(os.environ) is not None:
        return DeviceChoice("gpu", "asked for")  # of the cluster, which refuses where it has none
    return choose_job_device(spec.engine)


def _check_output(spec: JobSpec, manifest: Manifest, *, overwrite: bool) -> list[OwnFile]:
    """What is to be removed from the results folder."""
    if spec.output is None:
        if overwrite:
            raise SpecError("overwrite is for a results folder: name one with output")
        return []
    refuse_input_place(spec.output, manifest, spec.input)
    if overwrite:
        return find_own_files(spec.output)
    claim_folder(spec.output)
    return []


def _check_input(spec: JobSpec, only: Container[str] | None) -> tuple[Manifest, Binding]:
    manifest = _build_manifest(spec, SAMPLE_NBYTES, only)
    try:
        return manifest, bind_columns(spec, read_schema(manifest))
    except SpecError:
        if manifest.num_rows is not None:
            raise
    # The column may come after the first rows of a JSON lines file: look at all of them.
    manifest = _build_manifest(spec, None, only)
    return manifest, bind_columns(spec, read_schema(manifest))


def _build_manifest(
    spec: JobSpec, sample_nbytes: int | None, only: Container[str] | None
) -> Manifest:
    manifest = build_manifest(
        spec.input,
        encoding=spec.encoding,
        delimiter=spec.delimiter,
        on_bad_utf8=spec.on_bad_utf8,
        sample_nbytes=sample_nbytes,
        only=only,
    )
    for name in ("encoding", "delimiter"):
        if manifest.format != "csv" and getattr(spec, name) is not None:
            raise SpecError(f"{name} is for CSV files; {spec.input} is {manifest.format}")
    return manifest


def _check_model(spec: JobSpec, file: GgufFile) -> Hparams:
    hparams = read_hparams(file)
    check_tensors(file, hparams)
    try:
        validate_params(spec.params, hparams.num_tokens)
    except RowError as error:
        raise SpecError(str(error)) from error
    return hparams


def _check_tokenizer(spec: JobSpec, file: GgufFile) -> None:
    """The kind of vocabulary and the pre-tokenizer's name; building it all is the engine's work."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in TOKENIZER_KINDS:
        raise TokenizerError(
            f"{spec.model}: tokenizer model {kind!r} is not one of {', '.join(TOKENIZER_KINDS)}"
        )
    if kind == "gpt2":
        named = file.metadata.get("tokenizer.ggml.pre")
        find_pre_tokenizer(spec.engine.pre_tokenizer or named or "default")


def _check_templates(spec: JobSpec, file: GgufFile, *, uses_chat: bool) -> None:
    if spec.prompt_template is not None:
        PromptTemplate(spec.prompt_template)
    if uses_chat:
        source = spec.chat_template or _own_template(file)
        if source is None:
            raise SpecError(f"{spec.model} has no chat template: give one with --chat-template")
        ChatTemplate(source)
    elif spec.chat_template is not None or spec.template_kwargs:
        raise SpecError(
            "chat_template and template_kwargs are for --chat or a messages column; "
            "this job's prompts are plain text"
        )


def _own_template(file: GgufFile) -> str | None:
    source = file.metadata.get(TEMPLATE_KEY) or file.metadata.get(DEFAULT_TEMPLATE_KEY)
    return source if isinstance(source, str) else None


def _input_notes(spec: JobSpec, manifest: Manifest, binding: Binding) -> Iterator[str]:
    if spec.after is not None:
        yield f"results of job {spec.after}; {_source_text(binding)}"
        return
    files = "1 file" if len(manifest.files) == 1 else f"{len(manifest.files)} files"
    yield f"{_rows_text(spec, manifest)} of {files}; {_source_text(binding)}"
    if manifest.format == "csv":
        found = "" if spec.delimiter else " (found; --delimiter names another)"
        yield f"CSV in {manifest.encoding}, delimiter {name_of(manifest.delimiter)}{found}"
    if manifest.partitions:
        yield f"columns from folder names: {', '.join(manifest.partitions)}"
    if binding.params:
        yield f"set for each row: {', '.join(binding.params)}"
    if manifest.skipped:
        some = ", ".join(manifest.skipped[:3]) + (", …" if len(manifest.skipped) > 3 else "")
        yield f"skipped in the input: {len(manifest.skipped)} ({some})"


def _rows_text(spec: JobSpec, manifest: Manifest) -> str:
    if manifest.num_rows is None:
        return "rows, to be counted when the job starts,"
    num_rows = manifest.num_rows if spec.limit is None else min(spec.limit, manifest.num_rows)
    return f"{num_rows} rows"


def _source_text(binding: Binding) -> str:
    match binding.source:
        case "template":
            return f"prompts from the template, over {', '.join(binding.template_columns)}"
        case "messages":
            return f"conversations from column {binding.column}"
    return f"prompts from column {binding.column}"


def _chat_notes(spec: JobSpec, file: GgufFile, binding: Binding) -> Iterator[str]:
    if binding.source != "messages" and not spec.chat and _own_template(file):
        yield "the model has a chat template, which is not used; --chat wraps each prompt in it"
    if spec.prompt_template is not None and spec.prompt_template[-1:].isspace():
        yield "the prompt template ends in white space, which stays at the end of each prompt"
