"""The catalog of real models: names to architectures, with what their makers published.

One TOML file per family lies in `models/`; each entry holds a `Model` as a user would write it,
and the published parameter count with its source. Files are parsed when first asked for, and an
entry is read when it is wanted.
"""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from meshwright.errors import InputError
from meshwright.spec.model import Model, ParameterCounts, count_parameters
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.serialization import decode

ParameterPart = Literal[
    "embedding", "head", "multi-token", "multi-token-tables", "router-bias", "tied-head", "vision"
]
"""Something that makers count and we do not, or the other way round.

`tied-head` is a tied output head stored a second time, `multi-token-tables` are the copies of the
embedding and the head that come with each multi-token head.
"""


class CatalogModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A real model: its architecture, and what was published about it."""

    model: Model
    """The architecture."""
    title: str
    """The name its makers give it."""
    published_parameters: int
    """The published parameter count."""
    published_text: str
    """The same in short; the last digit tells how far off a rounded figure can be."""
    published_exact: bool = False
    """The figure counts single parameters, it is not rounded."""
    published_with: tuple[ParameterPart, ...] = ()
    """What the published figure counts beyond our total."""
    published_without: tuple[ParameterPart, ...] = ()
    """What the published figure leaves out of our total."""
    published_active: int | None = None
    """The published count of parameters that one token uses, rounded."""
    source: str
    """Where the published figure stands."""
    released: str
    """Year and month of the release."""
    hf_repo: str = ""
    """The repository on the Hugging Face Hub, empty where there is none."""
    aliases: tuple[str, ...] = ()
    """Other names of the same model."""
    note: str = ""
    """What a reader should know about the figure or the architecture."""

    @property
    def name(self) -> str:
        """The model's name in the catalog."""
        return self.model.name

    def count_comparable_parameters(self) -> int:
        """Count the parameters that the published figure counts."""
        counted = count_parameters(self.model)
        total = counted.total
        total += sum(_part(self.model, counted, part) for part in self.published_with)
        return total - sum(_part(self.model, counted, part) for part in self.published_without)

    def tolerance(self) -> float:
        """Return how far the count may lie from the published figure.

        That is 0.1 %, or half a unit of the last printed digit where a rounded figure is coarser.
        """
        share = 1e-3 * self.published_parameters
        return share if self.published_exact else max(share, _half_unit(self.published_text))


def _part(model: Model, counted: ParameterCounts, part: ParameterPart) -> int:
    table = model.vocab * model.hidden
    depth = model.multi_token.depth if model.multi_token is not None else 0
    balanced = sum(
        layers * block.mlp.count_vector_parameters()
        for block, layers in model.count_layers_by_block()
        if block.mlp is not None
    )
    return {
        "embedding": counted.embedding,
        "head": counted.head,
        "multi-token": counted.multi_token,
        "multi-token-tables": 2 * depth * table,
        "router-bias": balanced,
        "tied-head": table if model.tied else 0,
        "vision": counted.vision,
    }[part]


_FIGURE = re.compile(r"(\d+)(?:\.(\d+))?([MBT])")
_FACTORS = {"M": 1e6, "B": 1e9, "T": 1e12}


def _half_unit(text: str) -> float:
    match = _FIGURE.fullmatch(text)
    if match is None:
        return 0.0
    return 0.5 * _FACTORS[match[3]] * 0.1 ** len(match[2] or "")


def get_model(name: str) -> Model:
    """Return the architecture of that name or alias, whatever its case."""
    return get_catalog_model(name).model


@cache
def list_models() -> Mapping[str, CatalogModel]:
    """Return every entry of the catalog by name, in order of family and size."""
    return MappingProxyType({name: _read(name) for name in _tables()})


def get_catalog_model(name: str) -> CatalogModel:
    """Return the catalog's entry of that name or alias, whatever its case."""
    names = _names()
    wanted = name.strip().lower()
    if wanted not in names:
        raise InputError([build_unknown_name_problem("model", name, names, "model")])
    return _read(names[wanted])


@cache
def _tables() -> dict[str, dict[str, Any]]:
    """Parse every family's file; an entry that is `same_as` another takes its architecture."""
    folder = files("meshwright.spec.catalog") / "models"
    texts = sorted((path.name, path) for path in folder.iterdir() if path.name.endswith(".toml"))
    tables: dict[str, dict[str, Any]] = {}
    for _, path in texts:
        for table in tomllib.loads(path.read_text(encoding="utf-8"))["models"]:
            architecture = table["model"]
            same_as = table.pop("same_as", None)
            if same_as is not None:
                architecture = {**tables[same_as]["model"], **architecture}
            tables[architecture["name"]] = {**table, "model": architecture}
    return tables


@cache
def _names() -> dict[str, str]:
    names = {}
    for name, table in _tables().items():
        repository = table.get("hf_repo", "")
        for known in (repository, repository.partition("/")[2], *table.get("aliases", ()), name):
            names[known.lower()] = name
    names.pop("", None)
    return names


@cache
def _read(name: str) -> CatalogModel:
    return decode(CatalogModel, _tables()[name], f"{name}: ")
