"""Fill a decoder from a Hugging Face checkpoint.

All names and shapes are compared before the first number is copied. Then each file's tensors are
copied one by one into their places, straight from the mapped file to the decoder's device: host
memory holds at most one tensor beside the decoder. A rank that holds parts of the parameters reads
the tensors of its own layers and experts alone; see `pieces`.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.run.nn.build import DEFAULTS, Options, build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.holding import Holding
from meshwright.run.nn.huggingface.checkpoint import Checkpoint, Tensors
from meshwright.run.nn.huggingface.families import family_of
from meshwright.run.nn.huggingface.family import Family, Linked, link_all
from meshwright.run.nn.huggingface.pieces import Source, pieces
from meshwright.run.nn.initialise import give_memory
from meshwright.spec.bounds import require
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import load_config


def load(
    target: Decoder | Model | None,
    folder: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    holdings: Mapping[str, Holding] | None = None,
) -> Decoder:
    """Fill a decoder, or build and fill one, from a folder of safetensors.

    A `Model` is built on `device` in `dtype`; None stands for the model of the folder's
    `config.json`, whose multi-token heads are built only if the folder holds them. A decoder keeps
    its own type, and its device unless it has no memory yet. `holdings` says which parts of which
    parameters a decoder has that is one rank's; it may lack layers, which are not looked for.
    """
    with Checkpoint(folder) as checkpoint:
        if target is None:
            target = _model_of(checkpoint)
        decoder = target
        if isinstance(decoder, Model):
            decoder = build(decoder, device="meta", dtype=dtype)
        fill(decoder, checkpoint, device=device, holdings=holdings)
    return decoder


def fill(
    decoder: Decoder,
    checkpoint: Tensors,
    *,
    device: torch.device | str | None = None,
    holdings: Mapping[str, Holding] | None = None,
) -> None:
    """Fill a decoder from tensors that have their names in Hugging Face's checkpoints."""
    held = holdings or {}
    links = _compare(decoder, checkpoint, held)
    if any(parameter.is_meta for parameter in decoder.parameters()):
        give_memory(decoder, device or "cpu")
    if holdings is None:
        _copy(decoder, checkpoint, links)
    else:
        _copy_pieces(decoder, checkpoint, links, held)


def misfits(model: Model, folder: str | Path, options: Options = DEFAULTS) -> list[Problem]:
    """Return why a folder of safetensors cannot fill a model, from names and shapes alone."""
    try:
        with Checkpoint(folder) as checkpoint:
            _compare(build(model, device="meta", options=options), checkpoint, {})
    except InputError as error:
        return list(error.problems)
    return []


def _model_of(checkpoint: Checkpoint) -> Model:
    model = load_config(checkpoint.folder)
    if model.multi_token is None:
        return model
    after = family_of(model).layer(model.layers)
    held = any(name.startswith(after) for name in checkpoint.shapes)
    return model if held else replace(model, multi_token=None)


