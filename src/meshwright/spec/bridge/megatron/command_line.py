"""Megatron-LM's command-line flags.

Flags and defaults are those of megatron/training/arguments.py in the Megatron-LM repository,
August 2026 (table in `flags`); what the settings mean is in `mcore`. The number of
processes is the launcher's affair there: it is read from `torchrun`'s flags or from a
`WORLD_SIZE=` in the text, and stands in the first comment of an export.
"""

import shlex
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
from meshwright.spec.bridge.mcore import layout_config, model_config
from meshwright.spec.bridge.megatron import flags as megatron_flags
from meshwright.spec.bridge.shell import CommandLine, parse_command_line
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model import Model

TITLE = "Megatron-LM flags"
EXPECTED_FORMAT = ExpectedFormat(
    "megatron", TITLE, "give Megatron-LM's --flags, or the script that has them"
)
LINE_WIDTH = 96

_FLAG_OF = {flag.setting: flag.name for flag in reversed(megatron_flags.FLAGS)}
_BY_NAME = {flag.name: flag for flag in megatron_flags.FLAGS}
_KNOWN = (*layout_config.SETTINGS, *(flag.setting for flag in megatron_flags.FLAGS))


def export_config(
    layout: Layout,
    model: Model | None = None,
    *,
    sequence_length: int | None = None,
    global_batch: int | None = None,
) -> ExportedConfig:
    """Return flags that can be pasted behind `pretrain_gpt.py`."""
    layout = fill_global_batch(layout, global_batch)
    settings = layout_config.write_layout(layout, model, sequence_length)
    groups = _grouped(settings, layout)
    flags = [line for lines in groups.values() for line in lines]
    body = _written(groups)
    world = f"WORLD_SIZE={layout.gpus}\n"
    back = import_config(f"# {world}{body}")
    meant = layout_config.with_offload(layout, model)
    unexpressed = list_lost_fields(
        back, meant, model, sequence_length, title=TITLE, reasons=layout_config.REASONS
    )
    assumed = layout_config.list_assumptions(layout, settings)
    head = [*format_header(layout, unexpressed, assumed), *_environment(settings)]
    head[0] = head[0].replace(" (", f", {world.strip()} (", 1)
    data = {line.partition(" ")[0]: line.partition(" ")[2] or True for line in flags}
    return ExportedConfig(
        text="\n".join([*head, body]), data=data, unexpressed=unexpressed, assumed=assumed
    )


def _environment(settings: dict[str, Any]) -> list[str]:
    """Say what Megatron asks of the environment (megatron/training/arguments.py)."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    degrees = (settings["tensor_model_parallel_size"], settings["context_parallel_size"])
    split = max(degrees) > 1
    if settings["use_megatron_fsdp"]:
        return [f"# Leave {name} unset: Megatron-FSDP refuses 1."]
    if settings["overlap_moe_expert_parallel_comm"]:
        larger = f"# Set {name} above 1, such as 32, to hide the experts' all-to-all"
        return [f"{larger}; 1 favours tp and cp on Hopper and earlier." if split else f"{larger}."]
    if split:
        return [f"# On Hopper and earlier: export {name}=1, or Megatron refuses tp and cp."]
    return []


def _grouped(settings: dict[str, Any], layout: Layout) -> dict[str, list[str]]:
    """Return the flags under their headings, those that repeat Megatron's defaults left out."""
    values = dict(settings)
    values |= _activation_switches(values)
    if values.get("activation_func") == "fast_gelu" and not values["gated_linear_unit"]:
        values["bias_activation_fusion"] = None  # the fused GELU is the tanh form
    in_fp32 = values.pop("grad_reduce_in_fp32", None)
    if in_fp32 is not None and in_fp32 == (layout.precision == "fp16"):
        # bf16 accumulates in fp32 by itself, fp16 does not.
        values["grad_reduce_in_fp32"] = in_fp32
    groups: dict[str, list[str]] = {}
    for flag in megatron_flags.FLAGS:
        value = values.get(flag.setting)
        if value is None or flag.name in megatron_flags.READ_ONLY:
            continue
        line = _line(flag, value)
        if line is not None:
            groups.setdefault(flag.group, []).append(line)
    return groups


def _activation_switches(settings: dict[str, Any]) -> dict[str, Any]:
    pair = (settings.get("activation_func"), settings.get("gated_linear_unit"))
    return {name: pair == wanted for name, wanted in megatron_flags.ACTIVATIONS.items()}


