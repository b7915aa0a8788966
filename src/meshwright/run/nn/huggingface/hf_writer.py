"""Write a decoder as a Hugging Face checkpoint.

Shards are planned from shapes alone, then made and written one at a time, so host memory holds one
shard beside the decoder. They are written under other names and moved into place once all are
whole.

Weights that lie on many ranks come through `whole`, one parameter at a time: all ranks ask for the
same ones in the same order, and the rank that gets them writes.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.huggingface.model_registry import get_weight_map
from meshwright.run.nn.huggingface.quantized_weights import BLOCK, quantize_fp8
from meshwright.run.nn.huggingface.safetensors_folder import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from meshwright.run.nn.huggingface.safetensors_writer import write_safetensors
from meshwright.run.nn.huggingface.tensor_mapping import TensorMapping, view_unchanged
from meshwright.run.nn.huggingface.weight_map import ParameterMapping, WeightMap, map_all_parameters
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import write_config

MAX_SHARD_BYTES = 5_000_000_000
"""A file is no larger than this, unless one tensor is."""

FP8 = torch.float8_e4m3fn

ParameterReader = Callable[[str], Tensor | None]
"""Gives the whole of a parameter, by name, to the rank that writes, and None to the others."""

_WORDS = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    FP8: "bfloat16",
}
_KEPT = (".balance", ".decay_log", ".step_bias", ".skip")
"""Vectors that are written in fp32 always: small steps in them vanish in bf16."""
_NOT_PRODUCTS = (".router.weight", ".shared_gate.weight", ".conv.weight", ".join.weight")
"""Matrices that stay in bf16 beside fp8 ones."""


class OutputTensor(NamedTuple):
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    mappings: list[ParameterMapping]

    @property
    def size_bytes(self) -> int:
        """Bytes in the file, with the scales of an fp8 tensor."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return size + size // BLOCK if self.dtype == FP8 else size


def save_hf_checkpoint(
    decoder: Decoder,
    folder: str | Path,
    *,
    shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    whole: ParameterReader | None = None,
) -> None:
    """Write a decoder's weights and `config.json` into a folder, which is made if need be.

    `dtype` is bf16, fp16 or fp32, or None for the parameters' own. With `torch.float8_e4m3fn` the
    products of the layers are rounded to fp8 in blocks of 128×128, as DeepSeek-V3 stores them, and
    the rest is bf16.

    With `whole` the decoder only says which parameters the model has (one on `meta` is enough), and
    all ranks call this together; a rank to which `whole` gives None writes nothing.
    """
    if dtype is not None and dtype not in _WORDS:
        known = ", ".join(str(kind) for kind in _WORDS)
        raise InputError([Problem("dtype", f"{dtype} cannot be written", f"use one of {known}")])
    if decoder.model.vision is not None:
        what = f"a {decoder.model.family} checkpoint needs a vision tower, which a decoder lacks"
        fix = "give the decoder a model of the text part alone: its text family, vision=None"
        raise InputError([Problem("decoder.model.vision", what, fix)])
    if whole is None and any(parameter.is_meta for parameter in decoder.parameters()):
        raise InputError([Problem("decoder", "has no weights yet", "materialize or load it")])
    model = decoder.model if decoder.multi_token else replace(decoder.model, multi_token=None)
    config = _config(model, dtype or decoder.embedding.weight.dtype)
    planned = _plan(decoder, model, dtype)
    source = FullParameters(whole or dict(decoder.named_parameters()).__getitem__)
    writing = _Writing(Path(folder), list(_shards(planned, shard_bytes)))
    for number, shard in enumerate(writing.shards):
        tensors: dict[str, Tensor] = {}
        for item in shard:
            tensors |= _make(item, source)
        writing.write(number, tensors)
    writing.end(config)


def _config(model: Model, dtype: torch.dtype) -> dict[str, Any]:
    config = {**write_config(model), "dtype": _WORDS[dtype]}
    if dtype == FP8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    return config


