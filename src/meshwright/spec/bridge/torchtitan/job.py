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

from meshwright.spec.bridge.kind import Wanted, read_table, require_own
from meshwright.spec.bridge.report import lost, notes, plain_data, with_batch
from meshwright.spec.bridge.results import Exported, Imported
from meshwright.spec.bridge.settings import Settings, flatten, nest, sort_out
from meshwright.spec.bridge.shell import read_command
from meshwright.spec.bridge.torchtitan import keys as table
from meshwright.spec.bridge.torchtitan import layout as titan
from meshwright.spec.bridge.torchtitan.flavors import flavor_model, flavor_of
from meshwright.spec.files import dump_data
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model import Model

TITLE = "torchtitan TOML"
WANTED = Wanted(
    "torchtitan", "torchtitan settings", "give a job file in TOML, or --section.key value words"
)


def export(
    layout: Layout,
    model: Model | None = None,
    *,
    sequence_length: int | None = None,
    global_batch: int | None = None,
) -> Exported:
    """Return the sections of a job file that a layout decides."""
    layout = with_batch(layout, global_batch)
    keys = titan.write(layout, model)
    flavor = flavor_of(model) if model is not None else None
    if flavor is not None:
        keys = {"model.name": flavor[0], "model.flavor": flavor[1], **keys}
    if sequence_length is not None:
        keys["training.seq_len"] = sequence_length
    data = plain_data(nest(keys))
    body = _text(data)
    back = import_(body, gpus=layout.gpus)
    unexpressed = lost(back, layout, model, sequence_length, title=TITLE, reasons=titan.REASONS)
    said = {problem.where for problem in unexpressed}
    unexpressed += tuple(p for p in titan.refused(layout) if p.where not in said)
    text = "\n".join([*notes(layout, unexpressed, ()), body])
    return Exported(text=text, data=data, unexpressed=unexpressed)


def _text(data: dict[str, Any]) -> str:
    """Write TOML, with one pipeline chunk per line instead of one module."""
    parts = data["parallelism"].get("module_fqns_per_model_part")
    if parts is None:
        return dump_data(data, ".toml")
    mark = "@modules@"
    inner = data["parallelism"] | {"module_fqns_per_model_part": mark}
    rows = "".join(f"    {json.dumps(part)},\n" for part in parts)
    return dump_data(data | {"parallelism": inner}, ".toml").replace(f'"{mark}"', f"[\n{rows}]")


def import_(
    given: str | Mapping[str, Any],
    *,
    gpus: int | None = None,
    name: str = "imported",
    vocab: int | None = None,
) -> Imported:
    """Read a job file; a flavor has its own vocabulary, so `vocab` has no use."""
    del vocab
    flat = flatten(_data(given))
    settings = Settings(flat, table.KEYS)
    found = sort_out(flat, settings, table.IGNORED, "torchtitan key")
    read = sum(key in settings.known for key in flat)
    require_own(given, read + len(found.ignored), found, WANTED)
    model = _model(settings, name)
    layout = titan.read(settings, gpus, model.layers if model is not None else None)
    length = settings.optional_whole("training.seq_len")
    settings.finish()
    return Imported(
        layout=layout,
        model=model,
        sequence_length=length,
        ignored=found.ignored,
        unknown=tuple(settings.notes),
    )


def _model(settings: Settings, name: str) -> Model | None:
    kind, flavor = settings.text("model.name"), settings.text("model.flavor")
    if kind is None or flavor is None:
        return None
    model = flavor_model(kind, flavor)
    if model is None:
        settings.note("model.flavor", f"the sizes of {kind} {flavor} are not known here")
        return None
    return msgspec.structs.replace(model, name=name)


def _data(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(given, str) and (given.lstrip().startswith("--") or " --parallelism." in given):
        flags = read_command(given).flags
        words = {key.removeprefix("--"): value for key, value in flags.items()}
        return {key: value[0] if value else True for key, value in words.items() if "." in key}
    return read_table(given, ".toml", "job", WANTED)
