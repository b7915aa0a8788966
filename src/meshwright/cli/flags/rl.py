"""Flags that describe reinforcement learning: what a step generates, and who trains on it."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from meshwright.cli.flags.problems import declare_flag_names
from meshwright.cli.flags.requests import parse_lengths
from meshwright.predict.rl.rl_memory import GENERATING, SYNCING, TRAINING
from meshwright.predict.rl.rl_metrics import RLMetrics
from meshwright.predict.rl.rl_setup import RLSetup, RolloutBatch
from meshwright.spec.field_checks import check_integer, raise_problems
from meshwright.spec.layout.layout_names import format_short_name
from meshwright.spec.units import format_bytes, format_quantity, parse_count
from meshwright.spec.workload import LogNormalLength, LoRASpec

ROLLOUT_DEFAULTS = {
    "prompts_per_step": "128", "group_size": "16", "prompt_lengths": "256",
    "response_lengths": "lognormal:1024:0.6", "max_response_tokens": None, "seed": "0",
    "updates_per_step": "1", "logprob_passes": "1", "microbatch_tokens": None,
}  # fmt: skip
"""What a step is where neither flags nor a file say so."""
DEFAULT_MAX_TOKENS = 8192
"""Where answers are cut that have no longest one, where nobody says."""
_LENGTH_FLAGS = {"prompt_lengths": "prompt", "response_lengths": "output"}
"""Flags of lengths, by the field that each sets; all other flags have their field's name."""
_FEW = 0.01
"""Less than this share of answers is cut without a word."""
_MEANWHILE: dict[str, str] = {
    GENERATING: "engines generate", SYNCING: "new weights come in", TRAINING: "the trainer trains",
}  # fmt: skip
TRAINER_DEGREES = ("tp", "pp", "ep")
"""Degrees of the trainer's layout that flags may set; `dp` is what is left."""


def add_rollout_flags(parser: argparse.ArgumentParser) -> None:
    """Add what every step generates and trains on."""
    group = parser.add_argument_group("what a step generates")
    lengths = "N, LOW-HIGH, or lognormal:MEDIAN:SIGMA"
    group.add_argument("--prompts-per-step", metavar="N", help="groups (default: 128)")
    group.add_argument("--group-size", metavar="N", help="answers to each prompt (default: 16)")
    group.add_argument(
        "--prompt", metavar="TOKENS",
        help=f"tokens of prompts: {lengths} (default: 256)",
    )  # fmt: skip
    group.add_argument(
        "--output", metavar="TOKENS",
        help="tokens of answers, likewise (default: lognormal:1024:0.6)",
    )  # fmt: skip
    group.add_argument(
        "--max-response-tokens", metavar="TOKENS",
        help="answers are cut there (default: 8192, or the end of an --output that has one)",
    )  # fmt: skip
    group.add_argument("--seed", metavar="N", help="draws lengths")
    trained = parser.add_argument_group("training")
    trained.add_argument(
        "--updates-per-step", metavar="N", help="minibatches of a step (default: 1)"
    )
    trained.add_argument(
        "--logprob-passes", metavar="N",
        help="passes without gradients: 1 for the policy's log-probabilities (default), 2 with "
        "those of a reference model",
    )  # fmt: skip
    trained.add_argument(
        "--microbatch-tokens",
        metavar="TOKENS",
        help="of a microbatch (default: the longest sample)",
    )
    trained.add_argument(
        "--adapter-rank", metavar="N",
        help="rank of an adapter on every linear layer (LoRA), which is all that is trained",
    )  # fmt: skip
    for name in TRAINER_DEGREES:
        trained.add_argument(
            f"--train-{name}", metavar="N", help=f"{name} of the trainer (default: the fastest)"
        )
        declare_flag_names(parser, **{f"trainer_layout.{name}": f"--train-{name}"})
    declare_flag_names(parser, engine_tp_degrees="--tp")


def read_rollouts(args: argparse.Namespace, known: Mapping[str, Any] | None = None) -> RolloutBatch:
    """Return what the flags say of a step; what is `known` otherwise stands behind them."""
    fields: dict[str, Any] = {**ROLLOUT_DEFAULTS, **(known or {})}
    for name in ROLLOUT_DEFAULTS:
        flag = _LENGTH_FLAGS.get(name, name)
        text = getattr(args, flag)
        value = fields[name] if text is None else text
        if isinstance(value, str):
            parse = parse_lengths if name in _LENGTH_FLAGS else parse_count
            value = parse(value, f"--{flag.replace('_', '-')}")
        fields[name] = value
    if args.adapter_rank is not None:
        rank = parse_count(args.adapter_rank, "--adapter-rank")
        raise_problems(check_integer("--adapter-rank", rank, most=4096))
        fields["adapter"] = LoRASpec(rank=rank)
    raise_problems(
        check_integer("--prompts-per-step", fields["prompts_per_step"], most=100_000),
        check_integer("--group-size", fields["group_size"], most=10_000),
    )
    if fields["max_response_tokens"] is None:
        output = fields["response_lengths"]
        end = 0 if isinstance(output, LogNormalLength) else output.quantile(1.0)
        fields["max_response_tokens"] = max(DEFAULT_MAX_TOKENS, end)
    return RolloutBatch(**fields)


