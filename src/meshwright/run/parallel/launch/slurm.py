"""`render_sbatch`: a job as Slurm's sbatch takes it. Pure text: it submits nothing.

One task for each rank, started by srun; ranks meet at the first node, at a port that follows from
the number of the job. Before they start, every node is looked at. Two minutes before the time
limit the trainer is asked to save and to end, and the job queues again.
"""

import re
import shlex
import signal
from importlib.resources import files

import msgspec

from meshwright.run.parallel.launch.launch_spec import (
    LaunchSpec,
    check_writable,
    recommend_environment,
)
from meshwright.run.parallel.launch.launcher_env import FIRST_PORT, NUM_PORTS
from meshwright.spec.field_checks import FieldChecker

_TIME = re.compile(r"\d+|(\d+-)?\d{1,2}(:\d{2}){1,2}|\d+-\d{1,2}")
_WORD = re.compile(r"[^\s\x00-\x1f\x7f'\"#\\]+")
"""What sbatch reads as one word: quotes, a backslash and # mean something there."""
_PLACEHOLDER = re.compile(r"@(GPUS|FOLDER|DISK_KIB)@")
_ASKED_EXIT_CODE = 128 + signal.SIGTERM


class SlurmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What only Slurm is told; an empty text leaves it to the site."""

    account: str = ""
    """Account that is charged."""
    partition: str = ""
    """Partition, or several with commas."""
    qos: str = ""
    """Quality of service."""
    time: str = ""
    """Time limit: minutes, HH:MM:SS or D-HH:MM:SS."""
    constraint: str = ""
    """Features that nodes must have."""
    exclude: str = ""
    """Nodes that are not used."""
    cpus_per_rank: int | None = None
    """CPU cores for each rank; the site decides where it is not given."""
    memory: str = ""
    """Host memory of each node, such as 900G; 0 takes all."""
    exclusive: bool = False
    """Have whole nodes."""
    container: str = ""
    """Container image that ranks run in, for the Pyxis plugin."""
    mounts: str = ""
    """Folders that the container sees, as FROM:TO with commas."""
    socket_ifname: str = ""
    """Network interface by which ranks meet, such as ib0."""
    nccl_ib_hca: str = ""
    """InfiniBand cards of NCCL, such as mlx5."""
    setup: tuple[str, ...] = ()
    """Lines of shell before anything starts, such as `module load cuda`."""
    flags: tuple[str, ...] = ()
    """Further flags of sbatch, such as --sbatch=--reservation=x."""
    signal_before_s: int = 120
    """Seconds before the time limit at which the trainer saves and ends."""
    restarts: int = 100
    """How often the job queues again at its time limit; 0 never."""
    health: bool = True
    """Look at every node before ranks start."""
    health_restarts: int = 2
    """How often a job that met an unfit node queues again before it gives up."""
    folder: str = "."
    """Where checkpoints go: it must have room."""
    disk_bytes: int = 0
    """Free bytes that the folder must have; 0 asks for none."""
    log: str = "%x-%j.log"
    """File for everything that is printed, in Slurm's pattern."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(cpus_per_rank=self.cpus_per_rank)
        bounds.count(least=10, signal_before_s=self.signal_before_s)
        bounds.count(
            least=0,
            restarts=self.restarts,
            health_restarts=self.health_restarts,
            disk_bytes=self.disk_bytes,
        )
        if self.time and not _TIME.fullmatch(self.time):
            bounds.add("time", f"{self.time!r} is no time", "use 90, 04:00:00 or 2-00:00:00")
        for name in ("account", "partition", "qos", "constraint", "exclude", "memory", "log"):
            value = getattr(self, name)
            if value and not _WORD.fullmatch(value):
                fix = "leave out spaces, quotes, backslashes and #"
                bounds.add(name, f"{value!r} is not one word", fix)
        bounds.problems += check_writable(self)
        for flag in self.flags:
            if not flag.startswith("-"):
                bounds.add(
                    "sbatch", f"{flag!r} is no flag", "write it like --sbatch=--reservation=x"
                )
        bounds.raise_problems()


def render_sbatch(start: LaunchSpec, options: SlurmOptions) -> str:
    """Write the batch script of a job."""
    parts = [
        "#!/bin/bash",
        f"# Written by mw launch slurm{start.origin}: {start.node_shape}.",
        *(f"#SBATCH {flag}" for flag in _flags(start, options)),
        "",
        "set -uo pipefail",
        *options.setup,
        "",
        *_meeting(),
        "",
        *_variables(start, options),
        "",
        *(_health(start, options) if options.health else ()),
        *_running(start, options),
    ]
    return "\n".join(parts) + "\n"


