"""The question that `mw plan` asks: what files and flags fix, what is left open, what is filled in.

Every flag of a layout fixes a field, so that `--tp 8` is the same as `--fix tp=8`. A layout in a
work file gives only what changes results: precision, optimizer, formats of states.
"""

import argparse
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwright.cli.flags.calibration import CalibrationChoice, choose_calibration
from meshwright.cli.flags.problems import format_flag
from meshwright.cli.flags.spec_fields import read_flag_values
from meshwright.cli.flags.work import ResolvedWork, resolve_work
from meshwright.errors import InputError, Problem
from meshwright.predict.plan import LayoutSpace, PlanQuestion, parse_fixed_fields
from meshwright.predict.plan.framework_target import restrict_to_framework
from meshwright.predict.plan.question.layout_space import FIXED_BY_USER
from meshwright.spec import catalog
from meshwright.spec.bridge import BRIDGES, FrameworkBridge, find_bridge
from meshwright.spec.cluster import Cluster, Gpu
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import CHOICES
from meshwright.spec.model import Model, count_parameters
from meshwright.spec.units import format_count, format_quantity, parse_count
from meshwright.spec.workload import TrainingWorkload

PRECISION_FIELDS = tuple(
    name for name in FIXED_BY_USER if name not in ("precision", "global_batch")
)
"""Fields that a search leaves as the user's layout has them."""
BATCH_TOKENS_BY_PARAMETERS = ((10e9, 2**22), (100e9, 2**23), (float("inf"), 2**24))
"""Tokens of a step for models of up to so many parameters. Llama 3 went from 4M tokens a step to
16M at 405B (arXiv 2407.21783, 3.4.1)."""
ADAPTER_GLOBAL_BATCH = 128
"""Sequences of a step where an adapter is trained."""
_LISTS = ("stage_layers", "recompute_ops", "offload")


class PlanRequest(NamedTuple):
    """A question with where it came from."""

    question: PlanQuestion
    work: ResolvedWork
    target: FrameworkBridge | None
    """The framework that is to run it."""
    defaults_used: dict[str, int]
    """What nobody said and was chosen: `global_batch`, `sequence_length`."""
    calibration: CalibrationChoice
    """Where the constants of the GPUs come from."""

    @property
    def has_tokens(self) -> bool:
        """Whether somebody said how many tokens to train on."""
        return self.work.origins.get("workload.tokens", "default") != "default"


def add_search_space(parser: argparse.ArgumentParser) -> None:
    """Add what narrows the space; the work and its fields are added by `add_work`."""
    group = parser.add_argument_group(
        "the space",
        "Every field of a layout is searched unless it is fixed. A layout's own flags fix it to\n"
        "one value (--tp 8), --fix to one of some. Precision, optimizer and formats of states\n"
        "stay as they are, as they change results: --precision bf16,fp8 allows others. Nothing\n"
        "goes to host memory unless --fix offload=none,optimizer allows it.",
    )
    group.add_argument(
        "--fix", metavar="FIELD=V,V", action="append", default=[],
        help="allow only some values of a field: tp=8, schedule=1f1b,interleaved",
    )  # fmt: skip
    group.add_argument(
        "--max-memory",
        metavar="SHARE",
        help="share of a GPU's memory that may be used (default: 1)",
    )
    group.add_argument(
        "--fit-scale-up-domain", action="store_true",
        help="keep tensor, context and expert parallel groups inside one scale-up domain",
    )  # fmt: skip
    group.add_argument(
        "--for", dest="target", metavar="NAME",
        help=f"only what a framework can run, and its settings to paste: {', '.join(BRIDGES)}",
    )  # fmt: skip