def list_rollout_notes(rounds: RolloutBatch) -> list[str]:
    """Say how many answers are cut, where these are more than a few."""
    cut = 1 - rounds.response_lengths.raw_moment(0, rounds.max_response_tokens)
    if cut < _FEW:
        return []
    where = f"{rounds.max_response_tokens:,} tokens (--max-response-tokens)"
    return [f"{cut:.0%} of the answers that --output says are longer than {where}, and cut there"]


def list_adapter_notes(setup: RLSetup) -> list[str]:
    """Say where `mw train` cannot do what is simulated: it has an adapter on single devices."""
    if setup.rollout_batch.adapter is None:
        return []
    if setup.trainer_layout.gpus == 1 and setup.rollout_pool.replica.layout.gpus == 1:
        return []
    return ["mw train has an adapter on one training device and engines of one device each: "
            "this is for trainers that spread it"]  # fmt: skip


def read_trainer_constraints(args: argparse.Namespace) -> dict[str, tuple[object, ...]]:
    """Return the fields of the trainer's layout that flags set."""
    found: dict[str, tuple[object, ...]] = {}
    for name in TRAINER_DEGREES:
        text = getattr(args, f"train_{name}")
        if text is not None:
            count = parse_count(text, f"--train-{name}")
            raise_problems(check_integer(f"--train-{name}", count, most=4096))
            found[name] = (count,)
    return found


def setup_to_data(setup: RLSetup) -> dict[str, Any]:
    """Return a setup as plain data."""
    replica, layout = setup.rollout_pool.replica, setup.trainer_layout
    return {
        "model": setup.model.name,
        "cluster": setup.cluster.name,
        "placement": setup.placement,
        "max_staleness": setup.rollout_policy.max_staleness,
        "on_stale": setup.stale_policy,
        "max_running_groups": setup.max_running_groups,
        "engine": replica.engine.name,
        "engines": setup.rollout_pool.count,
        "engine_tp": replica.layout.tp,
        "rollout_gpus": setup.rollout_pool.gpus,
        "training_gpus": layout.gpus,
        "trainer_layout": {
            name: getattr(layout, name) for name in ("tp", "pp", "dp", "ep", "recompute")
        },
        "rollout_batch": msgspec.to_builtins(setup.rollout_batch),
    }


def outcome_to_data(outcome: RLMetrics) -> dict[str, Any]:
    """Return an outcome as plain data."""
    return {**msgspec.to_builtins(outcome), "length_skew_slowdown": outcome.length_skew_slowdown}


def find_memory_overflows(setup: RLSetup, outcome: RLMetrics) -> Iterator[str]:
    """Say where a GPU would hold more than it has, of whatever is done."""
    there = setup.cluster.gpu.memory_bytes
    for doing, held in outcome.peak_bytes.items():
        if held > there:
            full = f"{format_bytes(held)} of {format_bytes(there)}"
            yield f"while {_MEANWHILE[doing]} a GPU would hold {full}{_fullness(doing, setup)}"


def _fullness(doing: str, setup: RLSetup) -> str:
    """Say what a GPU is full of, and what would do."""
    if doing == SYNCING and setup.shares_gpus:
        return ", as they are kept aside until all have come; with a larger --tp each has fewer"
    if doing == TRAINING and setup.shares_gpus_concurrently:
        return ", as an engine keeps its memory beside it; --placement colocated takes turns"
    if doing == TRAINING and setup.rollout_batch.has_reference:
        return ", as a reference model lies beside the policy; let more GPUs train"
    return ""


def format_gpu_roles(setup: RLSetup) -> str:
    """Say which GPUs do what."""
    gpu, engines = setup.cluster.gpu.name, setup.rollout_pool
    tp = engines.replica.layout.tp
    alike = f"{format_quantity(engines.count, 'engine')} of {format_quantity(tp, 'GPU')}"
    layout = setup.trainer_layout
    trainer = format_quantity(layout.gpus, "GPU that trains", "GPUs that train")
    trainer += f" ({format_short_name(layout)})" if layout.gpus > 1 else ""
    if setup.placement == "colocated":
        return f"{setup.gpus} × {gpu}, by turns: {alike}, and {trainer}"
    return f"{setup.gpus} × {gpu}: {alike}, and {trainer}"
