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

from meshwright.cli.answer import Answer, Note, Text, View, facts
from meshwright.cli.files import write_text
from meshwright.cli.launch_flags import add_options, named_values, options_of
from meshwright.cli.parser import add_common, verbs
from meshwright.cli.train import changed
from meshwright.errors import InputError, MissingPart, Problem
from meshwright.run.parallel.launch import kubernetes, ray, slurm
from meshwright.run.parallel.launch.start import Device, Start, shape_of
from meshwright.spec.files import load_data
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.read import read
from meshwright.spec.resolve import Source, resolve
from meshwright.spec.units import parse_count
from meshwright.spec.work import read_cluster, read_model, read_work

EXAMPLES = (
    "mw launch slurm examples/train-tiny.toml layout.dp=16 workload.global_batch=128 --time 240",
    "mw launch slurm examples/train-tiny.toml --submit",
    "mw launch k8s examples/train-tiny.toml --image registry/meshwright:1 --claim data:/data",
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
_LAYOUT = frozenset(Layout.__struct_fields__)
_SUBMIT_S = 120


class _Job(NamedTuple):
    """What a job file says of where it runs."""

    layout: Layout
    gpus_per_node: int
    device: Device
    model: Model | None


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    for verb, each in verbs(parser, _VERBS).items():
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
        each.add_argument("--folder", metavar="RUN", help="the run's folder (default: runs/JOB)")
        each.add_argument("--name", metavar="TEXT", help="name of the job (default: the file's)")
        each.add_argument(
            "--gpus-per-node", metavar="N",
            help="GPUs of a node (default: those of the file's cluster, or 8)",
        )  # fmt: skip
        each.add_argument(
            "--device", choices=("cuda", "cpu"),
            help="what ranks compute on (default: the file's machine.device, or cuda)",
        )  # fmt: skip
        each.add_argument(
            "--command", metavar="LINE", dest="program",
            help="a program of your own for every rank, in place of mw train JOB",
        )  # fmt: skip
        each.add_argument(
            "--python", metavar="FILE",
            help="interpreter on the nodes (default: this one; in a container python)",
        )  # fmt: skip
        each.add_argument(
            "--env", action="append", default=[], metavar="NAME=VALUE",
            help="a variable for every rank; may be given again",
        )  # fmt: skip
        each.add_argument("-o", "--output", metavar="FILE", help="write it there, do not print it")
        if verb == "slurm":
            each.add_argument(
                "--submit", action="store_true", help="hand it to sbatch; else nothing is started"
            )
        add_options(each, _OPTIONS[verb], verb)
        add_common(each)


def run(args: argparse.Namespace) -> Answer:
    """Answer with the job's file, and with its number where it was submitted."""
    start, text = _WRITERS[args.verb](args)
    shape = start.shape
    data: dict[str, Any] = {
        "launcher": args.verb, "name": start.name, "nodes": shape.nodes,
        "ranks_per_node": shape.per_node, "ranks": shape.ranks, "device": shape.device,
        "command": list(start.command), "text": text, "output": args.output, "job_id": None,
    }  # fmt: skip
    if args.output:
        write_text(args.output, text)
    if getattr(args, "submit", False):
        data["job_id"] = _submitted(text)
        done = {"job": data["job_id"], "name": start.name, "runs on": shape, "script": args.output}
        log = f"squeue --job {data['job_id']} shows it, scancel {data['job_id']} ends it"
        return Answer("launch/1", data, (facts(done), Note(log)), (data["job_id"],))
    views: tuple[View, ...] = (Text(text),)
    if args.output:
        views = (facts({"wrote": args.output, "name": start.name, "runs on": shape}),)
    hint = _NEXT[args.verb].format(file=args.output or "FILE")
    note = Note(f"nothing was started: {hint}")
    return Answer("launch/1", data, (*views, note), (args.output or str(shape),))


_NEXT = {
    "slurm": "--submit does, or sbatch {file}",
    "k8s": "kubectl apply -f {file} does",
    "ray": "ray job submit --working-dir . -- python {file} does",
}


def _slurm(args: argparse.Namespace) -> tuple[Start, str]:
    job = _read(args)
    room = {}
    if job.model is not None and not args.program:
        from meshwright.predict.checkpoints import checkpoint_bytes

        room["disk_bytes"] = _SPARE_CHECKPOINTS * checkpoint_bytes(job.model, job.layout)
    usual = "." if args.program else str(Path("runs") / Path(args.job).stem)
    folder = args.folder or usual
    options = options_of(
        slurm.SlurmOptions, "slurm", args, os.environ, **({"folder": folder} | room)
    )
    start = _start(args, job, args.python or ("python" if options.container else sys.executable))
    return start, slurm.script(start, options)


def _k8s(args: argparse.Namespace) -> tuple[Start, str]:
    job = _read(args)
    options = options_of(kubernetes.KubernetesOptions, "k8s", args, os.environ)
    start = _start(args, job, args.python or "python")
    return start, kubernetes.manifest(start, options)


def _ray(args: argparse.Namespace) -> tuple[Start, str]:
    job = _read(args)
    options = options_of(ray.RayOptions, "ray", args, os.environ)
    start = _start(args, job, args.python or "python")
    return start, ray.driver(start, options)


_WRITERS: dict[str, Callable[[argparse.Namespace], tuple[Start, str]]] = {
    "slurm": _slurm,
    "k8s": _k8s,
    "ray": _ray,
}


def _start(args: argparse.Namespace, job: _Job, python: str) -> Start:
    words = ["train", args.job, *args.files, *(("--folder", args.folder) if args.folder else ())]
    own = _words(args.program) if args.program is not None else ()
    return Start(
        name=args.name or Path(args.job).stem,
        command=own or (python, "-m", "meshwright", *words),
        module=() if own else ("-m", "meshwright", *words),
        shape=shape_of(job.layout.gpus, job.gpus_per_node, job.device),
        variables=named_values(args.env, "--env"),
        source=args.job,
    )


def _words(line: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(line))
    except ValueError as error:
        what = f"{line!r} is no line of shell: {error}"
        raise InputError([Problem("--command", what, "close the quotes")]) from None
    if not words:
        raise InputError([Problem("--command", "is empty", "name a program")])
    return words


def _read(args: argparse.Namespace) -> _Job:
    """Read what of a job decides where it runs, and refuse one that could not."""
    path = Path(args.job)
    changes = Source("command line", changed(args.files))
    data = resolve([Source(str(path), load_data(path)), changes]).data
    problems: list[Problem] = []
    layout = _part(problems, lambda: read(Layout, data.get("layout", {}), "layout"))
    cluster = None
    if data.get("cluster") is not None:
        cluster = _part(problems, lambda: read_cluster(_near(path, data["cluster"]), "cluster"))
    model = None
    if data.get("model") is not None and not args.program:
        model = _part(problems, lambda: read_model(_near(path, data["model"]), "model"))
    asked = args.gpus_per_node
    gpus = _part(problems, lambda: parse_count(asked, "--gpus-per-node")) if asked else None
    if gpus == 0:
        problems.append(Problem("--gpus-per-node", "is 0", "use 1 or more"))
    if not problems and cluster is not None and model is not None:
        problems += _misfits(path, data)
    if not problems and not args.program:
        _require_sound(path, changes.data)
    if problems or layout is None:
        raise InputError(
            p._replace(where=p.where if p.where.startswith("-") else f"{path}: {p.where}")
            for p in problems
        )
    machine = data.get("machine")
    on_cpu = isinstance(machine, dict) and machine.get("device") == "cpu"
    device: Device = args.device or ("cpu" if on_cpu else "cuda")
    return _Job(layout, gpus or (cluster.gpus_per_node if cluster else _USUAL_GPUS), device, model)


def _require_sound(path: Path, changes: Mapping[str, Any]) -> None:
    """Refuse what the trainer would refuse, where it is installed: a login node may lack torch."""
    if find_spec("torch") is not None:
        from meshwright.run.train.job_file import ask_job

        ask_job(path, changes)


def _misfits(path: Path, data: dict[str, Any]) -> list[Problem]:
    """Return where the layout does not fit model or cluster: a queue is no place to learn it."""
    named = {name: _near(path, data[name]) for name in ("model", "cluster")}
    work = read_work({**data, **named})
    return [
        one._replace(where=f"layout.{one.where}" if one.where in _LAYOUT else one.where)
        for one in work.check()
        if one.where != "memory"
    ]


def _part(problems: list[Problem], reader: Callable[[], Any]) -> Any:
    try:
        return reader()
    except InputError as error:
        problems += error.problems
        return None


def _near(path: Path, value: object) -> object:
    """Let a path in a job file count from the file's own folder."""
    if isinstance(value, str) and (path.parent / value).exists():
        return str(path.parent / value)
    return value


def _submitted(text: str) -> str:
    """Hand a script to sbatch, and return the number of the job."""
    program = shutil.which("sbatch")
    if program is None:
        raise MissingPart(
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
