"""How Megatron-Core cuts a model into pipeline chunks.

An uneven split is one line, `Et*3|(t*4|)*14m|L`: E embedding, t layer, m multi-token head, L loss
(megatron/core/transformer/pipeline_parallel_layer_layout.py). Older switches that give the first
and the last stage their own counts are read too (`get_num_layers_to_build` in
megatron/core/transformer/transformer_block.py).
"""

import re
from itertools import groupby
from typing import Any

from meshwright.spec.bridge.framework_config import FrameworkConfig
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.layer_pattern import MAX_LAYERS
from meshwright.spec.model.model import Model
from meshwright.spec.serialization import format_value

SIZE = "pipeline_model_parallel_size"
VIRTUAL = "virtual_pipeline_model_parallel_size"
CHUNK_LAYERS = "num_layers_per_virtual_pipeline_stage"
LAYOUT = "pipeline_model_parallel_layout"
FIRST = "num_layers_in_first_pipeline_stage"
LAST = "num_layers_in_last_pipeline_stage"
COUNT_EMBEDDING = "account_for_embedding_in_pipeline_split"
COUNT_LOSS = "account_for_loss_in_pipeline_split"
PATTERN = "hybrid_layer_pattern"

SETTINGS = (
    SIZE, VIRTUAL, CHUNK_LAYERS, LAYOUT, FIRST, LAST, COUNT_EMBEDDING, COUNT_LOSS, PATTERN,
)  # fmt: skip

_LONG_NAMES = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def write_pipeline(layout: Layout, model: Model | None) -> dict[str, Any]:
    """Return the pipeline settings; a hybrid model's split is written into its layer pattern."""
    split = layout.stage_layers
    heads = model.multi_token.depth if model is not None and model.multi_token else 0
    return {
        SIZE: layout.pp,
        VIRTUAL: (layout.virtual_stages if layout.virtual_stages > 1 and split is None else None),
        LAYOUT: _line(split, heads) if split is not None else None,
    }


def _line(split: tuple[int, ...], heads: int) -> str:
    """Write chunk sizes as Megatron's layout line, equal neighbours as a repetition."""
    chunks = [f"t*{count}" if count > 1 else "t" * count for count in split]
    chunks[0] = "E" + chunks[0]
    chunks[-1] += "m" * heads + "L"
    parts = []
    for text, group in groupby(chunks[:-1]):
        times = len(list(group))
        parts.append(f"({text}|)*{times}" if times > 1 else f"{text}|")
    return "".join(parts) + chunks[-1]


def read_pipeline(settings: FrameworkConfig) -> dict[str, Any]:
    """Return `pp`, `virtual_stages` and `stage_layers`."""
    pp = settings.integer(SIZE, 1)
    chunks = _chunks(settings)
    if chunks is not None:
        return _from_chunks(settings, pp, chunks)
    virtual = settings.integer(VIRTUAL, 1)
    layers = settings.optional_integer("num_layers")
    virtual = _from_layers_per_chunk(settings, pp, virtual, layers)
    fields: dict[str, Any] = {"pp": pp, "virtual_stages": virtual}
    counted = (COUNT_EMBEDDING, COUNT_LOSS)
    uneven = [key for key in (FIRST, LAST) if settings.has(key)]
    uneven += [key for key in counted if settings.flag(key)]
    if uneven:
        if layers is None:
            settings.add_note(
                uneven[0], "splits the layers unevenly, and the number of layers is not given",
                f"give {settings.label('num_layers')} too",
            )  # fmt: skip
        elif pp * virtual <= MAX_LAYERS:
            split = _uneven(settings, pp, virtual, layers)
            fields["stage_layers"] = split
    return fields


