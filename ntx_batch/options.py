"""The options of a job, as the command line shows them: one table for `submit` and `run`.

Names are those of `build_spec`. Values arrive there as given; it parses and checks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """One flag.

    kind: type of its value; bool is a flag without one, which `--no-...` takes back
    default: as people read it
    """

    name: str
    kind: Any
    metavar: str | None
    help: str
    default: str | None = None

    @property
    def flag(self) -> str:
        word = self.name.replace("_", "-")
        return f"--{word}/--no-{word}" if self.kind is bool else f"--{word}"

    @property
    def full_help(self) -> str:
        return self.help if self.default is None else f"{self.help} Default: {self.default}."


OPTIONS: dict[str, tuple[Option, ...]] = {
    "Job": (
        Option(
            "after",
            str,
            "JOB",
            "Read the results of this job, once it has completed; no INPUT then. A template may "
            "name its columns: generated_text, and those that it carries. schedule:NAME is the "
            "job of that schedule's newest run.",
        ),
        Option(
            "after_errors",
            str,
            "skip|fail|pass",
            "Rows of that job that are not ok: leave them out, fail, or read them like others.",
            "skip",
        ),
        Option("priority", int, "N", "Jobs of a higher one run first; none is interrupted.", "0"),
        Option(
            "on_finish",
            str,
            "COMMAND|URL",
            "When the job is over, whatever came of it: run a command, with the JSON of `status` "
            "on its standard input, or POST that to an http(s) URL.",
        ),
        Option("on_failure", str, "COMMAND|URL", "The same, only when the job has failed."),
        Option("key", str, "K", "If a job has this key already, name that one and queue none."),
        Option("overwrite", bool, None, "Remove other jobs' parts, nothing else, from -o."),
        Option("verify", bool, None, "Know the model again by all its bytes, not by samples."),
    ),
    "Prompt": (
        Option("prompt_column", str, "C", "Column of raw prompt text.", "prompt"),
        Option("messages_column", str, "C", "Column of role/content messages.", "messages"),
        Option("prompt_template", str, "TEXT|@FILE", "Jinja template over the input's columns."),
        Option("chat", bool, None, "Wrap each prompt in the model's chat template."),
        Option("system", str, "TEXT", "System message before each prompt; with --chat."),
        Option("chat_template", Path, "FILE", "Chat template to use in place of the model's."),
        Option("template_kwargs", str, "JSON", "Variables for the chat template."),
        Option(
            "truncate",
            str,
            "left|right",
            "Cut over-long prompts at this end; without it they are error rows.",
        ),
    ),
    "Rows": (
        Option("limit", int, "N", "Run the first N rows only."),
        Option(
            "samples",
            int,
            "N",
            "Answers to draw for each row, each a result row with a sample_index; the prompt is "
            "computed once. Needs a --temperature above 0.",
            "1",
        ),
        Option(
            "dedupe",
            bool,
            None,
            "Compute equal rows once, greedy ones or of one seed, and copy the answer; "
            "duplicate_of names the row that was computed.",
            "on",
        ),
        Option("max_errors", str, "N|P%", "Pause when more rows than this have failed."),
        Option("row_timeout", float, "S", "A row longer on board than S seconds is an error row."),
        Option("encoding", str, "NAME", "Encoding of CSV files, such as cp1252.", "utf-8"),
        Option(
            "delimiter",
            str,
            "C",
            "Delimiter of CSV files; tab is a word.",
            "found in the first rows",
        ),
        Option(
            "on_bad_utf8",
            str,
            "error|replace",
            "Rows whose text is not UTF-8: error rows, or run with what is bad replaced.",
            "error",
        ),
        Option("param_columns", str, "A,B", "Columns that set the parameter of their name by row."),
        Option("keep", str, "A,B", "Input columns to carry to the results.", "all but the prompt"),
        Option("output_prefix", str, "TEXT", "Put before the names of the columns that are added."),
    ),
    "Sampling": (
        Option("max_tokens", int, "N", "Most tokens to generate.", "256"),
        Option("min_tokens", int, "N", "Do not end a row before this many tokens.", "0"),
        Option("temperature", float, "X", "0 takes the most likely token.", "0"),
        Option("top_k", int, "K", "Keep the K most likely tokens; 0 keeps all.", "0"),
        Option("top_p", float, "P", "Keep the fewest tokens whose probabilities reach P.", "1"),
        Option("min_p", float, "P", "Drop tokens less likely than P times the likeliest.", "0"),
        Option("repetition_penalty", float, "X", "Divide logits of tokens seen in the row.", "1"),
        Option("presence_penalty", float, "X", "Subtract where a token is in the answer.", "0"),
        Option("frequency_penalty", float, "X", "Subtract for each time it is in there.", "0"),
        Option("stop", list[str], "TEXT", "End a row before this text; may be repeated."),
        Option("stop_token_ids", str, "ID,ID", "End a row at these tokens."),
        Option("include_stop", bool, None, "Keep the stop text in the answer."),
        Option("ignore_eos", bool, None, "End-of-generation tokens do not end a row."),
        Option("seed", int, "N", "The job's seed; each row draws from it and its index.", "0"),
        Option("logit_bias", str, "JSON", "Token ids and what to add to their logits."),
        Option("logprobs", int, "N", "Report log-probabilities: the chosen token and N others."),
    ),
    "Engine": (
        Option(
            "device",
            str,
            "auto|cpu|gpu",
            "Where to compute; auto takes a GPU where one can be used, and says what it chose.",
            "auto",
        ),
        Option(
            "kv_type",
            str,
            "f32|f16|int8",
            "Element type of the KV cache; int8 approximates.",
            "f32 on a CPU, f16 on a GPU",
        ),
        Option(
            "memory",
            str,
            "SIZE|auto",
            "Memory of the device (with a GPU, its own) for weights, KV cache and buffers, like "
            "16GiB; what does not fit streams.",
            "auto, nine tenths of what is free",
        ),
        Option(
            "host_memory",
            str,
            "SIZE|auto",
            "Pinned memory, beside a GPU, for weights that do not stay on it, then for KV pages; "
            "weights that do not fit there either stream from disk.",
            "auto, nine tenths of the RAM that is free, at most 85 % of all",
        ),
        Option(
            "host_kv",
            str,
            "auto|never",
            "Keep pages of the KV cache in that memory too, where weights stream over the link and "
            "more rows on board pay for what travels; never keeps all of them on the GPU.",
            "auto",
        ),
        Option("kv_memory", str, "SIZE", "Memory of the KV cache, like 8GiB.", "from the plan"),
        Option("ring_memory", str, "SIZE", "Memory through which weights stream.", "4 layers"),
        Option("reader", str, "auto|direct|mmap", "How model files are read.", "auto"),
        Option(
            "sweep_tokens",
            int,
            "N",
            "Most tokens of one pass over the layers.",
            "512, or from the plan where weights stream",
        ),
        Option("expand", str, "auto|never|always", "Keep weights as float32 if they fit.", "auto"),
        Option("threads", int, "N", "Worker threads, of all engines on a machine.", "all cores"),
        Option(
            "engines",
            str,
            "N|auto",
            "Engines that share the job; on a CPU they divide cores and memory among them, on GPUs "
            "each has one to itself.",
            "auto, one for each GPU, or one on a CPU",
        ),
        Option(
            "reuse",
            bool,
            None,
            "Compute once what prompts begin with in common; answers are the same either way.",
            "on",
        ),
        Option("pre_tokenizer", str, "NAME", "Use this pre-tokenizer whatever the model names."),
    ),
}
