"""Flags that describe reinforcement learning: what a step generates, and who trains on it."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from meshwright.cli.request_flags import parse_lengths
from meshwright.cli.setting_flags import only_flags_set
from meshwright.predict.rl.outcome import Outcome
from meshwright.predict.rl.peaks import GENERATING, SYNCING, TRAINING
from meshwright.predict.rl.setup import Rounds, Setup
from meshwright.spec.bounds import require, whole
from meshwright.spec.layout.words import short_name
from meshwright.spec.units import format_bytes, format_some, parse_count
from meshwright.spec.workload import Adapter, LogNormal

ROUNDS = {
    "prompts": "128", "samples": "16", "prompt": "256", "output": "lognormal:1024:0.6",
    "longest": None, "seed": "0", "updates": "1", "forwards": "1", "packed": None,
}  # fmt: skip
"""What a step is where neither flags nor a file say so."""
LONGEST = 8192
"""Where answers are cut that have no longest one, where nobody says."""
_LENGTHS = ("prompt", "output")
_FEW = 0.01
"""Less than this share of answers is cut without a word."""
_MEANWHILE: dict[str, str] = {
    GENERATING: "engines generate", SYNCING: "new weights come in", TRAINING: "the trainer trains",
}  # fmt: skip
TRAINER = ("tp", "pp", "ep")
"""Degrees of the trainer's layout that flags may set; `dp` is what is left."""


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """Add what every step generates and trains on."""
    group = parser.add_argument_group("what a step generates")
    lengths = "N, LOW-HIGH, or lognormal:MEDIAN:SIGMA"
    group.add_argument("--prompts", metavar="N", help="groups (default: 128)")
    group.add_argument("--samples", metavar="N", help="answers to each prompt (default: 16)")
    group.add_argument(
        "--prompt", metavar="TOKENS",
        help=f"tokens of prompts: {lengths} (default: 256)",
    )  # fmt: skip
    group.add_argument(
        "--output", metavar="TOKENS",
        help="tokens of answers, likewise (default: lognormal:1024:0.6)",
    )  # fmt: skip
    group.add_argument(
        "--longest", metavar="TOKENS",
        help="answers are cut there (default: 8192, or the end of an --output that has one)",
    )  # fmt: skip
    group.add_argument("--seed", metavar="N", help="draws lengths")
    trained = parser.add_argument_group("training")
    trained.add_argument("--updates", metavar="N", help="minibatches of a step (default: 1)")
    trained.add_argument(
        "--forwards", metavar="N",
        help="passes without gradients: 1 for the policy's log-probabilities (default), 2 with "
        "those of a reference model",
    )  # fmt: skip
    trained.add_argument(
        "--packed", metavar="TOKENS", help="of a microbatch (default: the longest sample)"
    )
    trained.add_argument(
        "--adapter-rank", metavar="N",
        help="rank of an adapter on every linear layer (LoRA), which is all that is trained",
    )  # fmt: skip
    for name in TRAINER:
        trained.add_argument(
            f"--train-{name}", metavar="N", help=f"{name} of the trainer (default: the fastest)"
        )
        only_flags_set(parser, **{f"training.{name}": f"--train-{name}"})
    only_flags_set(parser, degrees="--tp")


def rounds_of(args: argparse.Namespace, known: Mapping[str, Any] | None = None) -> Rounds:
    """Return what the flags say of a step; what is `known` otherwise stands behind them."""
    fields: dict[str, Any] = {**ROUNDS, **(known or {})}
    for name in ROUNDS:
        text = getattr(args, name)
        value = fields[name] if text is None else text
        if isinstance(value, str):
            parse = parse_lengths if name in _LENGTHS else parse_count
            value = parse(value, f"--{name}")
        fields[name] = value
    if args.adapter_rank is not None:
        rank = parse_count(args.adapter_rank, "--adapter-rank")
        require(whole("--adapter-rank", rank, most=4096))
        fields["adapter"] = Adapter(rank=rank)
    require(
        whole("--prompts", fields["prompts"], most=100_000),
        whole("--samples", fields["samples"], most=10_000),
    )
    if fields["longest"] is None:
        output = fields["output"]
        end = 0 if isinstance(output, LogNormal) else output.quantile(1.0)
        fields["longest"] = max(LONGEST, end)
    return Rounds(**fields)


