"""The commands of `mw`. Help needs only this table; a command's module loads when it is chosen."""

from meshwright.cli.command_entry import CommandEntry, CommandModule


def _load_models() -> CommandModule:
    from meshwright.cli.models import command

    return command


def _load_gpus() -> CommandModule:
    from meshwright.cli.gpus import command

    return command


def _load_clusters() -> CommandModule:
    from meshwright.cli.clusters import command

    return command


def _load_layout() -> CommandModule:
    from meshwright.cli.layout import command

    return command


def _load_plan() -> CommandModule:
    from meshwright.cli.plan import command

    return command


def _load_plan_serve() -> CommandModule:
    from meshwright.cli.plan.serve import command

    return command


def _load_plan_rl() -> CommandModule:
    from meshwright.cli.plan.rl import command

    return command


def _load_simulate() -> CommandModule:
    from meshwright.cli.simulate import command

    return command


def _load_simulate_serve() -> CommandModule:
    from meshwright.cli.simulate.serve import command

    return command


def _load_simulate_rl() -> CommandModule:
    from meshwright.cli.simulate.rl import command

    return command


def _load_whatif() -> CommandModule:
    from meshwright.cli.whatif import command

    return command


def _load_validate() -> CommandModule:
    from meshwright.cli.validate import command

    return command


def _load_queue() -> CommandModule:
    from meshwright.cli.queue import command

    return command


def _load_collective() -> CommandModule:
    from meshwright.cli.collective import command

    return command


def _load_train() -> CommandModule:
    from meshwright.cli.train import command

    return command


def _load_parity() -> CommandModule:
    from meshwright.cli.parity import command

    return command


def _load_bench() -> CommandModule:
    from meshwright.cli.bench import command

    return command


def _load_calibrate() -> CommandModule:
    from meshwright.cli.calibrate import command

    return command


def _load_twin() -> CommandModule:
    from meshwright.cli.twin import command

    return command


def _load_launch() -> CommandModule:
    from meshwright.cli.launch import command

    return command


def _load_data() -> CommandModule:
    from meshwright.cli.data import command

    return command


def _load_serve() -> CommandModule:
    from meshwright.cli.serve import command

    return command


def _load_chat() -> CommandModule:
    from meshwright.cli.chat import command

    return command


def _load_generate() -> CommandModule:
    from meshwright.cli.generate import command

    return command


def _load_evaluate() -> CommandModule:
    from meshwright.cli.evaluate import command

    return command


def _load_convert() -> CommandModule:
    from meshwright.cli.convert import command

    return command


def _load_watch() -> CommandModule:
    from meshwright.cli.watch import command

    return command


def _load_analyze() -> CommandModule:
    from meshwright.cli.analyze import command

    return command


def _load_diff() -> CommandModule:
    from meshwright.cli.diff import command

    return command


def _load_roofline() -> CommandModule:
    from meshwright.cli.roofline import command

    return command


def _load_timeline() -> CommandModule:
    from meshwright.cli.timeline import command

    return command


def _load_hang() -> CommandModule:
    from meshwright.cli.hang import command

    return command


def _load_memory() -> CommandModule:
    from meshwright.cli.memory import command as memory_snapshot

    return memory_snapshot


def _load_fleet() -> CommandModule:
    from meshwright.cli.fleet import command

    return command


def _load_doctor() -> CommandModule:
    from meshwright.cli.doctor import command

    return command


def _load_completion() -> CommandModule:
    from meshwright.cli.completion import command

    return command