def _from_layers_per_chunk(
    settings: FrameworkConfig, pp: int, virtual: int, layers: int | None
) -> int:
    each = settings.optional_integer(CHUNK_LAYERS)
    if each is None:
        return virtual
    if layers is None:
        settings.add_problem(
            CHUNK_LAYERS, "says nothing without the number of layers",
            f"give {settings.label('num_layers')} too",
        )  # fmt: skip
        return virtual
    layers += settings.flag(COUNT_EMBEDDING)
    layers += settings.flag(COUNT_LOSS)
    if layers % (pp * each):
        settings.add_problem(
            CHUNK_LAYERS, f"{each} does not cut {layers} layers over {pp} stages evenly",
            "use a divisor of the layers of a stage",
        )  # fmt: skip
        return virtual
    return max(1, layers // (pp * each))


def _uneven(
    settings: FrameworkConfig, pp: int, virtual: int, layers: int
) -> tuple[int, ...] | None:
    """Return chunk sizes where the first and last stage are smaller than the rest."""
    first = settings.optional_integer(FIRST)
    last = settings.optional_integer(LAST)
    if first is not None or last is not None:
        rest = pp - (first is not None) - (last is not None)
        left = layers - (first or 0) - (last or 0)
        if left < 0 or (rest > 0 and left % rest) or (rest <= 0 and left):
            settings.add_problem(
                FIRST if first else LAST,
                f"leaves {left} layers for {max(rest, 0)} stages", "make it divide evenly",
            )  # fmt: skip
            return None
        each = left // rest if rest > 0 else 0
        per_rank = [each] * pp
        if first is not None:
            per_rank[0] = first
        if last is not None:
            per_rank[-1] = last
        if any(count % virtual for count in per_rank):
            settings.add_problem(
                VIRTUAL,
                f"{virtual} chunks do not divide the layers per stage, {format_value(per_rank)}",
                "use a number that divides all of them",
            )
            return None
        return tuple(count // virtual for _ in range(virtual) for count in per_rank)
    embedding = settings.flag(COUNT_EMBEDDING)
    loss = settings.flag(COUNT_LOSS)
    total, chunks = layers + embedding + loss, pp * virtual
    if total % chunks:
        settings.add_problem(
            COUNT_EMBEDDING if embedding else COUNT_LOSS,
            f"{total} parts do not fill {chunks} chunks", f"use a divisor of {total}",
        )  # fmt: skip
        return None
    split = [total // chunks] * chunks
    split[0] -= embedding
    split[-1] -= loss
    if min(split) < 0:
        settings.add_problem(COUNT_EMBEDDING, "leaves a chunk without room for embedding and loss",
                       "use fewer stages")  # fmt: skip
        return None
    return tuple(split)


def _from_chunks(settings: FrameworkConfig, pp: int, chunks: tuple[int, ...]) -> dict[str, Any]:
    if len(chunks) % pp:
        settings.add_problem(SIZE, f"{pp} does not divide the {len(chunks)} chunks",
                       f"use a divisor of {len(chunks)}")  # fmt: skip
        return {"pp": pp}
    return {"pp": pp, "virtual_stages": len(chunks) // pp, "stage_layers": chunks}


def _chunks(settings: FrameworkConfig) -> tuple[int, ...] | None:
    """Return the explicit chunk sizes, None where the split is left to Megatron."""
    hybrid = settings.raw(PATTERN)
    if isinstance(hybrid, str) and "|" in hybrid.split("/")[0]:
        return tuple(len(part) for part in hybrid.split("/")[0].split("|"))
    value = settings.raw(LAYOUT)
    if value is None:
        return None
    text = _as_line(value)
    if text is None:
        settings.add_problem(LAYOUT, f"{format_value(value)} is not a pipeline layout",
                       "write it like Et*3|(t*4|)*14m|L")  # fmt: skip
        return None
    unrolled = _unroll(text)
    if unrolled is None or set(unrolled) - set("EtmL|"):
        settings.add_problem(
            LAYOUT,
            f"{format_value(value)} holds something other than E, t, m, L and |",
            "write it like Et*3|(t*4|)*14m|L",
        )
        return None
    return tuple(chunk.count("t") for chunk in unrolled.split("|"))


def _as_line(value: Any) -> str | None:
    """Return a layout as one line, also where it is given as a list of lists of names."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        return None
    chunks = []
    for chunk in value:
        if not isinstance(chunk, list | tuple):
            return None
        marks = [_LONG_NAMES.get(item, item) for item in chunk if isinstance(item, str)]
        if len(marks) != len(chunk):
            return None
        chunks.append("".join(marks))
    return "|".join(chunks)


def _unroll(text: str) -> str | None:
    """Write repetitions out, as Megatron does: `(ab|)*2` first, then `x*3`."""
    text = re.sub(r"[,\s]", "", text)
    for pattern in (r"\(([^()]+)\)\*(\d{1,5})", r"(.)\*(\d{1,5})"):
        size = sum(len(m[1]) * int(m[2]) for m in re.finditer(pattern, text))
        if size > 4 * MAX_LAYERS:
            return None
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    return text if len(text) <= 8 * MAX_LAYERS else None
