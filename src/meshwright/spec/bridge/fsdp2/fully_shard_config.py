"""A `Layout` as the settings of a `fully_shard` snippet, and back."""

from typing import Any

from meshwright.errors import Problem
from meshwright.spec.bridge.export_report import NO_MODEL, Reasons, read_layout
from meshwright.spec.bridge.framework_config import FrameworkConfig
from meshwright.spec.layout.choices import Offload
from meshwright.spec.layout.layout import Layout
from meshwright.spec.serialization import format_value

KEYS = (
    "mesh", "mesh_dim_names", "reshard_after_forward", "param_dtype", "reduce_dtype", "stored",
    "offload", "rotate", "checkpoint", "optimizer", "local_batch_size",
    "gradient_accumulation_steps",
)  # fmt: skip

_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
LAYOUT_DTYPES = {word: name for name, word in _DTYPES.items()}
_OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}
_ROTATE = {"ring": "alltoall", "allgather": "allgather"}
HOST_STATES: tuple[Offload, ...] = ("gradients", "optimizer", "parameters")
"""What `CPUOffloadPolicy` keeps on the host; it takes no part of it alone."""
_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")


def write_fully_shard(layout: Layout) -> dict[str, Any]:
    """Return the settings of a snippet by name."""
    shard = 1 if layout.zero == 0 else layout.dp
    if layout.zero and layout.shard_degree % layout.cp == 0:
        shard = layout.shard_degree // layout.cp
    sizes = {
        "pp": layout.pp, "dp_replicate": layout.dp // shard, "dp_shard": shard, "cp": layout.cp,
        "tp": layout.tp,
    }  # fmt: skip
    mesh = {axis: sizes[axis] for axis in _dimensions(layout, sizes)}
    half = {"fp32": "fp32", "fp16": "fp16"}.get(layout.precision, "bf16")
    stored = half if layout.master_precision == "none" else "fp32"
    reduced = layout.gradient_precision
    data: dict[str, Any] = {
        "mesh": list(mesh.values()),
        "mesh_dim_names": list(mesh),
        "reshard_after_forward": layout.zero in {0, 3},
        "param_dtype": _DTYPES[half],
        "reduce_dtype": _DTYPES.get(reduced, _DTYPES["fp32"]),
        "stored": _DTYPES[stored],
        "offload": set(layout.offload) >= set(HOST_STATES),
        "rotate": _ROTATE.get(layout.cp_kind, "alltoall") if layout.cp > 1 else None,
        "checkpoint": layout.recompute == "full",
        "optimizer": _OPTIMIZERS.get(layout.optimizer, "AdamW"),
        "local_batch_size": layout.microbatch,
        "gradient_accumulation_steps": (
            layout.count_microbatches(layout.global_batch)
            if layout.global_batch is not None
            else None
        ),
    }
    return {key: value for key, value in data.items() if value is not None}


def _dimensions(layout: Layout, sizes: dict[str, int]) -> list[str]:
    """Return the mesh dimensions, outermost first, as the layout orders its axes."""
    names = {"dp": ["dp_replicate", "dp_shard"], "ep": []}
    axes = reversed(layout.order.split("-"))
    wanted = [name for axis in axes for name in names.get(axis, [axis])]
    usual = ["pp", "dp_replicate", "dp_shard", "cp", "tp"]
    # Sharding joins dp_shard and cp, which only neighbours can.
    joined = layout.cp == 1 or wanted[wanted.index("dp_shard") + 1 :][:1] == ["cp"]
    if wanted != usual and joined:
        return wanted
    return [name for name in usual if sizes[name] > 1 or name == "dp_shard"]


def read_fully_shard(settings: FrameworkConfig, gpus: int | None) -> Layout:
    """Return the layout that the settings of a snippet mean."""
    mesh = _mesh(settings)
    shard, cp = mesh.get("dp_shard", 1), mesh.get("cp", 1)
    replicas = mesh.get("dp_replicate", 1)
    dp = replicas * shard
    total = dp * cp * mesh.get("tp", 1) * mesh.get("pp", 1)
    if gpus is not None and gpus != total:
        settings.add_problem("mesh", f"holds {total} GPUs, not {gpus}", "change a dimension")
    precision = settings.choice("param_dtype", LAYOUT_DTYPES, "fp32")
    stored = settings.choice("stored", LAYOUT_DTYPES, "fp32")
    micro = settings.integer("local_batch_size", 1)
    steps = settings.optional_integer("gradient_accumulation_steps")
    reshard = settings.raw("reshard_after_forward")
    if type(reshard) is int:
        settings.add_note("reshard_after_forward", "a smaller group after forward cannot be held")
    rotate = {word: kind for kind, word in _ROTATE.items()}
    kind = settings.choice("rotate", rotate, "allgather")
    fields: dict[str, Any] = {
        "tp": mesh.get("tp", 1),
        "cp": cp,
        "cp_kind": kind if cp > 1 else "ring",
        "pp": mesh.get("pp", 1),
        "dp": dp,
        "shard": shard * cp if replicas > 1 else None,
        "zero": 2 if reshard is False else 3,
        "recompute": "full" if settings.flag("checkpoint") else "none",
        "precision": precision,
        "optimizer": _optimizer(settings),
        "master_precision": "none" if stored == precision else stored,
        "moment_precision": stored,
        "gradient_precision": settings.choice("reduce_dtype", LAYOUT_DTYPES, precision),
        "microbatch": micro,
        "global_batch": micro * steps * dp if steps is not None else None,
        "offload": HOST_STATES if settings.flag("offload") else (),
        "order": _order(list(mesh)),
    }
    settings.raise_problems()
    return read_layout(fields, {})


