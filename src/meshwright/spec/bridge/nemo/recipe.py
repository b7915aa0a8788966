"""NeMo's Megatron-Bridge: recipe fields, as a YAML file of overrides.

The fields are in `fields`, what they mean in `mcore`. Every field that a layout decides is
written, also where it is off, because the file overrides a recipe that may have it on. Read are
such files, `run_config.yaml`, Hydra-style `section.field=value` words and the assignments of a
recipe function (`cfg.model.tensor_model_parallel_size = 8`); a field that is absent has the value
of the common pretraining recipe. Older configurations, of NeMo 1 and 2, go through `legacy_config`.
"""

import ast
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from meshwright.errors import Problem
from meshwright.spec.bridge.export_report import (
    Reasons,
    convert_tuples_to_lists,
    fill_global_batch,
    format_header,
    list_lost_fields,
)
from meshwright.spec.bridge.format_detection import ExpectedFormat, read_table, require_known_keys
from meshwright.spec.bridge.framework_bridge import ExportedConfig, ImportedConfig
from meshwright.spec.bridge.framework_config import (
    FrameworkConfig,
    UnreadKeys,
    classify_unread,
    flatten,
    unflatten,
)
from meshwright.spec.bridge.mcore import layer_frequency, layout_config, model_config
from meshwright.spec.bridge.megatron.flags import NOTED
from meshwright.spec.bridge.nemo import legacy_config, recipe_fields
from meshwright.spec.file_formats import dump_data
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model import Model
from meshwright.spec.name_suggestions import find_closest_names
from meshwright.spec.serialization import format_value

TITLE = "Megatron-Bridge recipe fields"
EXPECTED_FORMAT = ExpectedFormat(
    "nemo",
    "NeMo or Megatron-Bridge settings",
    "give YAML, section.field=value words, or cfg.section.field = value lines",
)

REASONS: Reasons = {
    **layout_config.REASONS,
    "max_positions": (
        "a recipe has one sequence length for model and data", "export with that length"),
}  # fmt: skip

_DTYPES = {
    "fp32": "torch.float32",
    "fp16": "torch.float16",
    "bf16": "torch.bfloat16",
    "fp8": "torch.uint8",
}
_SECTION = (
    r"(?:model|train|ddp|optimizer|dist|dataset|checkpoint|mixed_precision|comm_overlap|"
    r"trainer|data|optim)(?:\.\w+)*"
)
_BUILT = frozenset(
    {"mixed_precision", "comm_overlap", "trainer.strategy", "trainer.strategy.ddp", "data"}
)
"""Sections that a line may build by a call whose keywords are their fields."""
_ASSIGNED = re.compile(rf"(?m)^[ \t]*\w+\.({_SECTION})[ \t]*=[ \t]*([^=\n][^\n]*)$")
_HYDRA = re.compile(rf"(?:^|\s)\+{{0,2}}({_SECTION})=(\[[^\]]*\]|[^\s\\]+)")


def export_config(
    layout: Layout,
    model: Model | None = None,
    *,
    sequence_length: int | None = None,
    global_batch: int | None = None,
) -> ExportedConfig:
    """Return a YAML file that overrides a recipe."""
    layout = fill_global_batch(layout, global_batch)
    settings = layout_config.write_layout(layout, model, sequence_length)
    data = convert_tuples_to_lists(unflatten(_fields(settings, layout)))
    body = dump_data(data, ".yaml")
    back = import_config(body, gpus=layout.gpus)
    meant = layout_config.with_offload(layout, model)
    unexpressed = list_lost_fields(
        back, meant, model, sequence_length, title=TITLE, reasons=REASONS
    )
    assumed = layout_config.list_assumptions(layout, settings)
    text = "\n".join([*format_header(layout, unexpressed, assumed), body])
    return ExportedConfig(text=text, data=data, unexpressed=unexpressed, assumed=assumed)


