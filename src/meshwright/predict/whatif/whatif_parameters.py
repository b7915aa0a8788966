"""The things that `whatif` can change, by name: each turns a work and a text into another work.

Text is read by the strict readers of spec, so a bad value has the same words as in a file.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.cluster import Cluster
from meshwright.spec.job_spec import JobSpec, read_cluster, read_model
from meshwright.spec.layout import Layout
from meshwright.spec.layout.layout_changes import change_degrees, change_layout
from meshwright.spec.name_suggestions import find_closest_names
from meshwright.spec.serialization import decode
from meshwright.spec.units import (
    format_bytes,
    format_flops,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_number,
    parse_rate,
    parse_seconds,
)
from meshwright.spec.workload import TrainingWorkload


class ChangedJob(NamedTuple):
    """A work with one thing changed, and the new value in words."""

    job: JobSpec
    value: str


class WhatIfParameter(NamedTuple):
    """Something that can be varied."""

    summary: str
    apply: Callable[[JobSpec, str], ChangedJob]
    """Return the work with the thing set to what a text says."""


_FACTOR = re.compile(r"([x×*/])\s*(.+)")
_PERCENT = re.compile(r"([+-].+)%")


def parse_scaled(text: str, now: float, parse: Callable[[str, str], float], where: str) -> float:
    """Read a value, absolute or against what there is now: `100GB/s`, `x2`, `/2`, `+10%`."""
    factor, percent = _FACTOR.fullmatch(text), _PERCENT.fullmatch(text)
    if factor is None and percent is None:
        return parse(text, where)
    if factor is not None:
        by = parse_number(factor[2], where)
        if by <= 0:
            raise InputError([Problem(where, f"{text!r} leaves nothing", "use a factor above 0")])
        return now / by if factor[1] == "/" else now * by
    assert percent is not None
    return now * (1 + parse_number(percent[1], where) / 100)


def parse_scaled_count(text: str, now: int, where: str) -> int:
    """Read a count, absolute or against what there is now."""
    value = parse_scaled(text, now, parse_count, where)
    if value != round(value):
        what = f"{text} of {now:,} is {value:g}, no whole number"
        raise InputError([Problem(where, what, f"use {max(1, round(value))}")])
    return round(value)


def find_parameter(name: str) -> str:
    """Return the name a thing goes by here, or say which there are."""
    wanted = name.lower().replace("-", "_")
    wanted = _ALIASES.get(wanted, wanted)
    if wanted in WHATIF_PARAMETERS:
        return wanted
    close = find_closest_names(wanted, [*WHATIF_PARAMETERS, *_ALIASES])
    fix = f"did you mean {' or '.join(close)}? " if close else ""
    own = ", ".join(known for known in WHATIF_PARAMETERS if known not in _FIELDS)
    fix += f"there are {own}, and every field of a layout, such as tp or schedule"
    raise InputError([Problem(name, "cannot be varied", fix)])


def _with_cluster(work: JobSpec, cluster: Cluster) -> JobSpec:
    return msgspec.structs.replace(work, cluster=cluster)


def _with_layout(work: JobSpec, layout: Layout) -> JobSpec:
    """Put a layout in place, on a cluster with room for it."""
    cluster = work.cluster
    if layout.gpus > cluster.gpus:
        cluster = cluster.with_gpus(layout.gpus)
    return msgspec.structs.replace(work, layout=layout, cluster=cluster)


def _training(work: JobSpec) -> TrainingWorkload:
    if not isinstance(work.workload, TrainingWorkload):
        fix = "give a training workload"
        raise InputError([Problem("workload", "is no training run", fix)])
    return work.workload


def _nic(work: JobSpec, text: str) -> ChangedJob:
    nics = _nics(work)
    rate = parse_scaled(text, nics.nic_bytes_per_s, parse_rate, "nic")
    changed = msgspec.structs.replace(nics, nic_bytes_per_s=rate)
    return ChangedJob(_with_cluster(work, _replaced(work.cluster, nics=changed)), format_rate(rate))


def _nic_latency(work: JobSpec, text: str) -> ChangedJob:
    nics = _nics(work)
    seconds = parse_scaled(text, nics.latency_s, parse_seconds, "nic_latency")
    changed = msgspec.structs.replace(nics, latency_s=seconds)
    cluster = _replaced(work.cluster, nics=changed)
    return ChangedJob(_with_cluster(work, cluster), format_seconds(seconds))


def _nics(work: JobSpec) -> Any:
    if work.cluster.nics is None:
        what = f"{work.cluster.name} has no NICs"
        raise InputError([Problem("nics", what, "use a cluster with a network")])
    return work.cluster.nics


def _replaced(value: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(value, **fields)


def _nvlink(work: JobSpec, text: str) -> ChangedJob:
    links = work.cluster.scale_up
    rate = parse_scaled(text, links.gpu_bytes_per_s, parse_rate, "nvlink")
    pair = links.pair_bytes_per_s
    pair = None if pair is None else pair * rate / links.gpu_bytes_per_s
    changed = _replaced(links, gpu_bytes_per_s=rate, pair_bytes_per_s=pair)
    return ChangedJob(
        _with_cluster(work, _replaced(work.cluster, scale_up=changed)), format_rate(rate)
    )


def _nvlink_domain(work: JobSpec, text: str) -> ChangedJob:
    gpus = parse_scaled_count(text, work.cluster.scale_up.gpus, "nvlink_domain")
    changed = _replaced(work.cluster.scale_up, gpus=gpus)
    return ChangedJob(
        _with_cluster(work, _replaced(work.cluster, scale_up=changed)), f"{gpus} GPUs"
    )


def _flops(work: JobSpec, text: str) -> ChangedJob:
    """Scale every peak alike; a plain number is the peak of the layout's precision."""
    gpu = work.cluster.gpu
    now = gpu.peak_flops(work.layout.precision)
    peak = parse_scaled(text, now, parse_number, "flops")
    peaks = {name: getattr(gpu, name) for name in gpu.__struct_fields__ if name.endswith("_flops")}
    raised = {name: old * peak / now for name, old in peaks.items() if old is not None}
    cluster = _replaced(work.cluster, gpu=_replaced(gpu, **raised))
    return ChangedJob(_with_cluster(work, cluster), f"{format_flops(peak)}/s")