COMMANDS: dict[str, CommandEntry] = {
    "models": CommandEntry("models of the catalog, or one in full", "Look up", _load_models),
    "gpus": CommandEntry("GPUs of the catalog, or one in full", "Look up", _load_gpus),
    "clusters": CommandEntry("clusters of the catalog, or one in full", "Look up", _load_clusters),
    "layout": CommandEntry(
        "check, size, export or import a parallel layout", "Describe", _load_layout
    ),
    "plan": CommandEntry(
        "find the fastest layout there is, and say why it wins", "Predict", _load_plan
    ),
    "plan serve": CommandEntry(
        "find the cheapest way to serve requests in time", "Predict", _load_plan_serve
    ),
    "plan rl": CommandEntry("split GPUs between generating and training", "Predict", _load_plan_rl),
    "simulate": CommandEntry(
        "predict one training step and where its time goes", "Predict", _load_simulate
    ),
    "simulate serve": CommandEntry(
        "predict how requests to a served model fare", "Predict", _load_simulate_serve
    ),
    "simulate rl": CommandEntry(
        "predict steps of reinforcement learning", "Predict", _load_simulate_rl
    ),
    "whatif": CommandEntry(
        "change one thing and see what the step makes of it", "Predict", _load_whatif
    ),
    "validate": CommandEntry(
        "score predictions against published measurements", "Predict", _load_validate
    ),
    "queue": CommandEntry(
        "what another scheduling policy would make of a cluster's jobs", "Predict", _load_queue
    ),
    "collective": CommandEntry(
        "collective algorithms: prove, draw, simulate, run, export", "Predict", _load_collective
    ),
    "train": CommandEntry(
        "train a model as one TOML file says, or go on training", "Run", _load_train
    ),
    "parity": CommandEntry(
        "compare layouts with one device: first operation off, or a dry run", "Run", _load_parity
    ),
    "bench": CommandEntry(
        "measure what this machine really does, and whether it is sound", "Run", _load_bench
    ),
    "calibrate": CommandEntry(
        "fit the cost models to what mw bench measured on a device", "Run", _load_calibrate
    ),
    "twin": CommandEntry("compare steps of this machine with their prediction", "Run", _load_twin),
    "launch": CommandEntry(
        "write a training job for Slurm, Kubernetes or Ray; submit it", "Run", _load_launch
    ),
    "data": CommandEntry("tokenize text, look into tokens, train a tokenizer", "Run", _load_data),
    "serve": CommandEntry(
        "answer over HTTP as OpenAI's API does, many requests at a time", "Run", _load_serve
    ),
    "chat": CommandEntry("talk to a model in the terminal", "Run", _load_chat),
    "generate": CommandEntry(
        "continue prompts offline, or measure how fast that goes", "Run", _load_generate
    ),
    "evaluate": CommandEntry(
        "how often a model answers right, or a reward model prefers", "Run", _load_evaluate
    ),
    "convert": CommandEntry(
        "a training run's weights as a Hugging Face folder", "Run", _load_convert
    ),
    "watch": CommandEntry(
        "run a job and watch it: captures, slowdowns, hangs",
        "Observe",
        _load_watch,
        takes_job_command=True,
    ),
    "analyze": CommandEntry(
        "where a profile's time goes, what is wrong, what to do", "Observe", _load_analyze
    ),
    "diff": CommandEntry(
        "two profiles, or a prediction and one: what changed, by cost", "Observe", _load_diff
    ),
    "roofline": CommandEntry(
        "kernels of a profile against what the device can do", "Observe", _load_roofline
    ),
    "timeline": CommandEntry(
        "look into a recorded timeline, or open it in Perfetto", "Observe", _load_timeline
    ),
    "hang": CommandEntry(
        "which ranks hung a job, from flight-recorder dumps", "Observe", _load_hang
    ),
    "memory": CommandEntry(
        "where GPU memory went, from a CUDA memory snapshot", "Observe", _load_memory
    ),
    "fleet": CommandEntry(
        "where a cluster's GPU-hours go, and what gives them back", "Observe", _load_fleet
    ),
    "doctor": CommandEntry("what this machine has, for bug reports", "Help", _load_doctor),
    "completion": CommandEntry("shell completion for bash, zsh or fish", "Help", _load_completion),
}