def _line(flag: megatron_flags.MegatronFlag, value: Any) -> str | None:
    if flag.form in {"on", "off"}:
        return flag.name if value is (flag.form == "on") else None
    if value == flag.default:
        return None
    if flag.setting == "window_size":
        value = ",".join(map(str, value))
    if flag.setting == "rotary_base":
        value = round(value)  # the flag takes whole numbers only
    words = [_text(word) for word in (value if isinstance(value, list | tuple) else [value])]
    if words[0].startswith("-"):
        return shlex.quote(f"{flag.name}={words[0]}")
    return " ".join([flag.name, *map(shlex.quote, words)])


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _written(groups: dict[str, list[str]]) -> str:
    """Write each group on lines of its own, all but the last ending in a backslash."""
    rows: list[str] = []
    for flags in groups.values():
        rows.append("")
        for flag in flags:
            if rows[-1] and len(rows[-1]) + len(flag) > LINE_WIDTH:
                rows.append("")
            rows[-1] += f" {flag}" if rows[-1] else flag
    return " \\\n".join(rows) + "\n"


def import_config(
    given: str | Mapping[str, Any],
    *,
    gpus: int | None = None,
    name: str = "imported",
    vocab: int | None = None,
) -> ImportedConfig:
    """Read flags, a launch line or a whole script."""
    command = _command(given)
    values, problems = _values(command)
    settings = FrameworkConfig(values, _KNOWN, label=lambda key: _FLAG_OF.get(key, key))
    settings.problems += problems
    for flag, says in megatron_flags.NOTED.items():
        if flag in command.flags:
            settings.notes.append(Problem(flag, f"{says}: cannot be held by a layout or a model"))
    others = [
        key for key in values if key not in settings.known and key not in megatron_flags.NOTED
    ]
    launcher = [key for key in others if megatron_flags.LAUNCHER.fullmatch(key)]
    others = [key for key in others if key not in launcher]
    found = classify_unread(others, settings, megatron_flags.IGNORED, "Megatron-LM flag")
    own = len(command.flags) - len(launcher) - found.unknown - found.mistyped
    require_known_keys(given, own, found, EXPECTED_FORMAT)
    layout = layout_config.read_mcore_layout(
        settings, gpus if gpus is not None else _world(command)
    )
    model = model_config.read_model(settings, layout.tp, name, vocab)
    length = settings.optional_integer("seq_length")
    settings.raise_problems()
    return ImportedConfig(
        layout=layout,
        model=model,
        sequence_length=length,
        ignored=tuple(sorted([*found.ignored, *launcher])),
        unknown=tuple(settings.notes),
    )


def _command(given: str | Mapping[str, Any]) -> CommandLine:
    """Return the flags of a text or a megatron_flags."""
    if not isinstance(given, str):
        require_flat(given, EXPECTED_FORMAT)
        return _from_data(given)
    try:
        command = parse_command_line(given)
    except InputError:
        kind = detect_format(given)
        if kind is not None and kind.target != EXPECTED_FORMAT.target:
            raise build_format_error(given, EXPECTED_FORMAT) from None
        raise
    if not command.flags:
        raise build_format_error(given, EXPECTED_FORMAT)
    return command


def _from_data(given: Mapping[str, Any]) -> CommandLine:
    """Take flags as a table, `{"--bf16": True, "--micro-batch-size": 1}`."""
    flags: dict[str, list[str]] = {}
    for key, value in given.items():
        if value is None or value is False:
            continue
        words = value if isinstance(value, list | tuple) else [] if value is True else [value]
        name = str(key) if str(key).startswith("--") else f"--{key}"
        flags[name] = [str(word) for word in words]
    return CommandLine(flags, {})


def _values(command: CommandLine) -> tuple[dict[str, Any], list[Problem]]:
    """Return settings by name; flags that are not in the table keep their own."""
    values: dict[str, Any] = {}
    problems = []
    for name, words in command.flags.items():
        flag = _BY_NAME.get(name)
        if flag is None:
            values[name] = words
        elif flag.form in {"on", "off"}:
            values[flag.setting] = flag.form == "on"
        elif not words:
            problems.append(Problem(name, "needs a value and has none", "write one behind it"))
        elif words[0].startswith("$"):
            problems.append(
                Problem(name, f"its value is {words[0]}, which the text does not set",
                        "write the value itself")
            )  # fmt: skip
        else:
            values[flag.setting] = words if flag.form == "words" else words[0]
    for switch, (function, gated) in megatron_flags.ACTIVATIONS.items():
        if values.get(switch):
            values |= {"activation_func": function, "gated_linear_unit": gated}
    fused = values.get("bias_activation_fusion", True) and values.get("add_bias_linear", True)
    values.setdefault("activation_func", "fast_gelu" if fused else "gelu")
    # Grouped keys and values need the switch: without it Megatron does not look at the groups.
    values.setdefault("group_query_attention", False)
    return values, problems


def _world(command: CommandLine) -> int | None:
    """Return the number of processes the text starts, None where it does not say."""
    found: dict[str, int] = {}
    for name, words in command.flags.items():
        key = name.replace("_", "-")
        if key in {"--nproc-per-node", "--nnodes"} and words and words[0].isdecimal():
            found[key] = int(words[0][:9])
    if "--nproc-per-node" in found:
        return found["--nproc-per-node"] * found.get("--nnodes", 1)
    world = command.variables.get("WORLD_SIZE", "")
    return int(world) or None if world.isdecimal() and len(world) < 10 else None