def _flags(start: LaunchSpec, options: SlurmOptions) -> list[str]:
    shape = start.node_shape
    chosen = {
        "--job-name": start.name,
        "--account": options.account,
        "--partition": options.partition,
        "--qos": options.qos,
        "--constraint": options.constraint,
        "--exclude": options.exclude,
        "--nodes": str(shape.nodes),
        "--ntasks-per-node": str(shape.ranks_per_node),
        "--gres": f"gpu:{shape.ranks_per_node}" if shape.device == "cuda" else "",
        "--cpus-per-task": str(options.cpus_per_rank or ""),
        "--mem": options.memory,
        "--time": options.time,
        "--output": options.log,
        # A job that queues again goes on writing in the same file.
        "--open-mode": "append",
        # Only the script hears it, and asks the ranks itself: they must be asked once. A signal of
        # its own tells the time limit from a scancel, after which nothing starts again.
        "--signal": f"B:USR1@{options.signal_before_s}" if options.restarts else "",
    }
    flags = [f"{flag}={value}" for flag, value in chosen.items() if value]
    flags += ["--exclusive"] if options.exclusive else []
    flags += ["--requeue" if options.restarts else "--no-requeue"]
    return flags + list(options.flags)


def _meeting() -> list[str]:
    return [
        "# Ranks meet at the first node. Its address is what Slurm itself reaches it by, which its",
        "# name need not be; the port follows from the number of the job, so that two jobs on one",
        "# node rarely have the same.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "address=$(scontrol show node \"$first\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')",
        'export MASTER_ADDR="${address:-$first}"',
        f"export MASTER_PORT=$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))",
    ]


def _variables(start: LaunchSpec, options: SlurmOptions) -> list[str]:
    traces = f"{options.folder}/nccl-rank-" if start.node_shape.device == "cuda" else ""
    chosen = recommend_environment(
        start.node_shape, interface=options.socket_ifname, hca=options.nccl_ib_hca, traces=traces
    )
    lines = [f"export {one.name}={shlex.quote(one.value)}" for one in chosen]
    width = max(map(len, lines))
    found = [f"{line:{width}}  # {one.reason}" for line, one in zip(lines, chosen, strict=True)]
    found.append('export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"')
    if options.cpus_per_rank:
        # Since 22.05 srun no longer takes it from sbatch.
        found.append('export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"')
    found += [f"export {name}={shlex.quote(value)}" for name, value in start.environment.items()]
    found += [
        f'export {name}="${{{name}:?set it where sbatch is called}}"' for name in start.inherited
    ]
    return found


def render_health_check(start: LaunchSpec, options: SlurmOptions) -> str:
    """Return the shell that looks at one node: it prints what is wrong there, and fails."""
    shape = start.node_shape
    template = files(__package__).joinpath("health.sh").read_text(encoding="utf-8")
    values = {
        "GPUS": str(shape.ranks_per_node if shape.device == "cuda" else 0),
        "FOLDER": shlex.quote(options.folder),
        "DISK_KIB": str(-(-options.disk_bytes // 1024)),
    }
    return _PLACEHOLDER.sub(lambda match: values[match[1]], template).rstrip()


def _health(start: LaunchSpec, options: SlurmOptions) -> list[str]:
    hint = "leave the nodes named above out with sbatch --exclude, and tell who runs them"
    return [
        "# Look at every node before any rank starts there: an unfit one costs all others' time.",
        "read -r -d '' health <<'HEALTH'",
        render_health_check(start, options),
        "HEALTH",
        'if ! srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=0 '
        'bash -c "$health"; then',
        # Slurm counts every reason to queue again together; the job's comment counts this one.
        """  met=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Comment=unfit-//p')""",
        f'  if [ "${{met:-0}}" -lt {options.health_restarts} ]; then',
        '    echo "meshwright: unfit nodes, the job queues again" >&2',
        '    scontrol update JobId="$SLURM_JOB_ID" Comment="unfit-$((${met:-0} + 1))"',
        '    scontrol requeue "$SLURM_JOB_ID" && exit 0',
        "  fi",
        f'  echo "meshwright: unfit nodes; {hint}" >&2',
        "  exit 1",
        "fi",
        "",
    ]


def _running(start: LaunchSpec, options: SlurmOptions) -> list[str]:
    # A rank that ends badly ends the rest, which would wait for it in vain.
    words = ["srun", "--kill-on-bad-exit=1"]
    if options.container:
        words.append(f"--container-image={options.container}")
    if options.mounts:
        words.append(f"--container-mounts={options.mounts}")
    line = f"{shlex.join(words)} \\\n  {start.command_line} &"
    if not options.restarts:
        return [line.removesuffix(" &")]
    return [
        "# At the time limit the trainer is asked, once, to save and end; the job queues again.",
        "asked=0",
        'again() { asked=1; scancel --signal=TERM "$SLURM_JOB_ID"; }',
        "trap again USR1",
        line,
        "ranks=$!",
        'wait "$ranks"; code=$?',
        "# A trap ends the first wait, not the ranks.",
        'while kill -0 "$ranks" 2>/dev/null; do wait "$ranks"; code=$?; done',
        "# 143 says that it saved before it was done; other programs end with 0 then.",
        f'if [ "$asked" = 1 ] && {{ [ "$code" = {_ASKED_EXIT_CODE} ] || [ "$code" = 0 ]; }} && '
        f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {options.restarts} ]; then',
        '  echo "meshwright: saved at the time limit, the job queues again" >&2',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
