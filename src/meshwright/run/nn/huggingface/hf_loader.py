"""Fill a decoder from a Hugging Face checkpoint.

All names and shapes are compared before the first number is copied. Then each file's tensors are
copied one by one into their places, straight from the mapped file to the decoder's device: host
memory holds at most one tensor beside the decoder. A rank that holds parts of the parameters reads
the tensors of its own layers and experts alone; see `iter_needed_blocks`.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import DEFAULT_BUILD_OPTIONS, BuildOptions, build_decoder
from meshwright.run.nn.huggingface.model_registry import get_weight_map
from meshwright.run.nn.huggingface.partial_load import CheckpointTensor, iter_needed_blocks
from meshwright.run.nn.huggingface.safetensors_folder import SafetensorsFolder, TensorSource
from meshwright.run.nn.huggingface.weight_map import ParameterMapping, WeightMap, map_all_parameters
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.nn.weight_init import allocate_parameters
from meshwright.spec.field_checks import raise_problems
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import load_config


def load_hf_checkpoint(
    target: Decoder | Model | None,
    folder: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    shard_specs: Mapping[str, ShardSpec] | None = None,
) -> Decoder:
    """Fill a decoder, or build and fill one, from a folder of safetensors.

    A `Model` is built on `device` in `dtype`; None stands for the model of the folder's
    `config.json`, whose multi-token heads are built only if the folder holds them. A decoder keeps
    its own type, and its device unless it has no memory yet. `shard_specs` says which parts of
    which parameters a decoder has that is one rank's; it may lack layers, which are not looked for.
    """
    with SafetensorsFolder(folder) as checkpoint:
        if target is None:
            target = _model_of(checkpoint)
        decoder = target
        if isinstance(decoder, Model):
            decoder = build_decoder(decoder, device="meta", dtype=dtype)
        load_tensors_into(decoder, checkpoint, device=device, shard_specs=shard_specs)
    return decoder


def load_tensors_into(
    decoder: Decoder,
    checkpoint: TensorSource,
    *,
    device: torch.device | str | None = None,
    shard_specs: Mapping[str, ShardSpec] | None = None,
) -> None:
    """Fill a decoder from tensors that have their names in Hugging Face's checkpoints."""
    held = shard_specs or {}
    links = _compare(decoder, checkpoint, held)
    if any(parameter.is_meta for parameter in decoder.parameters()):
        allocate_parameters(decoder, device or "cpu")
    if shard_specs is None:
        _copy(decoder, checkpoint, links)
    else:
        _copy_pieces(decoder, checkpoint, links, held)


def find_checkpoint_mismatches(
    model: Model, folder: str | Path, options: BuildOptions = DEFAULT_BUILD_OPTIONS
) -> list[Problem]:
    """Return why a folder of safetensors cannot fill a model, from names and shapes alone."""
    try:
        with SafetensorsFolder(folder) as checkpoint:
            _compare(build_decoder(model, device="meta", options=options), checkpoint, {})
    except InputError as error:
        return list(error.problems)
    return []


def _model_of(checkpoint: SafetensorsFolder) -> Model:
    model = load_config(checkpoint.folder)
    if model.multi_token is None:
        return model
    after = get_weight_map(model).format_layer_prefix(model.layers)
    held = any(name.startswith(after) for name in checkpoint.shapes)
    return model if held else replace(model, multi_token=None)


def _compare(
    decoder: Decoder, checkpoint: TensorSource, held: Mapping[str, ShardSpec]
) -> dict[str, list[ParameterMapping]]:
    """Match their tensors, by name, with the links that read them; say what all is amiss."""
    model = decoder.model
    family = get_weight_map(model)
    shapes = {
        name: held[name].global_shape if name in held else tuple(value.shape)
        for name, value in decoder.named_parameters()
    }
    wanted: dict[str, list[ParameterMapping]] = {}
    for linked in map_all_parameters(family, model, shapes):
        wanted.setdefault(linked.tensor_mapping.checkpoint_name, []).append(linked)
    known = wanted.keys() | (_names(decoder, family) if held else set())
    stored = _rooted(family, checkpoint.shapes)
    missing, misshapen, unread = list[Problem](), list[Problem](), list[Problem]()
    for name, links in wanted.items():
        where, shape = f"{checkpoint.folder}: {name}", links[0].tensor_mapping.shape
        if name not in stored:
            missing.append(Problem(where, f"is missing; it fills {links[0].parameter_name}",
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
    raise_problems(
        _few(missing, "are missing", checkpoint.folder),
        _few(misshapen, "have other shapes", checkpoint.folder),
        _few(unread, "are in dtypes that are not supported", checkpoint.folder),
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


def _names(decoder: Decoder, family: WeightMap) -> set[str]:
    """Return their names of all that the whole model has, of which a rank may have some."""
    options = BuildOptions(include_mtp=bool(decoder.multi_token))
    whole = build_decoder(decoder.model, device="meta", options=options)
    shapes = {name: tuple(value.shape) for name, value in whole.named_parameters()}
    return {
        linked.tensor_mapping.checkpoint_name
        for linked in map_all_parameters(family, decoder.model, shapes)
    }


def _rooted(family: WeightMap, names: Iterable[str]) -> dict[str, str]:
    """Give each stored name the family's root where the checkpoint leaves it out."""
    found = {name: name for name in names}
    if not family.optional_prefix or any(name.startswith(family.optional_prefix) for name in found):
        return found
    return {
        name if name.startswith(f"{family.head_name}.") else family.optional_prefix + name: name
        for name in found
    }


def _spare(name: str, family: WeightMap, decoder: Decoder) -> bool:
    """Tell whether a tensor may stand in a checkpoint without being read."""
    model = decoder.model
    tied = model.tied and name == f"{family.head_name}.weight"
    ahead = False
    if model.multi_token is not None:
        # The heads' copies of the tables; all of the heads, where the decoder was built without.
        layers = range(model.layers, model.layers + model.multi_token.depth)
        ahead = name.startswith(tuple(family.format_layer_prefix(layer) for layer in layers)) and (
            not decoder.multi_token or name.endswith(tuple(family.mtp_duplicates))
        )
    return tied or ahead or re.search(family.ignored_pattern, name) is not None


@torch.no_grad()
def _copy(
    decoder: Decoder, checkpoint: TensorSource, links: Mapping[str, list[ParameterMapping]]
) -> None:
    parameters = dict(decoder.named_parameters())
    for _, names in checkpoint.files():
        for name in names:
            if name not in links:
                continue
            tensor = checkpoint.read(name, parameters[links[name][0].parameter_name].device)
            for ours, link in links[name]:
                link.view_parameter(parameters[ours]).copy_(link.view_checkpoint(tensor))


@torch.no_grad()
def _copy_pieces(
    decoder: Decoder,
    checkpoint: TensorSource,
    links: Mapping[str, list[ParameterMapping]],
    held: Mapping[str, ShardSpec],
) -> None:
    ours: dict[str, list[CheckpointTensor]] = {}
    for theirs, found in links.items():
        for name, link in found:
            ours.setdefault(name, []).append(CheckpointTensor(theirs, link))
    for name, parameter in decoder.named_parameters():
        holding = held.get(name) or ShardSpec.unsharded(tuple(parameter.shape))
        for piece in iter_needed_blocks(holding, ours[name]):
            piece.load_into(parameter, checkpoint.read)
