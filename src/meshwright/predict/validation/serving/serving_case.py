"""`ServingCase`: a published serving run as values, ready to be priced by whatever simulates it."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from meshwright.errors import InputError
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.validation.serving.engine_limits import find_compiled_limits
from meshwright.predict.validation.serving.serving_framework import read_engine, read_quantization
from meshwright.predict.validation.serving.serving_layout import read_replica_layout
from meshwright.predict.validation.serving.serving_load import ServingLoad, read_load
from meshwright.predict.validation.serving.serving_model import find_gpu, find_model
from meshwright.predict.validation.training.run_cluster import read_cluster
from meshwright.predict.validation.training.run_model import UnusableRowError
from meshwright.spec.cluster import Cluster, Gpu, ScaleUpDomain
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model

from msgspec.structs import replace  # isort: skip


class MeasuredServing(NamedTuple):
    """What a row printed, in SI units."""

    output_tok_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    derived: bool
    """The throughput follows from the row's latencies or requests per second."""


class ServingCase(NamedTuple):
    """One run: replicas, what was asked of them, and what was measured."""

    replicas: tuple[Replica, ...]
    """The replica of the run, or those it may have had where the row does not say."""
    copies: tuple[int, ...]
    """How many of each share the load."""
    load: ServingLoad
    prefill: Replica | None = None
    prefill_copies: int = 0
    num_speculative_tokens: int = 0
    """Tokens that decoding replicas guess in each step."""
    measured: MeasuredServing = MeasuredServing(None, None, None, False)
    assumed: tuple[str, ...] = ()


def read_case(row: Mapping[str, Any]) -> ServingCase:
    """Return what a row says, or raise `UnusableRowError` with what it does not."""
    for name in ("engine", "model", "gpu"):
        if not isinstance(row.get(name), str):
            raise UnusableRowError(f"the row does not say its {name}")
    model, gpu, engine = find_model(row["model"]), find_gpu(row["gpu"]), read_engine(row)
    if "dataset=image" in str(row.get("notes")):
        raise UnusableRowError("requests with images are not modelled")
    asked = read_load(row, model.name)
    formats = read_quantization(row, model, gpu, engine)
    gpus = row.get("gpus")
    place = read_replica_layout(row, model.moe is not None)
    assumed = asked.assumed
    try:
        if place is not None:
            tokens = asked.request_load.prompt_tokens + asked.request_load.output_tokens
            asked = asked._replace(
                compiled_limits=find_compiled_limits(row, model.name, place.layout.tp, tokens)
            )
            _check_heads(model, place.layout)
            size = _size(place.layout)
            whole = _cluster(gpu, size)
            replica = Replica(
                model=model, cluster=whole, layout=place.layout, quantization=formats, engine=engine
            )
            prefill = None
            if place.prefill is not None:
                prefill = replace(
                    replica, layout=place.prefill, cluster=_cluster(gpu, _size(place.prefill))
                )
            return ServingCase(
                (replica,),
                (place.copies,),
                asked,
                prefill,
                place.prefill_copies,
                place.num_speculative_tokens,
                _measured(row, asked),
                (*assumed, *place.assumed),
            )
        if not isinstance(gpus, int) or gpus < 1:
            raise UnusableRowError("the row does not say how many GPUs it used")
        tries = [tp for tp in (1, 2, 4, 8, 16) if tp <= gpus and gpus % tp == 0]
        replicas = tuple(
            Replica(
                model=model, cluster=_cluster(gpu, tp), layout=Layout(tp=tp), quantization=formats,
                engine=engine,
            )
            for tp in tries
        )  # fmt: skip
    except InputError as error:
        raise UnusableRowError(f"the layout cannot be: {error}") from None
    copies = tuple(gpus // tp for tp in tries)
    assumed = (*assumed, "the layout that serves most")
    return ServingCase(replicas, copies, asked, measured=_measured(row, asked), assumed=assumed)


def _check_heads(model: Model, layout: Layout) -> None:
    for block in model.blocks:
        heads = getattr(block.mixer, "heads", layout.tp)
        if heads % layout.tp:
            raise UnusableRowError(f"{heads} heads cannot be shared by {layout.tp} GPUs")


def _size(layout: Layout) -> int:
    return layout.tp * layout.pp * layout.dp


@lru_cache(maxsize=512)
def _cluster(gpu: Gpu, gpus: int) -> Cluster:
    row: dict[str, Any] = {"gpu": gpu.name, "gpus": gpus}
    if gpu.name.startswith("gh"):
        # A superchip is a machine of its own, or one of four on a board that NVLink joins.
        row["gpus_per_node"] = 4 if gpus % 4 == 0 else 1
    elif gpus > 8 and gpus % 8:
        row["gpus_per_node"] = 4 if gpus % 4 == 0 else 2 if gpus % 2 == 0 else 1
    cluster = replace(read_cluster(row), gpu=gpu)
    if gpu.nvlink_bytes_per_s is not None and not gpu.name.endswith("pcie"):
        return cluster
    links = ScaleUpDomain(
        kind="pcie", gpus=cluster.scale_up.gpus, gpu_bytes_per_s=gpu.pcie_bytes_per_s or 32e9,
        latency_s=2e-6, switched=False,
    )  # fmt: skip
    return replace(cluster, scale_up=links)


def _measured(row: Mapping[str, Any], asked: ServingLoad) -> MeasuredServing:
    ttft, tpot = _mean(row.get("ttft_ms")), _mean(row.get("tpot_or_itl_ms"))
    made, load = row.get("output_tok_s"), asked.request_load
    derived = False
    if not made and row.get("tok_s_per_gpu") and row.get("gpus"):
        made = row["tok_s_per_gpu"] * row["gpus"]
    if not made and row.get("req_s"):
        made, derived = row["req_s"] * load.output_tokens, True
    if not made and load.concurrency and ttft and tpot:
        made = load.concurrency * load.output_tokens / (ttft + (load.output_tokens - 1) * tpot)
        derived = True
    return MeasuredServing(float(made) if made else None, ttft, tpot, derived)


def _mean(value: object) -> float | None:
    """Return a row's mean in seconds."""
    if not isinstance(value, Mapping):
        return None
    for name in ("mean", "mean_itl", "p50", "p50_itl"):
        found = value.get(name)
        if isinstance(found, int | float) and found > 0:
            return found / 1e3
    return None
