"""What `scripts.fuzz_coverage` runs: one target per format, with small valid files to begin with.

A target reads one file. It returns, or raises one of the project's own errors; everything else
is a fault. Targets decide nothing at random, so that an input always has the same coverage.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from scripts.fuzzing.structured import (
    Mutator,
    mutate_arrow,
    mutate_json,
    mutate_json_lines,
    mutate_parquet,
    mutate_pickle,
    mutate_safetensors,
    mutate_text,
)


class FuzzTarget(NamedTuple):
    """One format: where its reader and its first files are, and what else mutates them."""

    module: str
    """Has `READERS` and `SEEDS` by name of target; imported while its packages are instrumented."""
    packages: tuple[str, ...]
    """Packages whose branches guide the search."""
    mutate: Mutator | None = None
    """A mutation that keeps the syntax valid; libFuzzer's own take turns with it."""
    largest_bytes: int = 65_536


_TRACE, _FLEET, _MODEL = (
    f"scripts.fuzzing.{name}" for name in ("trace_targets", "fleet_targets", "model_targets")
)
_READERS = "meshwright.timeline.readers"
_PARSING = f"{_READERS}.parsing"
TARGETS: dict[str, FuzzTarget] = {
    "kineto": FuzzTarget(
        _TRACE, (f"{_READERS}.kineto", f"{_READERS}.chrome_trace", _PARSING), mutate_json
    ),
    "perfetto": FuzzTarget(
        _TRACE, (f"{_READERS}.perfetto_json", f"{_READERS}.chrome_trace"), mutate_json
    ),
    "nsight": FuzzTarget(_TRACE, (f"{_READERS}.nsys", _PARSING)),
    "flight_recorder": FuzzTarget(
        _TRACE, (f"{_READERS}.flight_recorder", f"{_READERS}.safe_pickle"), mutate_pickle
    ),
    "memory_snapshot": FuzzTarget(
        _TRACE, (f"{_READERS}.memory_snapshot", f"{_READERS}.safe_pickle"), mutate_pickle
    ),
    "nccl_log": FuzzTarget(_TRACE, (f"{_READERS}.nccl_log",), mutate_text),
    "nccl_inspector": FuzzTarget(_TRACE, (f"{_READERS}.nccl_inspector",), mutate_json_lines),
    "execution_trace": FuzzTarget(_TRACE, (f"{_READERS}.execution_trace",), mutate_json),
    "timeline_parquet": FuzzTarget(_TRACE, ("meshwright.timeline",), mutate_parquet),
    "trace_cache": FuzzTarget(
        _TRACE, (f"{_READERS}.trace_cache", "meshwright.timeline.timeline"), mutate_arrow
    ),
    "fleet_parquet": FuzzTarget(
        _FLEET, ("meshwright.fleet.sources", "meshwright.fleet.store"), mutate_parquet
    ),
    "public_trace": FuzzTarget(_FLEET, ("meshwright.fleet.sources.public_traces",), mutate_text),
    "numpy_pickle": FuzzTarget(_FLEET, ("meshwright.fleet.sources.public_traces",)),
    "fleet_json": FuzzTarget(_FLEET, ("meshwright.fleet.sources",), mutate_json),
    "xml": FuzzTarget(
        _MODEL, ("meshwright.spec.xml_elements", "meshwright.spec.cluster",
                 "meshwright.policy.collective.formats"),
    ),
    "topology_text": FuzzTarget(_MODEL, ("meshwright.spec.cluster",), mutate_text),
    "spec": FuzzTarget(_MODEL, ("meshwright.spec",)),
    "hf_config": FuzzTarget(_MODEL, ("meshwright.spec.model.huggingface",), mutate_json),
    "gguf": FuzzTarget(
        _MODEL, ("meshwright.run.serve.model.gguf_file", "meshwright.run.serve.model.gguf_weights",
                 "meshwright.run.serve.model.gguf_header",
                 "meshwright.run.serve.tokenizer.gguf_tokenizer", "gguf"),
    ),
    "safetensors": FuzzTarget(
        _MODEL, ("meshwright.run.nn.huggingface", "meshwright.run.serve.model.peft_checkpoint"),
        mutate_safetensors,
    ),
    "tokenizer": FuzzTarget(
        _MODEL, ("meshwright.run.serve.tokenizer", "meshwright.run.train.data.tokenization"),
        mutate_json,
    ),
    "text_parquet": FuzzTarget(
        _MODEL, ("meshwright.run.posttrain.data", "meshwright.run.train.data.tokenization"),
        mutate_parquet,
    ),
    "records": FuzzTarget(
        _MODEL, ("meshwright.run.posttrain.data", "meshwright.run.train.data.tokenization",
                 "meshwright.spec.workload"),
        mutate_json_lines,
    ),
    "checkpoint": FuzzTarget(_MODEL, ("meshwright.run.train.checkpoint",), mutate_json),
}  # fmt: skip
"""By name, in the order in which `scripts.fuzz_coverage --all` runs them."""

Reader = Callable[[Path], object]
"""Reads one file."""
SeedMaker = Callable[[Path], Iterator[bytes]]
"""Makes small valid files, with a folder to work in."""