def _plan(decoder: Decoder, model: Model, dtype: torch.dtype | None) -> list[OutputTensor]:
    family = get_weight_map(model)
    parameters = dict(decoder.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    planned: dict[str, OutputTensor] = {}
    for linked in (*map_all_parameters(family, model, shapes), *_repeated(family, model, shapes)):
        ours, link = linked
        kind = dtype or parameters[ours].dtype
        if ours.endswith(_KEPT):
            kind = torch.float32
        elif kind == FP8 and not _is_product(ours, link):
            kind = torch.bfloat16
        made = OutputTensor(link.checkpoint_name, link.shape, kind, [])
        planned.setdefault(link.checkpoint_name, made).mappings.append(linked)
    return list(planned.values())


def _is_product(ours: str, link: TensorMapping) -> bool:
    """Tell whether a matrix multiplies activations inside a layer, which fp8 is for."""
    inside = ours.startswith(("layers.", "multi_token."))
    return inside and len(link.shape) == 2 and not ours.endswith(_NOT_PRODUCTS)


def _repeated(
    family: WeightMap, model: Model, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[ParameterMapping]:
    """Yield the tables that each multi-token head stores once more."""
    for head in range(model.multi_token.depth if model.multi_token is not None else 0):
        for theirs, ours in family.mtp_duplicates.items():
            source = "embedding.weight" if ours not in shapes else ours
            name = family.format_layer_prefix(model.layers + head) + theirs
            yield ParameterMapping(
                source, TensorMapping(name, shapes[source], view_unchanged, view_unchanged)
            )


class FullParameters:
    """Whole parameters by name, of which those of one tensor of theirs are kept at a time."""

    def __init__(self, get: ParameterReader) -> None:
        self._get = get
        self._kept: dict[str, Tensor | None] = {}

    def read_parameters(self, names: Iterable[str]) -> dict[str, Tensor] | None:
        """Return these parameters; None where another rank has them."""
        wanted = dict.fromkeys(names)
        kept = {name: self._kept[name] for name in wanted if name in self._kept}
        self._kept = kept  # the others go before new ones come
        for name in wanted:
            if name not in kept:
                kept[name] = self._get(name)
        found = {name: tensor for name, tensor in kept.items() if tensor is not None}
        return found if len(found) == len(wanted) else None


class _Writing:
    """The files of one checkpoint, which appear together.

    What goes wrong is raised at the end, on the rank that writes: others still hand it parameters.
    """

    def __init__(self, folder: Path, shards: list[list[OutputTensor]]) -> None:
        self.folder, self.shards = folder, shards
        count = len(shards)
        self._names = [SINGLE_FILE]
        if count > 1:
            self._names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        self._homes: dict[str, str] = {}
        self._bytes = 0
        self._error: Exception | None = None

    def write(self, number: int, tensors: dict[str, Tensor]) -> None:
        """Write a shard; one without tensors is another rank's."""
        if not tensors or self._error is not None:
            return
        file = self._names[number]
        self._homes |= dict.fromkeys(tensors, file)
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_safetensors(tensors, self.folder / f".{file}", metadata={"format": "pt"})
        except Exception as error:  # noqa: BLE001 - raised once nobody waits for this rank
            self._error = error

    def end(self, config: Mapping[str, Any]) -> None:
        """Put the files in place of those that were there."""
        if self._error is not None:
            raise self._error
        if not self._homes:
            return
        _remove_others(self.folder)
        for file in self._names:
            (self.folder / f".{file}").replace(self.folder / file)
        if len(self._names) > 1:
            homes = dict(sorted(self._homes.items()))
            index = {"metadata": {"total_size": self._bytes}, "weight_map": homes}
            _write_json(self.folder / INDEX_FILE, index)
        _write_json(self.folder / CONFIG_FILE, config)


def _shards(planned: list[OutputTensor], shard_bytes: int) -> Iterator[list[OutputTensor]]:
    shard: list[OutputTensor] = []
    filled = 0
    for item in planned:
        if shard and filled + item.size_bytes > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(item)
        filled += item.size_bytes
    yield shard


@torch.no_grad()
def _make(item: OutputTensor, source: FullParameters) -> dict[str, Tensor]:
    """Put a tensor of theirs together from ours, with its scales where it has some.

    Nothing is made where another rank has ours.
    """
    parameters = source.read_parameters(linked.parameter_name for linked in item.mappings)
    if parameters is None:
        return {}
    kind = torch.float32 if item.dtype == FP8 else item.dtype
    made = torch.empty(item.shape, dtype=kind)
    for ours, link in item.mappings:
        link.view_checkpoint(made).copy_(link.view_parameter(parameters[ours]))
    if item.dtype != FP8:
        return {item.name: made}
    small, scale = quantize_fp8(made)
    return {item.name: small, f"{item.name}_scale_inv": scale}


def _remove_others(folder: Path) -> None:
    """Remove an older checkpoint's files: a reader would take them for part of this one."""
    for path in (
        folder / SINGLE_FILE,
        folder / INDEX_FILE,
        *folder.glob("model-*-of-*.safetensors"),
    ):
        path.unlink(missing_ok=True)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    written = path.with_name(f".{path.name}")
    written.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    written.replace(path)
