"""FSDP2: PyTorch's `fully_shard`, as a Python snippet.

The snippet builds the device mesh, wraps each block and the model, and names the optimizer; it is
what `fully_shard`'s documentation asks for (torch 2.13: arguments mesh, reshard_after_forward,
mp_policy, offload_policy). Sharding covers the `dp_shard` and `cp` dimensions of the mesh, and
`dp_replicate` repeats it. Read are such snippets (never run) and Accelerate's YAML.
"""

import ast
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.spec.bridge.export_report import fill_global_batch, format_header, list_lost_fields
from meshwright.spec.bridge.format_detection import (
    ExpectedFormat,
    build_format_error,
    detect_format,
    require_flat,
    require_known_keys,
)
from meshwright.spec.bridge.framework_bridge import ExportedConfig, ImportedConfig
from meshwright.spec.bridge.framework_config import FrameworkConfig, classify_unread
from meshwright.spec.bridge.fsdp2 import accelerate, fully_shard_config
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model import Model

TITLE = "FSDP2 settings"
EXPECTED_FORMAT = ExpectedFormat(
    "fsdp2",
    "FSDP2 settings",
    "give the lines with init_device_mesh and fully_shard, or Accelerate's YAML",
)
_NOTHING = re.compile(r"(?!)")
_ROTATE_HOME = "torch.distributed.tensor.experimental._attention"


def export_config(
    layout: Layout,
    model: Model | None = None,
    *,
    sequence_length: int | None = None,
    global_batch: int | None = None,
) -> ExportedConfig:
    """Return a snippet to put where the model is built."""
    layout = fill_global_batch(layout, global_batch)
    data = fully_shard_config.write_fully_shard(layout)
    body = _text(data)
    back = import_config(body)
    unexpressed = list_lost_fields(
        back, layout, model, sequence_length, title=TITLE, reasons=fully_shard_config.REASONS
    )
    text = "\n".join([*format_header(layout, unexpressed, ()), body])
    return ExportedConfig(text=text, data=data, unexpressed=unexpressed)


def _text(data: dict[str, Any]) -> str:
    """Write the settings as a snippet."""
    names = data["mesh_dim_names"]
    context = "cp" in names and data["mesh"][names.index("cp")] > 1
    sharded = "dp_shard_cp" if context else "dp_shard"
    picked = ["dp_replicate", sharded] if "dp_replicate" in names else [sharded]
    used = ["CPUOffloadPolicy"] * data["offload"] + ["MixedPrecisionPolicy", "fully_shard"]
    mesh = "mesh"
    lines = [
        "import torch",
        *["from torch.distributed._composable import checkpoint"] * data["checkpoint"],
        "from torch.distributed.device_mesh import init_device_mesh",
        f"from torch.distributed.fsdp import {', '.join(used)}",
        *[f"from {_ROTATE_HOME} import set_rotate_method"] * context,
        "",
        *_mesh_lines("mesh", data["mesh"], names),
    ]
    if context:
        at = names.index("dp_shard")
        sizes = data["mesh"]
        joined = [*sizes[:at], sizes[at] * sizes[at + 1], *sizes[at + 2 :]]
        lines += _mesh_lines("shards", joined, [*names[:at], "dp_shard_cp", *names[at + 2 :]])
        lines.append(f'set_rotate_method("{data["rotate"]}")')
        mesh = "shards"
    policy = f"param_dtype={data['param_dtype']}, reduce_dtype={data['reduce_dtype']}"
    lines += [
        "settings = dict(",
        f"    mesh={mesh}[{', '.join(_quote(name) for name in picked)}],",
        f"    reshard_after_forward={data['reshard_after_forward']},",
        f"    mp_policy=MixedPrecisionPolicy({policy}),",
        *["    offload_policy=CPUOffloadPolicy(),"] * data["offload"],
        ")",
        f"model = model.to({data['stored']})",
        "for block in model.layers:",
        *["    checkpoint(block)"] * data["checkpoint"],
        "    fully_shard(block, **settings)",
        "fully_shard(model, **settings)",
        "# learning_rate is yours to set: no layout decides it.",
        f"optimizer = torch.optim.{data['optimizer']}(model.parameters(), lr=learning_rate)",
        f"local_batch_size = {data['local_batch_size']}",
    ]
    if "gradient_accumulation_steps" in data:
        lines.append(f"gradient_accumulation_steps = {data['gradient_accumulation_steps']}")
    return "\n".join(lines) + "\n"