def _compare(
    decoder: Decoder, checkpoint: Tensors, held: Mapping[str, Holding]
) -> dict[str, list[Linked]]:
    """Match their tensors, by name, with the links that read them; say what all is amiss."""
    model = decoder.model
    family = family_of(model)
    shapes = {
        name: held[name].whole if name in held else tuple(value.shape)
        for name, value in decoder.named_parameters()
    }
    wanted: dict[str, list[Linked]] = {}
    for linked in link_all(family, model, shapes):
        wanted.setdefault(linked.link.theirs, []).append(linked)
    known = wanted.keys() | (_names(decoder, family) if held else set())
    stored = _rooted(family, checkpoint.shapes)
    missing, misshapen, unread = list[Problem](), list[Problem](), list[Problem]()
    for name, links in wanted.items():
        where, shape = f"{checkpoint.folder}: {name}", links[0].link.shape
        if name not in stored:
            missing.append(Problem(where, f"is missing; it fills {links[0].ours}",
                                   "complete the checkpoint, or mend the model"))  # fmt: skip
        elif checkpoint.shapes[stored[name]] != shape:
            what = f"has shape {list(checkpoint.shapes[stored[name]])}, not {list(shape)}"
            misshapen.append(Problem(where, what, "use the model the checkpoint was made of"))
        elif why := checkpoint.unreadable(stored[name]):
            unread.append(Problem(where, why, "use a checkpoint in bf16, fp16, fp32 or fp8"))
    strange = [
        Problem(f"{checkpoint.folder}: {name}", f"a {model.family} model of this shape has no such"
                " tensor", "use the model the checkpoint was made of")
        for name in stored if name not in known and not _spare(name, family, decoder)
    ]  # fmt: skip
    require(
        _few(missing, "are missing", checkpoint.folder),
        _few(misshapen, "have other shapes", checkpoint.folder),
        _few(unread, "are in formats that are not read", checkpoint.folder),
        _few(strange, "are none of such a model", checkpoint.folder),
    )
    return {stored[name]: links for name, links in wanted.items()}


_SHOWN = 3


def _few(problems: list[Problem], what: str, folder: Path) -> list[Problem]:
    """Return the first of many like problems, and how many more there are."""
    more = len(problems) - _SHOWN
    if more < 2:
        return problems
    said = f"{more} more tensors {what}, {len(problems)} in all"
    return [*problems[:_SHOWN], Problem(str(folder), said, problems[0].fix)]


def _names(decoder: Decoder, family: Family) -> set[str]:
    """Return their names of all that the whole model has, of which a rank may have some."""
    options = Options(multi_token=bool(decoder.multi_token))
    whole = build(decoder.model, device="meta", options=options)
    shapes = {name: tuple(value.shape) for name, value in whole.named_parameters()}
    return {linked.link.theirs for linked in link_all(family, decoder.model, shapes)}


def _rooted(family: Family, names: Iterable[str]) -> dict[str, str]:
    """Give each stored name the family's root where the checkpoint leaves it out."""
    found = {name: name for name in names}
    if not family.root or any(name.startswith(family.root) for name in found):
        return found
    return {
        name if name.startswith(f"{family.head}.") else family.root + name: name for name in found
    }


def _spare(name: str, family: Family, decoder: Decoder) -> bool:
    """Tell whether a tensor may stand in a checkpoint without being read."""
    model = decoder.model
    tied = model.tied and name == f"{family.head}.weight"
    ahead = False
    if model.multi_token is not None:
        # The heads' copies of the tables; all of the heads, where the decoder was built without.
        layers = range(model.layers, model.layers + model.multi_token.depth)
        ahead = name.startswith(tuple(family.layer(layer) for layer in layers)) and (
            not decoder.multi_token or name.endswith(tuple(family.repeated))
        )
    return tied or ahead or re.search(family.spare, name) is not None


@torch.no_grad()
def _copy(decoder: Decoder, checkpoint: Tensors, links: Mapping[str, list[Linked]]) -> None:
    parameters = dict(decoder.named_parameters())
    for _, names in checkpoint.files():
        for name in names:
            if name not in links:
                continue
            tensor = checkpoint.read(name, parameters[links[name][0].ours].device)
            for ours, link in links[name]:
                link.in_ours(parameters[ours]).copy_(link.in_theirs(tensor))


@torch.no_grad()
def _copy_pieces(
    decoder: Decoder,
    checkpoint: Tensors,
    links: Mapping[str, list[Linked]],
    held: Mapping[str, Holding],
) -> None:
    ours: dict[str, list[Source]] = {}
    for theirs, found in links.items():
        for name, link in found:
            ours.setdefault(name, []).append(Source(theirs, link))
    for name, parameter in decoder.named_parameters():
        holding = held.get(name) or Holding.all_of(tuple(parameter.shape))
        for piece in pieces(holding, ours[name]):
            piece.fill(parameter, checkpoint.read)
