"""What `submit` checks in about a second: the model's header, the input's footers, the templates.

Nothing large is read: no tensor, no row. What is wrong here would only end the job later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.chat import ChatTemplate, PromptTemplate
from engine.gguf_file import GgufFile
from engine.hparams import check_tensors, read_hparams
from engine.params import validate_params
from engine.requests import RowError
from jobs.dataset import bind_columns, build_manifest
from jobs.prepare import prompt_source
from jobs.records import JobSpec, Manifest, SpecError

CHAT_TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A job that can be queued. notes: what was bound, and what its owner may want to know."""

    manifest: Manifest
    notes: tuple[str, ...]


def check_job(spec: JobSpec) -> Checked:
    """Check a spec against its model and its input.

    Raises SpecError, DatasetError, EngineError: what does not fit, with what to do.
    """
    file = GgufFile.open(spec.model)
    _check_model(spec, file)
    manifest = build_manifest(spec.input)
    columns = bind_columns(spec, manifest)
    source, column = prompt_source(spec, columns)
    _check_templates(spec, file, uses_chat=spec.chat or source == "messages")
    notes = (*_input_notes(spec, manifest, source, column), *_chat_notes(spec, file, source))
    return Checked(manifest=manifest, notes=notes)


def _check_model(spec: JobSpec, file: GgufFile) -> None:
    hparams = read_hparams(file)
    check_tensors(file, hparams)
    try:
        validate_params(spec.params, hparams.num_tokens)
    except RowError as error:
        raise SpecError(str(error)) from error


def _check_templates(spec: JobSpec, file: GgufFile, *, uses_chat: bool) -> None:
    if spec.prompt_template is not None:
        PromptTemplate(spec.prompt_template)
    own = file.metadata.get(CHAT_TEMPLATE_KEY)
    if uses_chat:
        source = spec.chat_template or own
        if source is None:
            raise SpecError(f"{spec.model} has no chat template: give one with --chat-template")
        ChatTemplate(source)
    elif spec.chat_template is not None or spec.template_kwargs:
        raise SpecError(
            "chat_template and template_kwargs are for --chat or a messages column; "
            "this job's prompts are plain text"
        )


def _input_notes(spec: JobSpec, manifest: Manifest, source: str, column: str) -> Iterator[str]:
    num_rows = manifest.num_rows if spec.limit is None else min(spec.limit, manifest.num_rows)
    yield f"{num_rows} rows from {len(manifest.files)} file(s); {_source_text(source, column)}"
    if spec.param_columns:
        yield f"set for each row: {', '.join(spec.param_columns)}"
    if manifest.skipped:
        some = ", ".join(manifest.skipped[:3]) + (", …" if len(manifest.skipped) > 3 else "")
        yield f"skipped {len(manifest.skipped)} file(s) that are not input: {some}"


def _source_text(source: str, column: str) -> str:
    match source:
        case "template":
            return "prompts from the prompt template"
        case "messages":
            return f"conversations from column {column}"
    return f"prompts from column {column}"


def _chat_notes(spec: JobSpec, file: GgufFile, source: str) -> Iterator[str]:
    if source != "messages" and not spec.chat and CHAT_TEMPLATE_KEY in file.metadata:
        yield "the model has a chat template, which is not used; --chat wraps each prompt in it"