def _mesh_lines(variable: str, sizes: list[int], names: list[str]) -> list[str]:
    return [
        f"{variable} = init_device_mesh(",
        f'    "cuda", {tuple(sizes)}, mesh_dim_names={_quoted(names)}',
        ")",
    ]


def _quote(name: str) -> str:
    return f'"{name}"'


def _quoted(names: list[str]) -> str:
    inside = ", ".join(map(_quote, names))
    return f"({inside},)" if len(names) == 1 else f"({inside})"


def import_config(
    given: str | Mapping[str, Any],
    *,
    gpus: int | None = None,
    name: str = "imported",
    vocab: int | None = None,
) -> ImportedConfig:
    """Read a snippet, its settings as data, or Accelerate's YAML; none of them holds a model."""
    del name, vocab
    if accelerate.is_accelerate_config(given):
        return accelerate.import_config(given, gpus=gpus)
    require_flat(given, EXPECTED_FORMAT)
    values = dict(given) if isinstance(given, Mapping) else _values(given)
    settings = FrameworkConfig(values, fully_shard_config.KEYS)
    found = classify_unread(values, settings, _NOTHING, "setting of a snippet")
    require_known_keys(given, sum(key in settings.known for key in values), found, EXPECTED_FORMAT)
    layout = fully_shard_config.read_fully_shard(settings, gpus)
    return ImportedConfig(layout=layout, unknown=tuple(settings.notes))


def _values(text: str) -> dict[str, Any]:
    """Return the settings that a snippet writes down, without running it."""
    try:
        tree = ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        kind = detect_format(text)
        if kind is not None and kind.target != EXPECTED_FORMAT.target:
            raise build_format_error(text, EXPECTED_FORMAT) from None
        line = getattr(error, "lineno", None)
        where, what = f"line {line}" if line else "", "is neither Python nor Accelerate's YAML"
        raise InputError([Problem(where, what, EXPECTED_FORMAT.hint)]) from None
    values: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _call(node, values)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            target = node.targets[0].id
            if target in {"local_batch_size", "gradient_accumulation_steps"}:
                values[target] = _literal(node.value)
    if "mesh" not in values and "reshard_after_forward" not in values and "shards" not in values:
        raise build_format_error(text, EXPECTED_FORMAT)
    values.pop("shards", None)
    return values


def _call(node: ast.Call, values: dict[str, Any]) -> None:
    name = ast.unparse(node.func).rpartition(".")[2] if _short(node.func) else ""
    words = {word.arg: word.value for word in node.keywords if word.arg}
    if name == "init_device_mesh" and "mesh" not in values:
        sizes = node.args[1] if len(node.args) > 1 else words.get("mesh_shape")
        values["mesh"] = _literal(sizes)
        values["mesh_dim_names"] = _literal(words.get("mesh_dim_names"))
    elif name in {"fully_shard", "dict"}:
        values |= {"shards": True} if name == "fully_shard" else {}
        if "reshard_after_forward" in words:
            values["reshard_after_forward"] = _literal(words["reshard_after_forward"])
        if "offload_policy" in words:
            values["offload"] = "CPUOffloadPolicy" in ast.unparse(words["offload_policy"])
    elif name == "MixedPrecisionPolicy":
        for key in ("param_dtype", "reduce_dtype"):
            if key in words:
                values[key] = _literal(words[key])
    elif (
        name == "to"
        and node.args
        and str(_literal(node.args[0])) in fully_shard_config.LAYOUT_DTYPES
    ):
        values["stored"] = _literal(node.args[0])
    elif name in {"checkpoint", "checkpoint_wrapper", "apply_activation_checkpointing"}:
        values["checkpoint"] = True
    elif name == "set_rotate_method" and node.args:
        values["rotate"] = _literal(node.args[0])
    elif ast.unparse(node.func).startswith("torch.optim."):
        values["optimizer"] = name


def _short(node: ast.expr) -> bool:
    """Tell whether the called thing is a plain dotted name, which is quick to print."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _literal(node: ast.expr | None) -> Any:
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ast.unparse(node) if _short(node) else "?"