def _memory_bandwidth(work: JobSpec, text: str) -> ChangedJob:
    gpu = work.cluster.gpu
    rate = parse_scaled(text, gpu.memory_bytes_per_s, parse_rate, "memory_bandwidth")
    cluster = _replaced(work.cluster, gpu=_replaced(gpu, memory_bytes_per_s=rate))
    return ChangedJob(_with_cluster(work, cluster), format_rate(rate))


def _memory(work: JobSpec, text: str) -> ChangedJob:
    gpu = work.cluster.gpu
    size = round(parse_scaled(text, gpu.memory_bytes, parse_bytes, "memory"))
    cluster = _replaced(work.cluster, gpu=_replaced(gpu, memory_bytes=size))
    return ChangedJob(_with_cluster(work, cluster), format_bytes(size))


def _price(work: JobSpec, text: str) -> ChangedJob:
    price = parse_scaled(text, work.cluster.price_per_gpu_hour or 0.0, parse_number, "price")
    return ChangedJob(
        _with_cluster(work, _replaced(work.cluster, price_per_gpu_hour=price)), f"${price:.2f}"
    )


def _cluster(work: JobSpec, text: str) -> ChangedJob:
    cluster = read_cluster(text)
    if cluster.gpus < work.layout.gpus:
        cluster = cluster.with_gpus(work.layout.gpus)
    return ChangedJob(_with_cluster(work, cluster), text)


def _model(work: JobSpec, text: str) -> ChangedJob:
    model = read_model(text)
    layout = change_layout(work.layout, model.layers)
    return ChangedJob(msgspec.structs.replace(work, model=model, layout=layout), text)


def _gpus(work: JobSpec, text: str) -> ChangedJob:
    """More or fewer replicas share the same batch."""
    gpus = parse_scaled_count(text, work.layout.gpus, "gpus")
    layout = change_degrees(work.layout, work.model.layers, gpus)
    return ChangedJob(_with_layout(work, layout), f"{gpus:,}")


def _batch(work: JobSpec, text: str) -> ChangedJob:
    training = _training(work)
    batch = parse_scaled_count(text, training.global_batch, "batch")
    asked = msgspec.structs.replace(training, global_batch=batch)
    layout = work.layout
    if layout.global_batch is not None:
        layout = msgspec.structs.replace(layout, global_batch=batch)
    return ChangedJob(msgspec.structs.replace(work, workload=asked, layout=layout), f"{batch:,}")


