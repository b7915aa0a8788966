"""`mw models [NAME]`: the catalog of models, or one in full."""

import argparse
import json

from meshwright.cli.parser import add_common
from meshwright.cli.result import (
    CommandResult,
    FieldsView,
    NoteView,
    TextView,
    View,
    make_fields,
    make_table,
)
from meshwright.errors import InputError, Problem
from meshwright.spec import catalog
from meshwright.spec.field_checks import check_integer, raise_problems
from meshwright.spec.file_formats import dump
from meshwright.spec.job_spec import read_model
from meshwright.spec.model import (
    CONVENTIONS,
    AttentionSpec,
    BlockSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MLPSpec,
    Model,
    MoESpec,
    count_parameters,
    flops_per_token,
)
from meshwright.spec.model.huggingface import write_config
from meshwright.spec.serialization import encode
from meshwright.spec.units import format_count, format_flops, format_quantity, parse_count

EXAMPLES = (
    "mw models",
    "mw models llama3.1-8b --sequence-length 8192",
    "mw models qwen3-30b-a3b --as toml > mine.toml",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "name", nargs="?", metavar="NAME",
        help="catalog name, a TOML file, or a folder with config.json",
    )  # fmt: skip
    parser.add_argument("--find", metavar="TEXT", help="only names, titles, families with TEXT")
    parser.add_argument(
        "--sequence-length", metavar="N", default="4096",
        help="tokens per sequence for the FLOP counts (default: 4096)",
    )  # fmt: skip
    parser.add_argument(
        "--as", dest="form", choices=("toml", "json", "yaml", "hf"),
        help="print the description itself; hf is a Hugging Face config.json",
    )  # fmt: skip
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the list, or with one model."""
    if args.name is None:
        if args.form is not None:
            raise InputError([Problem("--as", "prints one model", "name it: mw models NAME --as")])
        return _list(args.find or "")
    model = read_model(args.name)
    if args.form is not None:
        return _written(model, args.form)
    length = parse_count(args.sequence_length, "--sequence-length")
    raise_problems(check_integer("--sequence-length", length))
    return _one(model, length)


def _list(find: str) -> CommandResult:
    rows, data = [], []
    for entry in catalog.list_models().values():
        model = entry.model
        words = f"{model.name} {entry.title} {model.family}".lower()
        if find.lower() not in words:
            continue
        counted = count_parameters(model)
        active = format_count(counted.active) if model.moe is not None else ""
        rows.append(
            (model.name, format_count(counted.total), active, model.layers, model.hidden,
             _context(model.max_positions), describe_kind(model))
        )  # fmt: skip
        data.append(
            {
                "name": model.name,
                "title": entry.title,
                "family": model.family,
                "parameters": counted.total,
                "active_parameters": counted.active,
                "layers": model.layers,
                "hidden": model.hidden,
                "kind": describe_kind(model),
                "max_positions": model.max_positions,
            }
        )
    view = make_table(
        "name, params, active, layers, hidden, context, kind", rows,
        right="params, active, layers, hidden, context", wide="kind",
    )  # fmt: skip
    if not rows:
        none = NoteView(f"no name, title or family holds {find!r}: mw models lists them all")
        return CommandResult("models/1", {"models": []}, (none,), (), 1)
    return CommandResult("models/1", {"models": data}, (view,), tuple(row[0] for row in rows))


def _context(positions: int) -> str:
    # Contexts are made in powers of two: 131072 reads better as 128Ki than as 131k.
    return f"{positions // 1024}Ki" if positions % 1024 == 0 else str(positions)


def describe_kind(model: Model) -> str:
    """Name what a model is made of in a few words."""
    words = []
    for block, _ in model.count_layers_by_block():
        match block.mixer:
            case AttentionSpec(heads=heads, kv_heads=kv, window=window, chunk=chunk):
                words.append("MHA" if heads == kv else "MQA" if kv == 1 else "GQA")
                words += ["window"] if window else ["chunk"] if chunk else []
            case LatentAttentionSpec():
                words.append("MLA")
            case Mamba2Spec():
                words.append("Mamba-2")
            case GatedDeltaNetSpec():
                words.append("gated delta")
        if isinstance(block.mlp, MoESpec):
            words.append("MoE")
    if model.vision is not None:
        words.append("vision")
    return " + ".join(dict.fromkeys(words))


def _written(model: Model, form: str) -> CommandResult:
    body = (
        json.dumps(write_config(model), indent=2) + "\n"
        if form == "hf"
        else dump(model, f".{form}")
    )
    return CommandResult("model/1", {"model": encode(model)}, (TextView(body),), (model.name,))


def _one(model: Model, length: int) -> CommandResult:
    counted = count_parameters(model)
    flops = {name: flops_per_token(model, length, name) for name in CONVENTIONS}
    listed = catalog.list_models().get(model.name)
    published = listed.published_parameters if listed is not None else None
    head = {
        "name": model.name,
        "title": listed.title if listed is not None else None,
        "family": model.family,
        "layers": f"{model.layers} ({model.pattern})",
        "hidden": model.hidden,
        "vocabulary": f"{model.vocab:,}{', tied head' if model.tied else ''}",
        "context": f"{model.max_positions:,} positions, {model.positions}",
        "norm": model.norm.kind,
        "published": f"{published:,} parameters ({listed.source})" if listed else None,
    }
    parts = {
        name: getattr(counted, name)
        for name in ("embedding", "mixer", "mlp", "router", "experts", "norms", "head", "vision")
    }
    rows = [(name, f"{n:,}", f"{n / counted.total:.1%}") for name, n in parts.items() if n]
    rows.append(("total", f"{counted.total:,}", "100.0%"))
    if counted.active != counted.total:
        rows.append(
            ("active per token", f"{counted.active:,}", f"{counted.active / counted.total:.1%}")
        )
    if counted.multi_token:
        rows.append(("multi-token heads, apart", f"{counted.multi_token:,}", ""))
    work = [(name, format_flops(value), _MEANING[name]) for name, value in flops.items()]
    data = {
        "model": encode(model),
        "parameters": {**parts, "multi_token": counted.multi_token, "total": counted.total,
                       "active": counted.active, "matmul": counted.matmul},
        "published_parameters": published,
        "sequence_length": length,
        "flops_per_token": flops,
    }  # fmt: skip
    views: tuple[View, ...] = (
        make_fields(head),
        *(_block(block, count) for block, count in model.count_layers_by_block()),
        make_table("parameters, count, share", rows, right="count, share"),
        make_table("convention, per token, what it counts", work,
              f"training FLOPs at {length:,} tokens, forward and backward",
              right="per token", wide="what it counts"),
    )  # fmt: skip
    return CommandResult("model/1", data, views, (str(counted.total),))


def _block(block: BlockSpec, layers: int) -> FieldsView:
    pairs: dict[str, object] = {}
    for name, part in (("mixer", block.mixer), ("mlp", block.mlp)):
        if part is None:
            continue
        shown = {key: value for key, value in encode(part).items() if key != "kind"}
        rotary = shown.pop("rotary", None)
        kind = part.__struct_config__.tag
        words = [f"{key.replace('_', ' ')} {value}" for key, value in shown.items()]
        if rotary is not None:
            words.append(f"rotary theta {rotary.get('theta', 10000.0):g}")
        pairs[name] = f"{kind}: {', '.join(words)}"
    if isinstance(block.mlp, MLPSpec | MoESpec) and block.norms != "pre":
        pairs["norms"] = block.norms
    return make_fields(pairs, f"block {block.name}, {format_quantity(layers, 'layer')}")


_MEANING = {
    "exact": "matrix products and visible attention; head in, embedding out",
    "6N": "six per weight a token meets, no attention",
    "palm": "6N + full attention square (PaLM, torchtitan, llm-foundry)",
    "megatron": "6N + half the square (Megatron-Core since 2024)",
    "sc21": "palm × 4/3, full recompute counted (Narayanan 2021, BLOOM)",
}
