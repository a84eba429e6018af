"""From a model file and a configuration to a model that can sweep: sizes, plan, weights, stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.budget import free_budget
from engine.costs import DEFAULT_DEVICE_RATES, DEFAULT_RATES
from engine.devices import kv_type, resolved
from engine.gguf_file import GgufFile
from engine.hparams import Hparams
from engine.links import Link, OnProgress, Parcel, ReaderLink
from engine.model import Model, kv_shape
from engine.planner import Budget, ModelSizes, Part, Plan, Planner, Rates, Workload
from engine.requests import EngineConfig
from engine.weight_stream import WeightStream, parcel_layouts, parcels_of
from engine.weights import HEAD_TENSOR, Residence, WeightLoader, layer_tensor_names
from kernels.ops import Ops
from nvme import Reader, open_reader

OpenReader = Callable[[Sequence[Path]], Reader]


def model_sizes(file: GgufFile, hparams: Hparams, page_nbytes: int, row_nbytes: int) -> ModelSizes:
    """What each part of a model takes, from its header alone; see `ModelSizes` for the last two."""
    layers, head = parcel_layouts(file, hparams)
    names = [layer_tensor_names(layer) for layer in range(hparams.num_layers)]
    matrices = {name for layer in names for name in layer} | {HEAD_TENSOR, "token_embd.weight"}
    vectors = [tensor for name, tensor in file.tensors.items() if name not in matrices]
    return ModelSizes(
        embedding=_part(file, ["token_embd.weight"], 0),
        layers=tuple(
            _part(file, layer, layout.nbytes) for layer, layout in zip(names, layers, strict=True)
        ),
        head=None if head is None else _part(file, [HEAD_TENSOR], head.nbytes),
        vectors_nbytes=sum(4 * int(np.prod(tensor.shape)) for tensor in vectors),
        page_nbytes=page_nbytes,
        row_nbytes=row_nbytes,
    )


def _part(file: GgufFile, names: list[str], slot_nbytes: int) -> Part:
    values: dict[str, int] = {}
    for name in names:
        tensor = file.tensors[name]
        values[tensor.type_name] = values.get(tensor.type_name, 0) + int(np.prod(tensor.shape))
    return Part(
        stored_nbytes=sum(file.tensors[name].nbytes for name in names),
        slot_nbytes=slot_nbytes,
        values=values,
    )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to sweep, its plan, and how its bytes come.

    reader_name: of the reader
    read_path: the way its bytes take, and what keeps them from a faster one
    """

    model: Model
    plan: Plan
    reader_name: str
    read_path: str


def make_planner(
    file: GgufFile,
    hparams: Hparams,
    config: EngineConfig,
    ops: Ops,
    *,
    rates: Rates | None = None,
    workload: Workload | None = None,
    budget: Budget | None = None,
) -> Planner:
    """A planner for a budget, by default the memory that is free now. Raises MemoryBudgetError."""
    config = resolved(config, ops)
    shape, element = kv_shape(hparams), kv_type(config)
    return Planner(
        hparams,
        config,
        model_sizes(
            file,
            hparams,
            ops.kv_page_nbytes(shape, element),
            ops.kv_row_nbytes(shape, element),
        ),
        budget=budget or free_budget(file, hparams, config, ops),
        rates=rates or (DEFAULT_RATES if ops.name == "cpu" else DEFAULT_DEVICE_RATES),
        workload=workload,
    )


def reader_name(config: EngineConfig, plan: Plan) -> str:
    """The reader for a plan: direct where weights stream, unless one is asked for."""
    if config.reader != "auto":
        return config.reader
    return "direct" if plan.streams else "mmap"


def load_model(
    file: GgufFile,
    hparams: Hparams,
    config: EngineConfig,
    ops: Ops,
    *,
    plan: Plan | None = None,
    rates: Rates | None = None,
    workload: Workload | None = None,
    open_files: OpenReader | None = None,
    progress: OnProgress | None = None,
) -> LoadedModel:
    """Plan (unless one is given), read what is resident, and begin to stream the rest.

    Raises MemoryBudgetError, ReadError, UnsupportedTypeError.
    """
    if plan is None:
        plan = make_planner(file, hparams, config, ops, rates=rates, workload=workload).best()
    open_files = open_files or functools.partial(open_reader, reader_name(config, plan))
    reader = open_files(file.paths)
    residence = Residence(plan.resident, plan.head_resident)
    link: Link | None = None
    try:
        loader = WeightLoader(file, reader, ops, expand=plan.expand)
        weights = loader.load(hparams, residence, progress)
        freq_factors = loader.host_vector_or_none("rope_freqs.weight")
        stream = None
        if residence.streams:
            parcels = parcels_of(file, hparams, residence)
            link = _open_link(ops, reader, parcels, _in_host(plan), progress)
            stream = WeightStream(file, residence, parcels, link, ops, ring_nbytes=plan.ring_nbytes)
    except BaseException:
        (link or reader).close()
        raise
    if stream is None:
        reader.close()
    model = Model(
        hparams,
        weights,
        ops,
        max_tokens=plan.sweep_tokens,
        max_logits=plan.max_rows,
        freq_factors=freq_factors,
        stream=stream,
    )
    return LoadedModel(model, plan, reader.name, reader.path_taken)


def _in_host(plan: Plan) -> list[bool]:
    """For each parcel that streams, whether host memory keeps it."""
    host = plan.host or (False,) * len(plan.resident)
    layers = [near for near, stays in zip(host, plan.resident, strict=True) if not stays]
    return layers if plan.head_resident else [*layers, plan.head_in_host]


def _open_link(
    ops: Ops,
    reader: Reader,
    parcels: Sequence[Parcel],
    in_host: Sequence[bool],
    progress: OnProgress | None,
) -> Link:
    if ops.name == "cpu":
        return ReaderLink(reader)
    from engine.cuda_link import CudaLink

    return CudaLink(reader, parcels, in_host[: len(parcels)], ops.copies, progress)