def read_request(
    args: argparse.Namespace, *, gpus: int | None = None, any_size: bool = False
) -> PlanRequest:
    """Read the question; `gpus` stands in where the flag names several.

    With `any_size` nobody need say how many GPUs: a node stands in, and a batch that is chosen here
    divides by three as well, for the sizes between doublings.
    """
    said = read_flag_values(args, "layout")
    resolved = _asked(args)
    fixed = _fixed(args, said)
    if args.gpus is not None and gpus is None:
        gpus = parse_count(args.gpus, "--gpus")
    cluster = _sized(resolved, gpus, any_size)
    spread = cluster.gpus * (3 if any_size else 1)
    workload, filled = _workload(resolved, said.get("global_batch"), spread)
    if said.get("precision") is not None:
        fixed["precision"] = parse_precisions(said["precision"], cluster.gpu)
    own = resolved.work.layout
    base = Layout(
        precision=fixed.get("precision", (own.precision,))[0],
        **{name: getattr(own, name) for name in PRECISION_FIELDS},
    )
    used = choose_calibration(args, cluster.gpu)
    question = _sound(
        LayoutSpace(
            base=base,
            fixed=fixed,
            fit_scale_up_domain=args.fit_scale_up_domain,
            max_memory=_share(args.max_memory),
        ),
        resolved.work.model,
        cluster,
        workload,
        used,
    )
    target = _target(args.target)
    if target is not None:
        question = restrict_to_framework(question, target)
    return PlanRequest(question, resolved, target, filled, used)


def _asked(args: argparse.Namespace) -> ResolvedWork:
    """Read files and flags; whether the layout of a file fits is not asked here."""
    try:
        return resolve_work(_withheld(args))
    except InputError as error:
        own = [problem for problem in error.problems if problem.where != "memory"]
        raise InputError(own or error.problems) from None