def _fields(settings: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Return the recipe's fields by dotted path."""
    values = dict(settings)
    overlap = bool(values["overlap_p2p_comm"]) and layout.pp > 1
    values |= {
        "overlap_p2p_comm": overlap,
        "num_distributed_optimizer_instances": values["num_distributed_optimizer_instances"] or 1,
        "data_parallel_sharding_strategy": values["data_parallel_sharding_strategy"] or "no_shard",
        "ckpt_format": values["ckpt_format"] or "torch_dist",
        "cpu_offloading_num_layers": values["cpu_offloading_num_layers"] or 0,
        "max_position_embeddings": values["seq_length"] or values.get("max_position_embeddings"),
    }
    if "vocab_size" in values:
        values["pad_vocab"] = values["vocab_size"] % layout.tp > 0
        values["moe_layer_freq"] = values.get("moe_layer_freq") or 1
    for name in recipe_fields.LISTS:
        if isinstance(values.get(name), str):
            values[name] = layer_frequency.read_frequency(values[name], name)
    for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        values[name] = _DTYPES[values[name]]
    latent = values.get("multi_latent_attention")
    precise = recipe_fields.PATHS["bf16"].partition(".")[0]
    fields: dict[str, Any] = {}
    for name, value in values.items():
        path = recipe_fields.PATHS.get(name)
        if path is None or path.startswith(f"{precise}."):
            continue
        if value is None and name not in recipe_fields.NULLABLE:
            continue
        path = path if latent else recipe_fields.YARN_PATHS.get(name, path)
        fields[path] = not value if name in recipe_fields.INVERTED else value
    fields |= {
        "model.batch_p2p_comm": layout.pp > 1 and not overlap,
        "model.cpu_offloading": values["cpu_offloading_num_layers"] > 0,
        "optimizer.use_distributed_optimizer": values["use_distributed_optimizer"],
        # Otherwise a recipe's overlap section would decide over the fields above.
        "comm_overlap": None,
    }
    return fields | _mixed_precision(values, layout)


def _mixed_precision(values: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Return a named precision where one says it all, its fields otherwise."""
    names = ("bf16", "fp16", "fp8", "fp8_recipe", "fp4", "fp4_recipe")
    wanted = {name: values[name] for name in names if values[name]}
    if not wanted:
        return {"mixed_precision": None, "ddp.grad_reduce_in_fp32": True}
    in_fp32 = values["grad_reduce_in_fp32"]
    for recipe, says in recipe_fields.RECIPES.items():
        usual = says.get("grad_reduce_in_fp32", True)
        kept = {key: value for key, value in says.items() if key not in {"grad_reduce_in_fp32"}}
        if usual == in_fp32 and kept == wanted:
            return {"mixed_precision": recipe}
    dtype = "torch.float16" if layout.precision == "fp16" else "torch.bfloat16"
    spelled = {
        "_target_": recipe_fields.MIXED_PRECISION,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "grad_reduce_in_fp32": in_fp32,
        **wanted,
    }
    return {f"mixed_precision.{key}": value for key, value in spelled.items()}


def import_config(
    given: str | Mapping[str, Any],
    *,
    gpus: int | None = None,
    name: str = "imported",
    vocab: int | None = None,
) -> ImportedConfig:
    """Read a file of overrides, a saved configuration, Hydra words or a recipe function.

    Configurations of NeMo 1 and NeMo 2 are read as well.
    """
    flat = flatten(given if isinstance(given, Mapping) else _data(given))
    own = sum(path in _READ or path in legacy_config.RENAMED for path in flat)
    old = legacy_config.convert_legacy(flat) if legacy_config.is_legacy(flat) else None
    origin = old.origin if old is not None else {}
    flat = old.flat if old is not None else flat
    settings = FrameworkConfig(
        _values(flat),
        layout_config.SETTINGS,
        label=lambda key: origin.get(
            recipe_fields.PATHS.get(key, key), recipe_fields.PATHS.get(key, key)
        ),
    )
    _precision(flat, settings)
    if old is not None:
        settings.notes += old.notes
        gpus = gpus if gpus is not None else old.gpus
    found = _sort_out(flat, settings, old is not None)
    require_known_keys(given, own, found, EXPECTED_FORMAT)
    layout = layout_config.read_mcore_layout(settings, gpus)
    model = model_config.read_model(settings, layout.tp, name, vocab)
    length = settings.optional_integer("seq_length") or settings.optional_integer(
        "max_position_embeddings"
    )
    settings.raise_problems()
    return ImportedConfig(
        layout=layout,
        model=model,
        sequence_length=length,
        ignored=found.ignored,
        unknown=tuple(settings.notes),
    )


_READ = frozenset(
    {
        *recipe_fields.PATHS.values(),
        *recipe_fields.YARN_PATHS.values(),
        *recipe_fields.OVERLAP_PATHS.values(),
        "mixed_precision",
        "optimizer.use_distributed_optimizer",
        "model.bf16",
        "model.fp16",
    }
)
"""Fields that are read."""


def _sort_out(flat: Mapping[str, Any], settings: FrameworkConfig, old: bool) -> UnreadKeys:
    """Sort the fields that are not read, and note those that neither layout nor model can hold."""
    for flag, says in NOTED.items():
        path = "model." + flag.strip("-").replace("-", "_")
        if flat.get(path):
            settings.notes.append(Problem(path, f"{says}: cannot be held"))
    others = [path for path in flat if path not in _READ]
    if not old:
        return classify_unread(
            others,
            settings,
            recipe_fields.IGNORED,
            "recipe field",
            cutoff=0.9,
            real=recipe_fields.NEIGHBOURS,
        )
    others = [path for path in others if path not in legacy_config.READ_FIELDS]
    ignore = re.compile(f"{recipe_fields.IGNORED.pattern}|{legacy_config.IGNORED.pattern}")
    real = recipe_fields.NEIGHBOURS | legacy_config.NEIGHBOURS
    return classify_unread(
        others, settings, ignore, "NeMo field", cutoff=0.9, real=real, also=legacy_config.RENAMED
    )


def _values(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by name, the recipe's own values where a field is absent."""
    values: dict[str, Any] = dict(recipe_fields.RECIPE_DEFAULTS)
    for name, path in recipe_fields.PATHS.items():
        if path in flat:
            value = flat[path]
            values[name] = (
                not value if name in recipe_fields.INVERTED and value is not None else value
            )
    for paths in (recipe_fields.YARN_PATHS, recipe_fields.OVERLAP_PATHS):
        for name, path in paths.items():
            if flat.get(path) is not None:
                values[name] = flat[path]
    if flat.get("optimizer.use_distributed_optimizer"):
        values["use_distributed_optimizer"] = True
    values.setdefault("pad_vocab", False)
    if not any(path.startswith("comm_overlap.") for path in flat):
        values.setdefault("overlap_p2p_comm", False)  # Megatron-Core's own default
    window = values.get("window_size")
    if isinstance(window, list | tuple):
        values["window_size"] = ",".join(str(part) for part in window)
    return values


def _precision(flat: Mapping[str, Any], settings: FrameworkConfig) -> None:
    """Turn the precision section, named or spelled out, into settings."""
    named = flat.get("mixed_precision")
    says: dict[str, Any] = {}
    if isinstance(named, str):
        recipe = named.replace("-", "_")
        if recipe not in recipe_fields.RECIPES:
            choices = ", ".join(recipe_fields.RECIPES)
            close = find_closest_names(recipe, recipe_fields.RECIPES)
            fix = f"did you mean {close[0]}?" if close else "use bf16_mixed"
            settings.problems.append(
                Problem("mixed_precision", f"{format_value(named)} is not one of {choices}", fix)
            )
        says = dict(recipe_fields.RECIPES.get(recipe, {}))
    elif any(path.startswith("mixed_precision.") for path in flat):
        prefix = "mixed_precision."
        says = {k.removeprefix(prefix): v for k, v in flat.items() if k.startswith(prefix)}
    elif "mixed_precision" not in flat:
        says = {"bf16": flat.get("model.bf16", not flat.get("model.fp16"))}
        says["fp16"] = flat.get("model.fp16")
    if says.get("first_last_layers_bf16"):
        settings.notes.append(
            Problem("mixed_precision", "the first and last layers stay in bf16: cannot be held")
        )
    settings.add_implied({key: value for key, value in says.items() if key in _SAYS})


_SAYS = ("bf16", "fp16", "fp8", "fp8_recipe", "fp4", "fp4_recipe", "grad_reduce_in_fp32")


def _data(text: str) -> Mapping[str, Any]:
    """Return the fields of a text in any of the forms that recipes come in."""
    if _ASSIGNED.search(text):
        return _assignments(text)
    hydra = _HYDRA.findall(text)
    if hydra and ": " not in text:
        return {path: _literal(value) for path, value in hydra}
    return read_table(text, ".yaml", "recipe", EXPECTED_FORMAT)


def _assignments(text: str) -> dict[str, Any]:
    """Return what the lines of a recipe function set, without running it."""
    try:
        tree = ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return {path: _literal(value) for path, value in _ASSIGNED.findall(text)}
    fields: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        path = ast.unparse(node.targets[0]).partition(".")[2]
        if not re.fullmatch(_SECTION, path):
            continue
        if isinstance(node.value, ast.Call) and path in _BUILT:
            made = {f"{path}.{word.arg}": word.value for word in node.value.keywords if word.arg}
            fields |= {key: _literal(ast.unparse(value)) for key, value in made.items()}
            if not made:
                fields[path] = ast.unparse(node.value.func).rpartition(".")[2]
        elif path != "model":  # a whole provider, which only code can build
            fields[path] = _literal(ast.unparse(node.value))
    return fields


def _literal(text: str) -> Any:
    """Read the right-hand side of an assignment without running it."""
    text = re.sub(r"\s+#.*$", "", text).strip()
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