def _mesh(settings: FrameworkConfig) -> dict[str, int]:
    sizes, names = settings.raw("mesh"), settings.raw("mesh_dim_names")
    sizes = [sizes] if isinstance(sizes, int) else sizes
    if sizes is None:
        settings.notes.append(
            Problem("gpus", "the mesh is not in the text; one GPU is read", "give the mesh")
        )
        return {"dp_shard": 1}
    names = (
        ("dp_shard",)
        if names is None and isinstance(sizes, list | tuple) and len(sizes) == 1
        else names
    )
    sound = isinstance(sizes, list | tuple) and isinstance(names, list | tuple)
    if (
        not sound
        or len(sizes) != len(names)
        or not all(type(size) is int and 0 < size < 10**9 for size in sizes)
    ):
        settings.add_problem(
            "mesh",
            f"{format_value(sizes)} with {format_value(names)} is not a mesh of sizes and names",
            'write (2, 4) with ("dp_replicate", "dp_shard")',
        )
        return {}
    mesh: dict[str, int] = {}
    for size, name in zip(sizes, names, strict=True):
        axis = {"dp": "dp_shard", "fsdp": "dp_shard", "shard": "dp_shard", "ddp": "dp_replicate",
                "replicate": "dp_replicate"}.get(str(name), str(name))  # fmt: skip
        if axis in _AXES and axis not in mesh:
            mesh[axis] = size
        elif size > 1:
            settings.add_note("mesh_dim_names", f"{name!r} is a dimension that cannot be held")
    return mesh


def _order(names: list[str]) -> str:
    """Return the order of axes that a mesh says, the default where it leaves that open."""
    axes = list(dict.fromkeys("dp" if name.startswith("dp") else name for name in reversed(names)))
    usual = [axis for axis in ("tp", "cp", "dp", "pp") if axis in axes]
    if axes == usual or len(axes) < 4:
        return "tp-cp-ep-dp-pp"
    axes.insert(axes.index("dp"), "ep")
    return "-".join(axes)


def _optimizer(settings: FrameworkConfig) -> str:
    word = settings.text("optimizer") or "AdamW"
    back = {name.lower(): kind for kind, name in _OPTIMIZERS.items()}
    if word.lower() not in back and word != "Adam":
        settings.add_note("optimizer", f"{word!r} cannot be held; adamw is read")
    return back.get(word.lower(), "adamw")


_PIPELINING = "build it with torch.distributed.pipelining"

REASONS: Reasons = {
    "sequence_parallel": ("tensor parallelism is a plan of its own", "use SequenceParallel in it"),
    "cp_kind": ("keys and values are gathered, or sent round a ring", "use ring or allgather"),
    "virtual_stages": ("the pipeline is built elsewhere", _PIPELINING),
    "schedule": ("the pipeline is built elsewhere", _PIPELINING),
    "stage_layers": ("the pipeline is built elsewhere", _PIPELINING),
    "shard": ("sharding always covers context parallelism", "use a multiple of cp"),
    "zero": (
        "optimizer states are sharded together with gradients, and over context parallelism too",
        "use zero=2 or 3"),
    "ep": ("experts would need a second mesh", ""),
    "expert_tp": ("experts are cut like the rest", ""),
    "recompute": ("whole blocks are recomputed, or nothing", "use recompute=full"),
    "recompute_ops": ("whole blocks are recomputed, or nothing", "use recompute=full"),
    "recompute_layers": ("every block is recomputed", "leave it out"),
    "precision": ("FP8 is a conversion of the modules beforehand", "convert with torchao"),
    "optimizer": ("PyTorch has no such optimizer", "use adamw, sgd or muon"),
    "master_precision": ("weights are kept in fp32, or only in the dtype of the GEMMs", ""),
    "gradient_precision": ("gradients are reduced in fp32, bf16 or fp16", "use fp32"),
    "moment_precision": ("moments follow the dtype of the weights", ""),
    "overlap_gradients": ("it cannot be switched off", ""),
    "overlap_parameters": ("it cannot be switched off", ""),
    "overlap_tp": ("it is a switch of the compiler", ""),
    "overlap_pp": ("the pipeline is built elsewhere", ""),
    "overlap_ep": ("there is no expert parallelism", ""),
    "offload": (
        "parameters, gradients and optimizer go to the host together", "name all three, or none"),
    "offload_layers": ("activations stay on the device", "leave it out"),
    "order": (
        "a mesh has no place for the experts, and cp stands next to dp to be sharded together",
        "use tp-cp-ep-dp-pp"),
    "sequence_length": ("the data decide it", ""),
    "model": (NO_MODEL, "build the model in code"),
}  # fmt: skip
"""Why FSDP2 cannot say a field, and what to do."""