def _withheld(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments without what fixes the search: a file's own degrees may not agree."""
    kept = {name: value for name, value in vars(args).items() if not _fixes(name)}
    hidden = {name: None for name in vars(args) if _fixes(name)}
    return argparse.Namespace(**{**kept, **hidden, "gpus": None})


def _fixes(name: str) -> bool:
    return name.startswith("layout.") and name.removeprefix("layout.") not in PRECISION_FIELDS


def _fixed(args: argparse.Namespace, said: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Read what is fixed, by `--fix` or by a layout's own flags."""
    texts = []
    for name, value in said.items():
        if name in PRECISION_FIELDS or name in ("precision", "global_batch"):
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value).strip("[] ")
        texts.append(f"{name}={text.replace(',', '+') if name in _LISTS else text}")
    fixed, own = parse_fixed_fields(args.fix), parse_fixed_fields(texts)
    problems = [
        Problem(f"--fix {name}", f"{name} is also given as a flag", "give it once")
        for name in fixed
        if name in own or said.get(name) is not None
    ]
    if "global_batch" in fixed:
        what = "the batch is part of the question, not of the layout"
        problems.append(Problem("--fix global_batch", what, "use --global-batch"))
    for name in fixed:
        if name in PRECISION_FIELDS:
            what = "formats of states are not searched, as they change results"
            fix = f"use --{name.replace('_', '-')}"
            problems.append(Problem(f"--fix {name}", what, fix))
    if problems:
        raise InputError(problems)
    return {**fixed, **own}


def _sized(resolved: ResolvedWork, gpus: int | None, any_size: bool) -> Cluster:
    """Return a cluster as large as the run."""
    cluster, layout = resolved.work.cluster, resolved.work.layout
    degrees = ("gpus", *(f"layout.{axis}" for axis in ("tp", "cp", "pp", "dp")))
    if gpus is None and any(name in resolved.origins for name in degrees):
        gpus = layout.gpus
    own = not is_catalog_cluster(cluster)
    if gpus is None and own:
        gpus = cluster.gpus
    node = cluster.gpus_per_node
    if gpus is None and any_size:
        gpus = node
    if gpus is None:
        raise InputError([Problem("--gpus", "is missing", f"say how many: --gpus {8 * node}")])
    if own and gpus > cluster.gpus:
        what = f"{cluster.name} has {format_quantity(cluster.gpus, 'GPU')}, not {gpus}"
        raise InputError([Problem("--gpus", what, f"use {cluster.gpus} or fewer")])
    if 0 < gpus < node:
        return _part_of_node(cluster, gpus)
    if gpus % node:
        what = f"{format_quantity(gpus, 'GPU does', 'GPUs do')} not fill nodes of {node}"
        raise InputError([Problem("--gpus", what, f"use {max(1, round(gpus / node)) * node}")])
    try:
        return cluster.with_gpus(gpus)
    except InputError as error:
        raise InputError(p._replace(where="--gpus") for p in error.problems) from None


def is_catalog_cluster(cluster: Cluster) -> bool:
    """Tell whether a cluster is one of the catalog's, of any size."""
    known = catalog.list_clusters().get(cluster.name)
    return known is not None and replace(known, nodes=cluster.nodes) == cluster


def _part_of_node(cluster: Cluster, gpus: int) -> Cluster:
    """Return some GPUs of one node, which no network reaches."""
    domain = cluster.scale_up.gpus
    scale_up = cluster.scale_up if domain % gpus == 0 else replace(cluster.scale_up, gpus=gpus)
    return replace(cluster, nodes=1, gpus_per_node=gpus, scale_up=scale_up)


def _workload(
    resolved: ResolvedWork, batch: str | None, gpus: int
) -> tuple[TrainingWorkload, dict[str, int]]:
    """Return the workload, and what of it was chosen here."""
    workload, filled = resolved.workload, {}
    if resolved.origins.get("workload.sequence_length") == "default":
        filled["sequence_length"] = workload.sequence_length
    if batch is not None:
        workload = replace(workload, global_batch=parse_count(batch, "--global-batch"))
    elif resolved.origins.get("workload.global_batch") == "default":
        chosen = choose_global_batch(resolved.work.model, workload, gpus)
        filled["global_batch"] = chosen
        workload = replace(workload, global_batch=chosen)
    return workload, filled


def choose_global_batch(model: Model, workload: TrainingWorkload, gpus: int) -> int:
    """Return the sequences of a step that are usual for a model of this size.

    The number is a power of two times the odd part of the number of GPUs, so that as many splits
    as possible divide it.
    """
    odd = gpus
    while odd % 2 == 0:
        odd //= 2
    sequences = float(ADAPTER_GLOBAL_BATCH)
    if workload.adapter is None:
        size = count_parameters(model).total
        tokens = next(tokens for most, tokens in BATCH_TOKENS_BY_PARAMETERS if size <= most)
        sequences = tokens / workload.sequence_length
    twos = 0
    while odd * 2 ** (twos + 1) <= sequences * 2**0.5:  # the nearest, in ratio
        twos += 1
    return int(odd * 2**twos)


def parse_precisions(text: str, gpu: Gpu) -> tuple[Any, ...]:
    """Read `bf16,fp8`: `fp8` and `fp4` are the formats that the GPU takes in hardware."""
    short = {
        "fp8": "mxfp8" if "mxfp8" in gpu.precisions else "fp8-tensorwise",
        "fp4": "nvfp4",
    }
    words = [word.strip() for word in text.split(",") if word.strip()]
    found = tuple(dict.fromkeys(short.get(word, word) for word in words))
    usable = [name for name in gpu.precisions if name in CHOICES["precision"]]
    fix = f"use some of {', '.join(usable)}"
    problems = [
        Problem("--precision", f"a {gpu.name} has no {word}", fix)
        for word in words
        if short.get(word, word) not in usable
    ]
    if problems or not found:
        raise InputError(problems or [Problem("--precision", f"{text!r} names no format", fix)])
    return found


def _share(text: str | None) -> float:
    if text is None:
        return 1.0
    percent = text.strip().endswith("%")
    try:
        number = float(text.strip().removesuffix("%"))
    except ValueError:
        what = f"{text!r} is not a share of a GPU's memory"
        raise InputError([Problem("--max-memory", what, "use one like 0.92 or 92%")]) from None
    return number / 100 if percent else number


def _sound(
    space: LayoutSpace,
    model: Model,
    cluster: Cluster,
    workload: TrainingWorkload,
    used: CalibrationChoice,
) -> PlanQuestion:
    """Build the question; what is wrong with it is said of its flags."""
    try:
        question = PlanQuestion(
            model=model,
            cluster=cluster,
            workload=workload,
            space=space,
            calibration=used.calibration,
            framework=used.framework,
        )
        question.build_run(
            space.base
        )  # an adapter on products that the model lacks is refused here
    except InputError as error:
        raise InputError(
            p._replace(where="--max-memory") if p.where == "max_memory" else p
            for p in error.problems
        ) from None
    return question


def _target(name: str | None) -> FrameworkBridge | None:
    if name is None:
        return None
    try:
        return find_bridge(name)
    except InputError as error:
        raise InputError(p._replace(where="--for") for p in error.problems) from None


def format_defaults_used(request: PlanRequest) -> str:
    """Say what was filled in, as flags."""
    flags = " ".join(format_flag(name, value) for name, value in request.defaults_used.items())
    tokens = format_count(request.question.workload.tokens_per_step)
    return f"defaults used: {flags} ({tokens} tokens a step)"
