"""`mw gpus [NAME]`: the catalog of GPUs, or one in full with its sources."""

import argparse

from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, make_fields, make_table
from meshwright.spec import catalog
from meshwright.spec.cluster import Gpu
from meshwright.spec.serialization import encode
from meshwright.spec.units import format_bytes, format_rate

EXAMPLES = ("mw gpus", "mw gpus h200", "mw gpus b200 --json")

_PEAKS = ("bf16", "fp8", "fp4")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="catalog name")
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the list, or with one GPU."""
    return _list() if args.name is None else _one(catalog.get_gpu(args.name))


def _tera(flops: float | None) -> str:
    return "" if flops is None else f"{flops / 1e12:,.0f}"


def _list() -> CommandResult:
    gpus = list(catalog.list_gpus().values())
    rows = [
        (gpu.name, gpu.arch, f"{gpu.memory_bytes / 2**30:.0f}",
         f"{gpu.memory_bytes_per_s / 1e12:.2f}",
         *(_tera(getattr(gpu, f"{peak}_flops")) for peak in _PEAKS),
         "" if gpu.nvlink_bytes_per_s is None else f"{gpu.nvlink_bytes_per_s / 1e9:.0f}",
         "" if gpu.tdp_w is None else f"{gpu.tdp_w:g}")
        for gpu in gpus
    ]  # fmt: skip
    view = make_table(
        "name, arch, GiB, TB/s, bf16, fp8, fp4, link, W", rows,
        "dense peaks in TFLOP/s; link in GB/s per GPU and direction",
        right="GiB, TB/s, bf16, fp8, fp4, link, W",
    )  # fmt: skip
    return CommandResult(
        "gpus/1", {"gpus": [encode(gpu) for gpu in gpus]}, (view,), tuple(gpu.name for gpu in gpus)
    )


def _one(gpu: Gpu) -> CommandResult:
    peaks = [
        (precision, f"{gpu.peak_flops(precision) / 1e12:,.1f}") for precision in gpu.precisions
    ]
    head = {
        "name": gpu.name,
        "title": gpu.title,
        "vendor": gpu.vendor,
        "architecture": gpu.arch,
        "also called": ", ".join(gpu.aliases),
        "memory": f"{format_bytes(gpu.memory_bytes)} at {format_rate(gpu.memory_bytes_per_s)}",
        "L2 cache": gpu.l2_bytes and format_bytes(gpu.l2_bytes),
        "multiprocessors": gpu.sms,
        "clock": gpu.clock_hz and f"{gpu.clock_hz / 1e6:,.0f} MHz",
        "power": gpu.tdp_w and f"{gpu.tdp_w:g} W",
        "GPU links": gpu.nvlink_bytes_per_s
        and f"{format_rate(gpu.nvlink_bytes_per_s)} per direction",
        "host link": gpu.pcie_bytes_per_s and f"{format_rate(gpu.pcie_bytes_per_s)} per direction",
        "best bf16 product seen": gpu.bf16_measured_flops
        and f"{_tera(gpu.bf16_measured_flops)} TFLOP/s",
        "best fp8 product seen": gpu.fp8_measured_flops
        and f"{_tera(gpu.fp8_measured_flops)} TFLOP/s",
        "notes": gpu.notes,
    }
    sources = [(", ".join(source.fields), source.text) for source in gpu.sources]
    views = (
        make_fields(head),
        make_table("precision, dense peak TFLOP/s", peaks, right="dense peak TFLOP/s"),
        make_table("figures, source", sources, wide="figures, source"),
    )
    return CommandResult("gpu/1", {"gpu": encode(gpu)}, views, (gpu.name,))
