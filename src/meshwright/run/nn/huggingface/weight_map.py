"""`WeightMap`: the table of one `model_type`, from our parameter names to the checkpoint's.

A table's keys are our names, without `layers.N.` inside a layer; its values are their name, or an
entry of `links` where one parameter of ours lies otherwise in theirs. `*` is `weight` or `bias` on
both sides, `#` the layer, `%` the expert. A line whose parameter a model does not have is not used,
so one table serves all variants of a family.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.run.nn.huggingface.tensor_mapping import (
    MapEntry,
    ParameterSite,
    RowCounts,
    SameTensor,
    Shape,
    StackedTensors,
    TensorMapping,
)
from meshwright.spec.model import Model

MapEntries = Mapping[str, MapEntry | str]

NO_ENTRIES: Mapping[str, Any] = MappingProxyType({})

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_AHEAD = re.compile(r"multi_token\.(\d+)\.(?:block\.)?(.+)")


class WeightMap(NamedTuple):
    """How one family names its tensors."""

    global_entries: MapEntries
    """What stands around the layers, but the head."""
    layer_entries: MapEntries
    """One layer."""
    layer_prefix: str = "model.layers.#."
    """What stands before the names of a layer."""
    head_name: str = "lm_head"
    """The output head."""
    optional_prefix: str = ""
    """What some checkpoints leave out at the front of every name but the head's."""
    mtp_entries: MapEntries = NO_ENTRIES
    """A multi-token head beyond its block; it is stored as one more layer."""
    mtp_duplicates: Mapping[str, str] = NO_ENTRIES
    """Tensors that a multi-token head stores again, with our parameter they repeat."""
    ignored_pattern: str = r"\.rotary_emb\.inv_freq$"
    """Names of tensors that a decoder has no use for, as a regular expression: masks,
    frequencies, heads that its description leaves out."""

    def format_layer_prefix(self, index: int) -> str:
        """Return what stands before the names of a layer."""
        return self.layer_prefix.replace("#", str(index))


def make_stacked_tensors(*names: str, sizes: RowCounts | None = None) -> StackedTensors:
    """Make an entry that stacks several tensors of theirs."""
    return StackedTensors(tuple(SameTensor(name) for name in names), sizes)


class ParameterMapping(NamedTuple):
    """A link with the parameter of ours it belongs to."""

    parameter_name: str
    tensor_mapping: TensorMapping


def map_all_parameters(
    family: WeightMap, model: Model, shapes: Mapping[str, Shape]
) -> Iterator[ParameterMapping]:
    """Yield the links of all parameters of a decoder, in the decoder's order."""
    problems = []
    for name, shape in shapes.items():
        table, inner, site, before = _place(family, model, name)
        found = _line(table, inner)
        if found is None:
            what = f"a {model.family} checkpoint has no tensor for it"
            fix = "write the model as another family"
            if name.startswith("multi_token."):
                fix = "build the decoder with Options(multi_token=False)"
            problems.append(Problem(name, what, fix))
            continue
        entry, ending = found
        for link in entry.mappings(shape, site):
            theirs = before + link.checkpoint_name.replace("*", ending)
            yield ParameterMapping(name, link._replace(checkpoint_name=theirs))
    if problems:
        raise InputError(problems)


def _place(
    family: WeightMap, model: Model, name: str
) -> tuple[MapEntries, str, ParameterSite, str]:
    """Find the table of a parameter, its name there, its block, and what stands before theirs."""
    if found := _LAYER.fullmatch(name):
        layer = int(found[1])
        site = ParameterSite(model, model.layer_blocks()[layer])
        return family.layer_entries, found[2], site, family.format_layer_prefix(layer)
    if model.multi_token is not None and (found := _AHEAD.fullmatch(name)):
        site = ParameterSite(model, model.block(model.multi_token.block))
        table = {**family.layer_entries, **family.mtp_entries}
        return table, found[2], site, family.format_layer_prefix(model.layers + int(found[1]))
    return (
        {**family.global_entries, "head.*": f"{family.head_name}.*"},
        name,
        ParameterSite(model, None),
        "",
    )


def _line(table: MapEntries, name: str) -> tuple[MapEntry, str] | None:
    """Find the line of a parameter, and what its `*` stands for."""
    before, _, ending = name.rpartition(".")
    for key in (name, f"{before}.*"):
        if key in table:
            entry = table[key]
            return (SameTensor(entry) if isinstance(entry, str) else entry), ending
    return None
