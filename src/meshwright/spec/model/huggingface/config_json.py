"""The way in and out: `read_config`, `write_config` and `load_config` over all families.

Whatever a family's writer produces is read back and compared with the model, so a setting that
the config cannot say is refused by name; it is never dropped.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.file_formats import load_data
from meshwright.spec.model.huggingface.config_fields import ConfigFields
from meshwright.spec.model.huggingface.decoder import read_decoder, write_decoder
from meshwright.spec.model.huggingface.families import falcon, nemotron_h
from meshwright.spec.model.huggingface.families.dense import DENSE
from meshwright.spec.model.huggingface.families.gpt import GPT
from meshwright.spec.model.huggingface.families.moe import MOE
from meshwright.spec.model.huggingface.families.multimodal import (
    MULTIMODAL,
    read_multimodal,
    write_multimodal,
)
from meshwright.spec.model.model import Model
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.serialization import format_value


class ConfigFamily(NamedTuple):
    """How one `model_type` is read and written."""

    read: Callable[[ConfigFields], Model]
    write: Callable[[Model], dict[str, Any]]


FAMILIES: dict[str, ConfigFamily] = {
    traits.model_type: ConfigFamily(
        partial(read_decoder, t=traits), partial(write_decoder, t=traits)
    )
    for traits in DENSE + GPT + MOE
}
FAMILIES |= {
    joined.model_type: ConfigFamily(
        partial(read_multimodal, family=joined), partial(write_multimodal, family=joined)
    )
    for joined in MULTIMODAL
}
FAMILIES[falcon.MODEL_TYPE] = ConfigFamily(falcon.read_falcon, falcon.write_falcon)
FAMILIES[nemotron_h.MODEL_TYPE] = ConfigFamily(
    nemotron_h.read_nemotron_h, nemotron_h.write_nemotron_h
)


def list_model_types() -> tuple[str, ...]:
    """Return every `model_type` that can be read and written, sorted."""
    return tuple(sorted(FAMILIES))


def read_config(data: Mapping[str, Any], name: str = "") -> Model:
    """Read the content of a `config.json` as a model, or raise every fault in it at once."""
    return _read(data, name, "")


def load_config(path: str | Path) -> Model:
    """Read a `config.json`, or the one in a folder, as a model named after the folder."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    name = path.parent.resolve().name if path.name == "config.json" else path.stem
    return _read(load_data(path), name, f"{path}: ")


def _read(data: Mapping[str, Any], name: str, where: str) -> Model:
    fields = ConfigFields(data, where)
    model_type = fields.text("model_type")
    fields.raise_problems()
    family = _family(model_type, f"{where}model_type")
    try:
        model = family.read(fields)
    except InputError as error:
        fields.raise_problems()
        # The keys read well, but what they say together is no model.
        raise InputError(
            Problem(f"{where}as a model: {p.where}", p.what, p.fix) for p in error.problems
        ) from None
    return msgspec.structs.replace(model, name=name or model_type)


def _family(model_type: str, where: str) -> ConfigFamily:
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    problem = build_unknown_name_problem("model type", model_type, FAMILIES, where)
    known = "known are " + ", ".join(list_model_types())
    raise InputError([problem._replace(fix=f"{problem.fix}; {known}")])


def write_config(model: Model) -> dict[str, Any]:
    """Write a model as the content of a `config.json`, or raise what its family cannot say."""
    family = _family(model.family, "family")
    config = family.write(model)
    try:
        back = _read(config, model.name, "")
    except InputError as error:
        raise InputError(
            Problem(p.where, f"a {model.family} config cannot hold this: {p.what}", p.fix)
            for p in error.problems
        ) from None
    cannot = f"a {model.family} config cannot say"
    problems = [
        Problem(where, f"{cannot} {format_value(ours)}", f"it can say {format_value(theirs)}")
        for where, ours, theirs in _differences(model, back)
    ]
    if problems:
        raise InputError(problems)
    return config


def _differences(model: Model, back: Model) -> Iterator[tuple[str, object, object]]:
    """Find where two models differ, layer by layer: what blocks are called does not matter."""
    if model.layers != back.layers:
        yield "pattern", f"{model.layers} layers", f"{back.layers} layers"
        return
    for field in msgspec.structs.fields(Model):
        ours, theirs = getattr(model, field.name), getattr(back, field.name)
        if field.name not in {"blocks", "pattern", "multi_token"}:
            yield from _unequal(field.name, ours, theirs)
    pairs = list(zip(model.layer_blocks(), back.layer_blocks(), strict=True))
    ahead, ahead_back = model.multi_token, back.multi_token
    if ahead is not None and ahead_back is not None:
        yield from _unequal("multi_token.depth", ahead.depth, ahead_back.depth)
        pairs.append((model.block(ahead.block), back.block(ahead_back.block)))
    else:
        yield from _unequal("multi_token", ahead, ahead_back)
    for ours, theirs in dict.fromkeys(pairs):
        for field in msgspec.structs.fields(type(ours)):
            if field.name != "name":
                where = f"blocks.{ours.name}.{field.name}"
                yield from _unequal(where, getattr(ours, field.name), getattr(theirs, field.name))


def _unequal(where: str, ours: object, theirs: object) -> Iterator[tuple[str, object, object]]:
    if ours == theirs:
        return
    if isinstance(ours, msgspec.Struct) and type(ours) is type(theirs):
        for field in msgspec.structs.fields(ours):
            inner = f"{where}.{field.name}"
            yield from _unequal(inner, getattr(ours, field.name), getattr(theirs, field.name))
    else:
        yield where, ours, theirs
