"""A first job, from nothing to its results: a model, a Parquet file of prompts, submit, results.

Everything it makes is in demo/ (and the model in .cache/), which may be deleted.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.fetch_smollm2 import FetchError, fetch_smollm2

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo"
COMMAND = Path(sys.executable).with_name("ntx-batch")

PROMPTS = (
    ("facts", "What is the capital of France?"),
    ("facts", "Name the planets of the solar system in order."),
    ("facts", "What is the largest ocean on Earth?"),
    ("extract", "Which date is in this sentence? 'The meeting was moved to 14 March 2024.'"),
    ("rewrite", "Rewrite in the past tense: She walks to school and meets her friends."),
    ("classify", "Which language is this? 'Buenos días, ¿cómo está usted?'"),
    ("list", "List three ingredients of bread."),
    ("summarize", "Summarize in one sentence: Bees visit flowers to collect nectar. While they do "
     "so, pollen sticks to them and travels on to other flowers, which can then make seeds."),
    ("summarize", "Give a title to this text: The town rebuilt its old mill as a library, and "
     "half of the people who live there came to the opening."),
    ("explain", "Explain in two sentences why the sky is blue."),
    ("explain", "What is the difference between weather and climate?"),
    ("explain", "Why do we have leap years?"),
    ("explain", "How does a refrigerator keep food cold?"),
    ("facts", "Who wrote Romeo and Juliet?"),
    ("classify", "Is this review positive or negative? 'The soup was cold and nobody cared.'"),
    ("classify", "Is this review positive or negative? 'I would come back just for the bread.'"),
    ("extract", "List the cities in: 'We flew from Oslo to Rome and went on to Naples by train.'"),
    ("rewrite", "Rewrite politely: Send me the report now."),
    ("list", "Give me three names for a small boat."),
    ("list", "Name two things that float and two that sink."),
    ("write", "Write a haiku about autumn."),
    ("write", "Write the first sentence of a story about a lighthouse."),
    ("code", "Write a Python function that returns the square of a number."),
    ("code", "What does the command ls do on Linux?"),
)  # fmt: skip


def write_prompts(path: Path) -> None:
    topics, prompts = zip(*PROMPTS, strict=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"topic": topics, "prompt": prompts}), path)


def ntx_batch(*arguments: str, capture: bool = False) -> str:
    """Show a command and run it; returns its stdout where asked for, else lets it through."""
    print(f"\n$ ntx-batch {shlex.join(arguments)}", file=sys.stderr, flush=True)
    done = subprocess.run(
        [COMMAND, *arguments],
        env=os.environ | {"NTX_HOME": str(DEMO / "home")},
        cwd=ROOT,
        stdout=subprocess.PIPE if capture else None,
        text=True,
        check=True,
    )
    return (done.stdout or "").strip()


def main() -> None:
    model = os.path.relpath(fetch_smollm2(ROOT / ".cache" / "models"), ROOT)
    write_prompts(DEMO / "prompts.parquet")
    arguments = ("--chat", "--max-tokens", "64", "--wait")
    try:
        job = ntx_batch(
            "submit", "demo/prompts.parquet", "--model", model, *arguments, capture=True
        )
        ntx_batch("results", job, "--head", "5")
        ntx_batch("status", job)
        ntx_batch("results", job, "-o", "demo/answers.parquet")
    finally:
        ntx_batch("runner", "stop")
    print("\nAll answers are in demo/answers.parquet; docs/how-to.md goes on from here.")
    print("`source .venv/bin/activate` puts ntx-batch on the PATH.")


if __name__ == "__main__":
    try:
        main()
    except FetchError as error:
        sys.exit(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(f"ntx-batch {error.cmd[1]} ended with exit code {error.returncode}")
