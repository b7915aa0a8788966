"""All families of the bench, in the order in which they are measured."""

from pathlib import Path

from meshwright.observe.bench.attention import ATTENTION
from meshwright.observe.bench.collectives import COLLECTIVES
from meshwright.observe.bench.copies import COPIES
from meshwright.observe.bench.data import DATA
from meshwright.observe.bench.elementwise import ELEMENTWISE
from meshwright.observe.bench.exchanges import Backend
from meshwright.observe.bench.family import Family
from meshwright.observe.bench.launches import LAUNCHES
from meshwright.observe.bench.messages import MESSAGES
from meshwright.observe.bench.products import PRODUCTS
from meshwright.observe.bench.storage import storage

FAMILIES: tuple[Family, ...] = (PRODUCTS, ATTENTION, ELEMENTWISE, COPIES, LAUNCHES)
"""Those of one device."""


def families(*, ranks: int, backend: Backend, folder: Path) -> tuple[Family, ...]:
    """Return all of them, for so many ranks over a backend and for storage in a folder."""
    return (
        *FAMILIES,
        COLLECTIVES.family(ranks, backend),
        MESSAGES.family(ranks, backend),
        storage(folder),
        DATA,
    )
