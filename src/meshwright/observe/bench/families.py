"""All families of the bench, in the order in which they are measured."""

from pathlib import Path

from meshwright.observe.bench.bench_family import BenchFamily
from meshwright.observe.bench.communication import COLLECTIVE_EXCHANGES, P2P_EXCHANGES, Backend
from meshwright.observe.bench.io.data_loader import DATA_LOADER_FAMILY
from meshwright.observe.bench.io.storage import build_storage_family
from meshwright.observe.bench.kernels.attention import ATTENTION_FAMILY
from meshwright.observe.bench.kernels.gemm import GEMM_FAMILY
from meshwright.observe.bench.kernels.launch_overhead import LAUNCH_FAMILY
from meshwright.observe.bench.kernels.memory_bound import MEMORY_BOUND_FAMILY
from meshwright.observe.bench.kernels.memory_copies import MEMORY_COPY_FAMILY

FAMILIES: tuple[BenchFamily, ...] = (
    GEMM_FAMILY,
    ATTENTION_FAMILY,
    MEMORY_BOUND_FAMILY,
    MEMORY_COPY_FAMILY,
    LAUNCH_FAMILY,
)
"""Those of one device."""


def list_families(*, ranks: int, backend: Backend, folder: Path) -> tuple[BenchFamily, ...]:
    """Return all of them, for so many ranks over a backend and for storage in a folder."""
    return (
        *FAMILIES,
        COLLECTIVE_EXCHANGES.build_family(ranks, backend),
        P2P_EXCHANGES.build_family(ranks, backend),
        build_storage_family(folder),
        DATA_LOADER_FAMILY,
    )
