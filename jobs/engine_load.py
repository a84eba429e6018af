"""How the engine actor loads an engine: within the job's memory, by a plan made for its rows."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from engine import Engine
from engine.devices import open_ops, resolved
from engine.gguf_file import GgufFile
from engine.hparams import check_tensors, read_hparams
from engine.loading import reader_name
from jobs.dataset import reserve_arrow_memory
from jobs.home import Home
from jobs.job_device import device_facts
from jobs.job_plan import plan_job
from jobs.memory import limit_own_memory, private_nbytes
from jobs.messages import StartJob
from jobs.row_source import WINDOW_NBYTES
from jobs.workload import ModelText, sample_workload
from nvme import open_reader

# What Python, Arrow and the tokenizer take as rows come and go, stacks of threads included, and
# rows that are read ahead.
MEMORY_MARGIN_NBYTES = (256 << 20) + WINDOW_NBYTES


def load_engine(
    command: StartJob, make: Callable[..., Engine] = Engine
) -> tuple[Engine, Mapping[str, Any]]:
    """Load the engine of a job; also returns what the record of its jobs should say of it.

    The device is the one that the command's spec names.

    make: as `Engine`

    Raises EngineError, JobError, OSError: it cannot be loaded, with what to do.
    """
    config = command.spec.engine
    file = GgufFile.open(command.spec.model)
    hparams = read_hparams(file)
    check_tensors(file, hparams)
    # Compiling and measuring come first: what they take is not of the job's budget.
    started = time.monotonic()
    ops = open_ops(config)
    config = resolved(config, ops)
    facts = device_facts(ops, config) | {"kernels_s": round(time.monotonic() - started, 3)}
    cache_dir = Home.open().probes_dir
    planned = plan_job(
        file,
        hparams,
        config,
        ops,
        sample=lambda: sample_workload(command, ModelText.of(file, hparams, config.pre_tokenizer)),
        cache_dir=cache_dir,
    )
    facts["probe_s"] = planned.probe_s
    # CUDA maps far more address space than memory, and on a GPU the budget is of its own memory.
    if config.memory_nbytes is not None and ops.name == "cpu":
        allowed_nbytes = config.memory_nbytes + MEMORY_MARGIN_NBYTES
        reserve_arrow_memory()
        facts["memory_limit_nbytes"] = private_nbytes(os.getpid()) + allowed_nbytes
        limit_own_memory(allowed_nbytes)
    name = reader_name(config, planned.plan)
    engine = make(
        command.spec.model,
        config,
        ops=ops,
        reader_factory=functools.partial(open_reader, name, cache_dir=cache_dir),
        plan=planned.plan,
        rates=planned.rates,
        workload=planned.workload,
    )
    return engine, facts