def _sequence_length(work: JobSpec, text: str) -> ChangedJob:
    training = _training(work)
    length = parse_scaled_count(text, training.sequence_length, "sequence_length")
    asked = msgspec.structs.replace(training, sequence_length=length)
    return ChangedJob(msgspec.structs.replace(work, workload=asked), f"{length:,}")


def _field(name: str, kind: Any) -> Callable[[JobSpec, str], ChangedJob]:
    """Return what sets a field of the layout; other degrees leave the number of GPUs alone."""

    def apply(work: JobSpec, text: str) -> ChangedJob:
        now = getattr(work.layout, name)
        value = _read_field(name, kind, text, now, work)
        if name in ("tp", "cp", "pp"):
            layout = change_degrees(
                work.layout, work.model.layers, work.layout.gpus, **{name: value}
            )
        else:
            layout = change_layout(work.layout, work.model.layers, **{name: value})
        return ChangedJob(_with_layout(work, layout), _shown(value))

    return apply


_SWITCH = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


def _read_field(name: str, kind: Any, text: str, now: object, work: JobSpec) -> Any:
    if type(now) is int and (_FACTOR.fullmatch(text) or _PERCENT.fullmatch(text)):
        return parse_scaled_count(text, now, name)
    if kind is bool:
        return decode(bool, _SWITCH.get(text.lower(), text), name)
    if name == "precision" and text == "fp8":
        # The 8-bit format the device takes in hardware; its full name is shown.
        return "mxfp8" if "mxfp8" in work.cluster.gpu.precisions else "fp8-tensorwise"
    if "tuple" in str(kind):
        # Commas part the values of a thing, so a list is joined by plus signs.
        return decode(kind, [part for part in text.split("+") if part], name)
    return decode(cast(Any, kind), text, name)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


_FIELDS = {field.name: field.type for field in msgspec.structs.fields(Layout)}

WHATIF_PARAMETERS: dict[str, WhatIfParameter] = {
    "nic": WhatIfParameter("speed of a NIC: 100GB/s, 800Gb/s, x2", _nic),
    "nic_latency": WhatIfParameter("time of an empty message between nodes: 2us, /2", _nic_latency),
    "nvlink": WhatIfParameter("what one GPU sends over its fast links: 900GB/s, x2", _nvlink),
    "nvlink_domain": WhatIfParameter("GPUs that the fast links join: 8, 72", _nvlink_domain),
    "flops": WhatIfParameter("peak of the GPU in every precision: x2, 2e15", _flops),
    "memory_bandwidth": WhatIfParameter(
        "bandwidth of the GPU's memory: 8TB/s, x2", _memory_bandwidth
    ),
    "memory": WhatIfParameter("size of the GPU's memory: 141GB, x2", _memory),
    "price": WhatIfParameter("dollars for one GPU and hour: 2.5", _price),
    "cluster": WhatIfParameter("another cluster: a catalog name or file", _cluster),
    "model": WhatIfParameter("another model: a catalog name, file or folder", _model),
    "gpus": WhatIfParameter("GPUs at the same batch, by data parallelism: 1024, x2", _gpus),
    "batch": WhatIfParameter("sequences of a step: 2048, x2", _batch),
    "sequence_length": WhatIfParameter("tokens of a sequence: 8192, 32Ki, x2", _sequence_length),
    **{
        name: WhatIfParameter(f"the layout's {name}", _field(name, kind))
        for name, kind in _FIELDS.items()
        if name != "global_batch"
    },
}
"""Everything that can be varied, by name."""

_ALIASES = {
    "network": "nic",
    "nvl": "nvlink_domain",
    "domain": "nvlink_domain",
    "scale_up": "nvlink",
    "peak": "flops",
    "peak_flops": "flops",
    "hbm": "memory_bandwidth",
    "global_batch": "batch",
    "sequence": "sequence_length",
    "seq": "sequence_length",
    "seqlen": "sequence_length",
    "micro_batch": "microbatch",
    "mbs": "microbatch",
    "gbs": "batch",
    "vpp": "virtual_stages",
}
