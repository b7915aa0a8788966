"""The catalog's device for the name that a driver reports."""

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.spec.cluster import Gpu


_MAKERS = re.compile(r"^(nvidia|amd|tesla|instinct|geforce)[- ]+")


@lru_cache(64)
def find_catalog_device(name: str) -> "Gpu | None":
    """The catalog's device for a driver's name: `NVIDIA H100 80GB HBM3`, `AMD Instinct MI300X`.

    What follows the model (memory, form) is dropped word by word until the catalog knows it.
    """
    from meshwright.spec.catalog import get_gpu

    slug = name.strip().lower()
    while (shorter := _MAKERS.sub("", slug)) != slug:
        slug = shorter
    words = re.split(r"[-\s]+", slug)
    for length in range(len(words), 0, -1):
        try:
            return get_gpu("-".join(words[:length]))
        except InputError:
            continue
    return None
