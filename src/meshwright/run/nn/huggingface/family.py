"""`Family`: the table of one `model_type`, from our parameter names to the checkpoint's.

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
from meshwright.run.nn.huggingface.links import Entry, Joined, Link, Same, Shape, Site, Sizes
from meshwright.spec.model import Model

Table = Mapping[str, Entry | str]

NOTHING: Mapping[str, Any] = MappingProxyType({})

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_AHEAD = re.compile(r"multi_token\.(\d+)\.(?:block\.)?(.+)")


class Family(NamedTuple):
    """How one family names its tensors."""

    outside: Table
    """What stands around the layers, but the head."""
    inside: Table
    """One layer."""
    layers: str = "model.layers.#."
    """What stands before the names of a layer."""
    head: str = "lm_head"
    """The output head."""
    root: str = ""
    """What some checkpoints leave out at the front of every name but the head's."""
    ahead: Table = NOTHING
    """A multi-token head beyond its block; it is stored as one more layer."""
    repeated: Mapping[str, str] = NOTHING
    """Tensors that a multi-token head stores again, with our parameter they repeat."""
    spare: str = r"\.rotary_emb\.inv_freq$"
    """Names of tensors that a decoder has no use for, as a regular expression: masks,
    frequencies, heads that its description leaves out."""

    def layer(self, index: int) -> str:
        """Return what stands before the names of a layer."""
        return self.layers.replace("#", str(index))


def joined(*names: str, sizes: Sizes | None = None) -> Joined:
    """Make an entry that stacks several tensors of theirs."""
    return Joined(tuple(Same(name) for name in names), sizes)


class Linked(NamedTuple):
    """A link with the parameter of ours it belongs to."""

    ours: str
    link: Link


def link_all(family: Family, model: Model, shapes: Mapping[str, Shape]) -> Iterator[Linked]:
    """Yield the links of all parameters of a decoder, in the decoder's order."""
    problems = []
    for name, shape in shapes.items():
        table, inner, site, before = _place(family, model, name)
        found = _line(table, inner)
        if found is None:
            what = f"a {model.family} checkpoint has no place for it"
            fix = "write the model as another family"
            if name.startswith("multi_token."):
                fix = "build the decoder with Options(multi_token=False)"
            problems.append(Problem(name, what, fix))
            continue
        entry, ending = found
        for link in entry.links(shape, site):
            theirs = before + link.theirs.replace("*", ending)
            yield Linked(name, link._replace(theirs=theirs))
    if problems:
        raise InputError(problems)


def _place(family: Family, model: Model, name: str) -> tuple[Table, str, Site, str]:
    """Find the table of a parameter, its name there, its block, and what stands before theirs."""
    if found := _LAYER.fullmatch(name):
        layer = int(found[1])
        site = Site(model, model.layer_blocks()[layer])
        return family.inside, found[2], site, family.layer(layer)
    if model.multi_token is not None and (found := _AHEAD.fullmatch(name)):
        site = Site(model, model.block(model.multi_token.block))
        table = {**family.inside, **family.ahead}
        return table, found[2], site, family.layer(model.layers + int(found[1]))
    return {**family.outside, "head.*": f"{family.head}.*"}, name, Site(model, None), ""


def _line(table: Table, name: str) -> tuple[Entry, str] | None:
    """Find the line of a parameter, and what its `*` stands for."""
    before, _, ending = name.rpartition(".")
    for key in (name, f"{before}.*"):
        if key in table:
            entry = table[key]
            return (Same(entry) if isinstance(entry, str) else entry), ending
    return None
