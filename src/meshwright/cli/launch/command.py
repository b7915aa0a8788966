"""`mw launch slurm|k8s|ray JOB`: a training job as a cluster takes it; submits when asked to."""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright.cli.flags.job_outline import JobOutline, read_outline, resolve_path
from meshwright.cli.flags.overrides import parse_overrides
from meshwright.cli.flags.rl_run import parse_rl_config
from meshwright.cli.launch.flags import add_options, parse_variables, read_options
from meshwright.cli.launch.pods import choose_pod_folder, find_pod_problems
from meshwright.cli.parser import add_common, add_verbs
from meshwright.cli.render.files import write_text
from meshwright.cli.result import CommandResult, NoteView, TextView, View, make_fields
from meshwright.cli.train.recipe import is_recipe_file
from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.run.parallel.launch import kubernetes, ray, slurm
from meshwright.run.parallel.launch.launch_spec import DeviceType, LaunchSpec, fit_ranks_to_nodes
from meshwright.run.train.run_folder.run_folder import find_recipe
from meshwright.spec.field_checks import check_integer, raise_problems
from meshwright.spec.job_spec import read_job_spec
from meshwright.spec.layout import Layout
from meshwright.spec.units import parse_count

EXAMPLES = (
    "mw launch slurm examples/train-tiny.toml layout.dp=16 workload.global_batch=128 --time 240",
    "mw launch slurm examples/train-tiny.toml --submit",
    "mw launch k8s examples/train-tiny.toml data.cache_dir=/data/cache --image "
    "registry/meshwright:1 "
    "--volume-claim data:/data",
    "mw launch ray examples/train-tiny.toml --output start.py",
)

_VERBS = (
    ("slurm", "a batch script for Slurm, with a look at every node first", EXAMPLES[:2]),
    ("k8s", "a manifest for Kubernetes: a JobSet or a PyTorchJob", EXAMPLES[2:3]),
    ("ray", "a program that starts the job on a Ray cluster", EXAMPLES[3:]),
)
_OPTIONS: dict[str, type[msgspec.Struct]] = {
    "slurm": slurm.SlurmOptions,
    "k8s": kubernetes.KubernetesOptions,
    "ray": ray.RayOptions,
}
_SPARE_CHECKPOINTS = 2
"""Checkpoints that the disk must have room for: the newest, and the one that is being written."""
_USUAL_GPUS = 8
_NAMED = ("model", "cluster")
"""What a job file may name by a path."""
_SUBMIT_S = 120


class _Job(NamedTuple):
    """What a job file says of where it runs."""

    layout: Layout
    gpus_per_node: int
    device: DeviceType
    outline: JobOutline


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    for verb, each in add_verbs(parser, _VERBS).items():
        each.usage = f"mw launch {verb} JOB [KEY=VALUE ...] [flags]"
        each.add_argument("job", metavar="JOB", help="TOML file of mw train")
        # Of this name, the words after a flag are added to it too.
        each.add_argument(
            "files",
            nargs="*",
            default=[],
            metavar="KEY=VALUE",
            help="values in place of the file's",
        )
        each.add_argument(
            "--output-dir", metavar="RUN", help="the run's folder (default: runs/JOB)"
        )
        each.add_argument("--name", metavar="TEXT", help="name of the job (default: the file's)")
        each.add_argument(
            "--gpus-per-node", metavar="N",
            help="GPUs of a node (default: those of the file's cluster, or 8)",
        )  # fmt: skip
        each.add_argument(
            "--device", choices=("cuda", "cpu"),
            help="what ranks compute on (default: the file's device.type, or cuda)",
        )  # fmt: skip
        each.add_argument(
            "--wrap", metavar="LINE", dest="wrap",
            help="a program of your own for every rank, in place of mw train JOB",
        )  # fmt: skip
        each.add_argument(
            "--python", metavar="FILE",
            help="interpreter on the nodes (default: this one; in a container python)",
        )  # fmt: skip
        each.add_argument(
            "--env", action="append", default=[], metavar="NAME[=VALUE]",
            help="a variable for every rank; without a value it is read where the job is started, "
            "as secrets must be; may be given again",
        )  # fmt: skip
        each.add_argument(
            "--plain-secrets", action="store_true",
            help="with --env: write values of variables that look like secrets into the file",
        )  # fmt: skip
        each.add_argument("-o", "--output", metavar="FILE", help="write it there, do not print it")
        each.add_argument(
            "--force", action="store_true", help="with --output: overwrite a file that is there"
        )
        if verb == "slurm":
            each.add_argument(
                "--submit", action="store_true", help="hand it to sbatch; else nothing is started"
            )
        add_options(each, _OPTIONS[verb], verb)
        add_common(each)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the job's file, and with its number where it was submitted."""
    start, text = _WRITERS[args.verb](args)
    _require_free(args.output, text, force=args.force)
    shape = start.node_shape
    data: dict[str, Any] = {
        "launcher": args.verb, "name": start.name, "nodes": shape.nodes,
        "ranks_per_node": shape.ranks_per_node, "ranks": shape.ranks, "device": shape.device,
        "command": list(start.command), "text": text, "output": args.output, "job_id": None,
    }  # fmt: skip
    if args.output:
        write_text(args.output, text)
    if getattr(args, "submit", False):
        data["job_id"] = _submitted(text)
        done = {"job": data["job_id"], "name": start.name, "runs on": shape, "script": args.output}
        log = f"squeue --job {data['job_id']} shows it, scancel {data['job_id']} ends it"
        return CommandResult(
            "launch/1", data, (make_fields(done), NoteView(log)), (data["job_id"],)
        )
    views: tuple[View, ...] = (TextView(text, verbatim=True),)
    if args.output:
        views = (make_fields({"wrote": args.output, "name": start.name, "runs on": shape}),)
    hint = _NEXT[args.verb].format(file=args.output or "FILE")
    note = NoteView(f"nothing was started: {hint}")
    return CommandResult("launch/1", data, (*views, note), (args.output or str(shape),))


