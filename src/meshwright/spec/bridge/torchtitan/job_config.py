"""torchtitan's TOML job files.

The keys are those of torchtitan 0.2.2 (February 2026), the last release that reads TOML; later ones
take the same names in Python, and the two keys that they added for sequence and async tensor
parallelism are read as well. Architectures are flavors in torchtitan's code: a model is written as
a flavor where one has its shape. Read are TOML files and `--section.key value` words.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.spec.bridge.export_report import (
    convert_tuples_to_lists,
    fill_global_batch,
    format_header,
    list_lost_fields,
)
from meshwright.spec.bridge.format_detection import ExpectedFormat, read_table, require_known_keys
from meshwright.spec.bridge.framework_bridge import ExportedConfig, ImportedConfig
from meshwright.spec.bridge.framework_config import (
    FrameworkConfig,
    classify_unread,
    flatten,
    unflatten,
)
from meshwright.spec.bridge.shell import parse_command_line
from meshwright.spec.bridge.torchtitan import job_keys, parallelism
from meshwright.spec.bridge.torchtitan.flavors import find_flavor, get_flavor_model
from meshwright.spec.file_formats import dump_data
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model import Model

TITLE = "torchtitan TOML"
EXPECTED_FORMAT = ExpectedFormat(
    "torchtitan", "torchtitan settings", "give a job file in TOML, or --section.key value words"
)


def export_config(
    layout: Layout,
    model: Model | None = None,
    *,
    sequence_length: int | None = None,
    global_batch: int | None = None,
) -> ExportedConfig:
    """Return the sections of a job file that a layout decides."""
    layout = fill_global_batch(layout, global_batch)
    keys = parallelism.write_parallelism(layout, model)
    flavor = find_flavor(model) if model is not None else None
    if flavor is not None:
        keys = {"model.name": flavor[0], "model.flavor": flavor[1], **keys}
    if sequence_length is not None:
        keys["training.seq_len"] = sequence_length
    data = convert_tuples_to_lists(unflatten(keys))
    body = _text(data)
    back = import_config(body, gpus=layout.gpus)
    unexpressed = list_lost_fields(
        back, layout, model, sequence_length, title=TITLE, reasons=parallelism.REASONS
    )
    said = {problem.where for problem in unexpressed}
    unexpressed += tuple(p for p in parallelism.list_unsupported(layout) if p.where not in said)
    text = "\n".join([*format_header(layout, unexpressed, ()), body])
    return ExportedConfig(text=text, data=data, unexpressed=unexpressed)


def _text(data: dict[str, Any]) -> str:
    """Write TOML, with one pipeline chunk per line instead of one module."""
    parts = data["parallelism"].get("module_fqns_per_model_part")
    if parts is None:
        return dump_data(data, ".toml")
    mark = "@modules@"
    inner = data["parallelism"] | {"module_fqns_per_model_part": mark}
    rows = "".join(f"    {json.dumps(part)},\n" for part in parts)
    return dump_data(data | {"parallelism": inner}, ".toml").replace(f'"{mark}"', f"[\n{rows}]")


def import_config(
    given: str | Mapping[str, Any],
    *,
    gpus: int | None = None,
    name: str = "imported",
    vocab: int | None = None,
) -> ImportedConfig:
    """Read a job file; a flavor has its own vocabulary, so `vocab` has no use."""
    del vocab
    flat = flatten(_data(given))
    settings = FrameworkConfig(flat, job_keys.KEYS)
    found = classify_unread(flat, settings, job_keys.IGNORED, "torchtitan key")
    read = sum(key in settings.known for key in flat)
    require_known_keys(given, read + len(found.ignored), found, EXPECTED_FORMAT)
    model = _model(settings, name)
    layout = parallelism.read_parallelism(
        settings, gpus, model.layers if model is not None else None
    )
    length = settings.optional_integer("training.seq_len")
    settings.raise_problems()
    return ImportedConfig(
        layout=layout,
        model=model,
        sequence_length=length,
        ignored=found.ignored,
        unknown=tuple(settings.notes),
    )


def _model(settings: FrameworkConfig, name: str) -> Model | None:
    kind, flavor = settings.text("model.name"), settings.text("model.flavor")
    if kind is None or flavor is None:
        return None
    model = get_flavor_model(kind, flavor)
    if model is None:
        settings.add_note("model.flavor", f"the sizes of {kind} {flavor} are not known here")
        return None
    return msgspec.structs.replace(model, name=name)


def _data(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(given, str) and (given.lstrip().startswith("--") or " --parallelism." in given):
        flags = parse_command_line(given).flags
        words = {key.removeprefix("--"): value for key, value in flags.items()}
        return {key: value[0] if value else True for key, value in words.items() if "." in key}
    return read_table(given, ".toml", "job", EXPECTED_FORMAT)