def rounds_remarks(rounds: Rounds) -> list[str]:
    """Say how many answers are cut, where these are more than a few."""
    cut = 1 - rounds.output.moment(0, rounds.longest)
    if cut < _FEW:
        return []
    where = f"{rounds.longest:,} tokens (--longest)"
    return [f"{cut:.0%} of the answers that --output says are longer than {where}, and cut there"]


def adapter_remarks(setup: Setup) -> list[str]:
    """Say where `mw train` cannot do what is simulated: it has an adapter on single devices."""
    if setup.rounds.adapter is None:
        return []
    if setup.training.gpus == 1 and setup.engines.replica.layout.gpus == 1:
        return []
    return ["mw train has an adapter on one training device and engines of one device each: "
            "this is for trainers that spread it"]  # fmt: skip


def trainer_fixed(args: argparse.Namespace) -> dict[str, tuple[object, ...]]:
    """Return the fields of the trainer's layout that flags set."""
    found: dict[str, tuple[object, ...]] = {}
    for name in TRAINER:
        text = getattr(args, f"train_{name}")
        if text is not None:
            count = parse_count(text, f"--train-{name}")
            require(whole(f"--train-{name}", count, most=4096))
            found[name] = (count,)
    return found


def setup_data(setup: Setup) -> dict[str, Any]:
    """Return a setup as plain data."""
    replica, layout = setup.engines.replica, setup.training
    return {
        "model": setup.model.name,
        "cluster": setup.cluster.name,
        "placement": setup.placement,
        "max_staleness": setup.arrangement.max_staleness,
        "too_old": setup.too_old,
        "running": setup.running,
        "engine": replica.engine.name,
        "engines": setup.engines.count,
        "engine_tp": replica.layout.tp,
        "rollout_gpus": setup.engines.gpus,
        "training_gpus": layout.gpus,
        "training": {name: getattr(layout, name) for name in ("tp", "pp", "dp", "ep", "recompute")},
        "rounds": msgspec.to_builtins(setup.rounds),
    }


def outcome_data(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain data."""
    return {**msgspec.to_builtins(outcome), "skew": outcome.skew}


def too_full(setup: Setup, outcome: Outcome) -> Iterator[str]:
    """Say where a GPU would hold more than it has, of whatever is done."""
    there = setup.cluster.gpu.memory_bytes
    for doing, held in outcome.peak_bytes.items():
        if held > there:
            full = f"{format_bytes(held)} of {format_bytes(there)}"
            yield f"while {_MEANWHILE[doing]} a GPU would hold {full}{_fullness(doing, setup)}"


def _fullness(doing: str, setup: Setup) -> str:
    """Say what a GPU is full of, and what would do."""
    if doing == SYNCING and setup.shares_gpus:
        return ", as they are kept aside until all have come; with a larger --tp each has fewer"
    if doing == TRAINING and setup.beside:
        return ", as an engine keeps its memory beside it; --placement colocated takes turns"
    if doing == TRAINING and setup.rounds.has_reference:
        return ", as a reference model lies beside the policy; let more GPUs train"
    return ""


def gpus_words(setup: Setup) -> str:
    """Say which GPUs do what."""
    gpu, engines = setup.cluster.gpu.name, setup.engines
    tp = engines.replica.layout.tp
    alike = f"{format_some(engines.count, 'engine')} of {format_some(tp, 'GPU')}"
    layout = setup.training
    trainer = format_some(layout.gpus, "GPU that trains", "GPUs that train")
    trainer += f" ({short_name(layout)})" if layout.gpus > 1 else ""
    if setup.placement == "colocated":
        return f"{setup.gpus} × {gpu}, by turns: {alike}, and {trainer}"
    return f"{setup.gpus} × {gpu}: {alike}, and {trainer}"