def _require_free(output: str | None, text: str, *, force: bool) -> None:
    """Refuse to overwrite a file that says something else: it may have been edited by hand."""
    path = Path(output or "")
    if output and not force and path.is_file() and path.read_bytes() != text.encode():
        what = "is there already, and says something else"
        fix = "add --force to overwrite it, or name another file"
        raise InputError([Problem(f"--output {output}", what, fix)])


_NEXT = {
    "slurm": "--submit does, or sbatch {file}",
    "k8s": "kubectl apply -f {file} does",
    "ray": "ray job submit --working-dir . -- python {file} does",
}


def _slurm(args: argparse.Namespace) -> tuple[LaunchSpec, str]:
    job = _read(args)
    room = {}
    model = job.outline.model
    if model is not None:
        from meshwright.predict.long_run.checkpoint_cost import checkpoint_bytes

        room["disk_bytes"] = _SPARE_CHECKPOINTS * checkpoint_bytes(model, job.layout)
    usual = "." if args.wrap else str(Path("runs") / Path(args.job).stem)
    folder = args.output_dir or usual
    options = read_options(
        slurm.SlurmOptions, "slurm", args, os.environ, **({"folder": folder} | room)
    )
    start = _start(args, job, args.python or ("python" if options.container else sys.executable))
    return start, slurm.render_sbatch(start, options)


def _k8s(args: argparse.Namespace) -> tuple[LaunchSpec, str]:
    job = _read(args)
    options = read_options(kubernetes.KubernetesOptions, "k8s", args, os.environ)
    python = args.python or "python"
    if args.wrap:
        start = _start(args, job, python)
        return start, kubernetes.render_manifest(start, options)
    # A pod sees the image and its volumes, and nothing of this machine.
    folder, file = (
        choose_pod_folder(args.output_dir, args.job, options.volume_claims),
        Path(args.job),
    )
    raise_problems(find_pod_problems(job.outline, folder, options.volume_claims))
    config = kubernetes.ConfigFile(file.name, file.read_text(encoding="utf-8"))
    start = _start(args, job, python, file=config.path, folder=str(folder))
    return start, kubernetes.render_manifest(start, options, config)


def _ray(args: argparse.Namespace) -> tuple[LaunchSpec, str]:
    job = _read(args)
    options = read_options(ray.RayOptions, "ray", args, os.environ)
    start = _start(args, job, args.python or "python")
    return start, ray.render_driver(start, options)


_WRITERS: dict[str, Callable[[argparse.Namespace], tuple[LaunchSpec, str]]] = {
    "slurm": _slurm,
    "k8s": _k8s,
    "ray": _ray,
}


def _start(
    args: argparse.Namespace, job: _Job, python: str, *, file: str = "", folder: str = ""
) -> LaunchSpec:
    """Return what is started; `file` and `folder` are where ranks have the job and the run."""
    file, folder = file or args.job, folder or args.output_dir or ""
    words = ["train", file, *args.files, *(("--output-dir", folder) if folder else ())]
    variables = parse_variables(args.env, args.verb, plain_secrets=args.plain_secrets)
    own = _words(args.wrap) if args.wrap is not None else ()
    return LaunchSpec(
        name=args.name or Path(args.job).stem,
        command=own or (python, "-m", "meshwright", *words),
        module=() if own else ("-m", "meshwright", *words),
        node_shape=fit_ranks_to_nodes(job.layout.gpus, job.gpus_per_node, job.device),
        environment=variables.values,
        inherited=variables.inherited,
        source=args.job,
    )


def _words(line: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(line))
    except ValueError as error:
        what = f"{line!r} is no line of shell: {error}"
        raise InputError([Problem("--wrap", what, "close the quotes")]) from None
    if not words:
        raise InputError([Problem("--wrap", "is empty", "name a program")])
    return words


def _read(args: argparse.Namespace) -> _Job:
    """Read what of a job decides where it runs, and refuse one that could not."""
    path = Path(args.job)
    # A recipe takes its model from the weights it begins with, and its tokens from its records.
    recipe = not args.wrap and is_recipe_file(path, args.files)
    outline = read_outline(path, args.files, with_model=not args.wrap and not recipe)
    problems, asked, gpus = list(outline.problems), args.gpus_per_node, None
    if asked:
        try:
            gpus = parse_count(asked, "--gpus-per-node")
            raise_problems(check_integer("--gpus-per-node", gpus))
        except InputError as error:
            problems += error.problems
    if not problems and outline.cluster is not None and outline.model is not None:
        problems += _misfits(outline)
    loop = recipe and find_recipe(outline.data) == "grpo"
    if not problems and loop:
        problems += _loop_problems(outline)
    elif not problems and not args.wrap:
        _require_sound(path, parse_overrides(args.files), recipe=recipe)
    layout, cluster = outline.layout, outline.cluster
    if problems or layout is None:
        raise InputError(problems)
    asked_device = outline.data.get("device")
    if isinstance(asked_device, dict):
        asked_device = asked_device.get("type")
    on_cpu = asked_device == "cpu"
    device: DeviceType = args.device or ("cpu" if on_cpu else "cuda")
    gpus = gpus or (cluster.gpus_per_node if cluster else _USUAL_GPUS)
    return _Job(layout, gpus, device, outline)


def _loop_problems(outline: JobOutline) -> list[Problem]:
    """Return what is wrong with the settings of reinforcement learning."""
    try:
        parse_rl_config({name: one for name, one in outline.data.items() if name != "recipe"})
    except InputError as error:
        return [outline.locate(problem) for problem in error.problems]
    return []


def _require_sound(path: Path, changes: Mapping[str, Any], *, recipe: bool) -> None:
    """Refuse what the trainer would refuse, where it is installed: a login node may lack torch."""
    if find_spec("torch") is None:
        return
    if recipe:
        from meshwright.run.posttrain.supervised import load_recipe

        raise_problems(load_recipe(path, changes).job.check())
    else:
        from meshwright.run.train.job.job_file import read_job_with_origins

        read_job_with_origins(path, changes)


def _misfits(outline: JobOutline) -> list[Problem]:
    """Return where the layout does not fit model or cluster: a queue is no place to learn it."""
    data = outline.data
    work = read_job_spec(
        {**data, **{name: resolve_path(outline.path, data[name]) for name in _NAMED}}
    )
    return [outline.locate(one) for one in work.check() if one.where != "memory"]


def _submitted(text: str) -> str:
    """Hand a script to sbatch, and return the number of the job."""
    program = shutil.which("sbatch")
    if program is None:
        raise MissingDependency(
            "sbatch is not on this machine",
            "write the script with --output, and submit it where Slurm is",
        )
    done = subprocess.run(
        [program, "--parsable"], input=text, capture_output=True, text=True,
        timeout=_SUBMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        fix = "sinfo shows partitions and limits; --account, --partition and --time set them"
        raise InputError([Problem("sbatch", said.removeprefix("sbatch: error: "), fix)])
    # With several clusters the answer is JOB;CLUSTER.
    return done.stdout.strip().partition(";")[0]
