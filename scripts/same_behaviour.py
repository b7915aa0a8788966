"""Record what Meshwright computes, and compare two records: `python -m scripts.same_behaviour`.

A refactoring must not change a number. This script runs commands and keeps their answers: losses of
short fixed-seed jobs, predicted steps and memory, plans, simulations, served tokens, findings of
real traces and a fleet report. Records of two revisions are then compared exactly.

    python -m scripts.same_behaviour record before.json --tree ../old   # the old revision
    python -m scripts.same_behaviour record after.json
    python -m scripts.same_behaviour compare before.json after.json

Keys may be renamed between the revisions, values may not: fields with the same key are compared
with each other, and the numbers of the remaining fields have to agree as a set. A renamed word (a
string value, or a switch in place of a word) is listed, and accepted with `--allow-renamed-words`.
Where the other revision spells a flag or a key in another way, `--words FILE` maps today's words to
those of that revision, as a JSON object.

The cases that read real traces need the folder `../shared` and are left out where it is absent.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
MAX_SHOWN = 12
"""Differences that `compare` prints for each case."""

JOB = """
seed = {seed}
[model]
name = "tiny"
hidden = 64
vocab = 260
pattern = "4*dense"
max_positions = 128
[[model.blocks]]
name = "dense"
mixer = {{ kind = "attention", heads = 4, kv_heads = 2, head_dim = 16, rotary = {{}} }}
mlp = {{ kind = "mlp", width = 192 }}
[layout]
precision = "{precision}"
microbatch = 2
{layout}
[workload]
tokens = 20_480
sequence_length = 128
global_batch = 8
packing = "concat"
[data]
sources = ["builtin:1MB"]
tokenizer = "bytes"
validation_fraction = 0.05
cache_dir = "{{cache}}"
[optimizer]
lr = 4e-3
schedule = "wsd"
warmup_steps = 5
decay_ratio = 0.3
[eval]
every_steps = 10
sequences = 16
[device]
type = "cpu"
threads = 1
"""


LAYOUTS = {
    "one device": (1, ""),
    "dp 2": (2, "dp = 2"),
    "tp 2": (2, "tp = 2"),
    "tp 2, pp 2": (4, "tp = 2\npp = 2"),
    "dp 4, ZeRO 3": (4, "dp = 4\nzero = 3"),
}
"""Ranks and keys of the layouts whose losses are recorded."""


class Case(NamedTuple):
    """A command whose answer is recorded."""

    name: str
    argv: tuple[str, ...]
    """Arguments of `mw`; `{work}` is the scratch folder, `{shared}` the folder of shared data."""
    outputs: tuple[str, ...] = ()
    """Files under the scratch folder that are recorded in place of what the command prints."""
    fields: tuple[str, ...] = ()
    """Patterns of the keys that are recorded of each row of `outputs`; all keys where empty."""
    measures: bool = False
    """The command measures this machine or writes files, so that `MEASURED` keys vary."""


LOSS_FIELDS = (
    "loss",
    "eval_loss.*",
    "grad_norm",
    "reward_.*",
    "entropy",
    "kl.*",
    "length_.*",
)
"""Fields of `metrics.jsonl` that do not depend on the clock."""
VOLATILE = re.compile(
    r"(.*_)?(elapsed|wall|unix|version|path|folder|file|written|read|seconds|cpu|command|commands|store"
    r"|source|sources|cache|report|took|search_s|duration|start)(_s)?|id|created"
)
"""Keys whose values depend on the clock, on the machine or on where files lie."""
MEASURED = re.compile(r"(.*_)?(rows_per_s|tokens_per_s|requests_per_s|size|size_bytes)")
"""Keys of measured rates and of file sizes; in cases that only predict, such rates are compared."""

PLANS = (
    ("llama3.1-8b", "h100-superpod", 8),
    ("llama3.1-8b", "h100-superpod", 64),
    ("llama3.1-8b", "h200-superpod", 32),
    ("llama3.1-8b", "gb200-nvl72", 72),
    ("llama3.1-8b", "h100-superpod", 512),
    ("llama3.1-70b", "h100-superpod", 32),
    ("llama3.1-70b", "h100-superpod", 64),
    ("llama3.1-70b", "h100-superpod", 128),
    ("llama3.1-70b", "h100-superpod", 512),
    ("llama3.1-70b", "h200-superpod", 64),
    ("llama3.1-70b", "gb200-nvl72", 72),
    ("llama3.1-70b", "gb200-nvl72", 144),
    ("llama3.1-405b", "h100-superpod", 512),
    ("llama3.1-405b", "h200-superpod", 256),
    ("llama3.1-405b", "gb200-nvl72", 288),
    ("qwen3-30b-a3b", "h100-superpod", 16),
    ("qwen3-30b-a3b", "h100-superpod", 64),
    ("qwen3-30b-a3b", "h200-superpod", 32),
    ("qwen3-30b-a3b", "gb200-nvl72", 72),
    ("deepseek-v3", "h100-superpod", 512),
    ("deepseek-v3", "h200-superpod", 256),
    ("mixtral-8x7b", "h100-superpod", 32),
    ("mixtral-8x7b", "h100-superpod", 128),
    ("qwen3-8b", "h100-superpod", 16),
    ("qwen3-8b", "h200-superpod", 8),
    ("qwen3-32b", "h100-superpod", 32),
    ("qwen3-32b", "h200-superpod", 64),
    ("qwen3-32b", "gb200-nvl72", 72),
    ("qwen3-235b-a22b", "h200-superpod", 128),
    ("qwen3-235b-a22b", "h100-superpod", 256),
)

SERVING_PLANS = (
    ("llama3.1-8b", "h200-superpod", "20", "500", "200", "ttft=500ms,itl=30ms", "vllm"),
    ("llama3.1-8b", "h100-superpod", "10", "2000", "200", "ttft=1s,itl=50ms", "vllm"),
    ("llama3.1-8b", "h100-superpod", "10", "2000", "200", "ttft=1s,itl=50ms", "sglang"),
    ("llama3.1-8b", "h100-superpod", "5", "1000", "500", "ttft=1s,tpot=40ms", "tensorrt-llm"),
    ("llama3.1-70b", "h100-superpod", "2", "1000", "250", "ttft=2s,itl=60ms", "vllm"),
    ("llama3.1-70b", "h200-superpod", "4", "1000", "250", "ttft=2s,itl=60ms", "vllm"),
    ("llama3.1-70b", "h200-superpod", "4", "1000", "250", "ttft=2s,itl=60ms", "sglang"),
    ("qwen3-30b-a3b", "h100-superpod", "10", "800", "300", "ttft=1s,itl=40ms", "vllm"),
    ("qwen3-8b", "h200-superpod", "30", "300", "300", "ttft=500ms,itl=40ms", "vllm"),
    ("qwen3-32b", "h200-superpod", "5", "1000", "300", "ttft=1s,itl=50ms", "vllm"),
)

ARCHITECTURES = ("llama", "qwen3", "mixtral", "gemma2", "gpt_neox")
"""Five small models of random weights, made by transformers."""
PROMPTS = ("The quick brown fox", "0 1 2 3 4 5", "import numpy as np", "a")

TRACES = (
    "hta/trace_compare", "hta/triton_example", "hta/critical_path", "hta/ns_resolution_trace",
    "hta/cupti_profiler", "hta/amd_trace", "kineto-tb-plugin/resnet50_num_workers_0",
    "kineto-tb-plugin/resnet50_num_workers_4", "aorta/mi350x.pt.trace.json.gz",
    "nsys-sqlite/mfu_2gpu_before.sqlite.gz", "nsys-sqlite/mfu_2gpu_after.sqlite.gz",
    "modded-nanogpt/ab-2025-10-31",
)  # fmt: skip


def list_cases() -> Iterator[Case]:
    """Yield every case, quick ones first."""
    yield from _list_predictions()
    yield from _list_jobs()
    for name in ARCHITECTURES:
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        argv = (
            "generate",
            f"{{work}}/models/{name}",
            *prompts,
            "--temperature",
            "0",
            "--max-tokens",
            "24",
            "--dtype",
            "fp32",
        )
        yield Case(f"tokens of {name}", argv, measures=True)
    if SHARED.exists():
        for trace in TRACES:
            yield Case(
                f"findings of {trace}", ("analyze", f"{{shared}}/traces/{trace}", "--no-cache")
            )
        yield Case(
            "fleet ingest",
            ("fleet", "ingest", "{shared}/fleet_traces/muri", "--store", "{work}/fleet"),
            measures=True,
        )
        yield Case("fleet report", ("fleet", "report", "--store", "{work}/fleet"))
        yield Case("fleet patterns", ("fleet", "patterns", "--store", "{work}/fleet"))


def _list_predictions() -> Iterator[Case]:
    yield Case("predicted steps and memory of published runs", ("validate", "training"))
    yield Case("simulate", ("simulate", "{tree}/examples/llama3-70b.toml"))
    requests = ("--rate", "8", "--prompt", "1000", "--output", "200", "--requests", "400")
    yield Case(
        "simulate serve",
        ("simulate", "serve", "llama3.1-8b", "--cluster", "h100-superpod", *requests),
    )
    yield Case(
        "simulate rl",
        (
            "simulate",
            "rl",
            "llama3.1-8b",
            "--cluster",
            "h100-superpod",
            "--gpus",
            "16",
            "--placement",
            "colocated",
        ),
    )
    yield Case(
        "simulate rl async",
        (
            "simulate",
            "rl",
            "qwen3-30b-a3b",
            "--cluster",
            "h100-superpod",
            "--gpus",
            "32",
            "--placement",
            "async",
            "--rollout-gpus",
            "16",
            "--tp",
            "2",
            "--max-staleness",
            "4",
        ),
    )
    for model, cluster, gpus in PLANS:
        argv = ("plan", model, "--cluster", cluster, "--gpus", str(gpus))
        yield Case(f"plan {model} on {gpus} of {cluster}", argv)
    for model, cluster, rate, prompt, output, slo, engine in SERVING_PLANS:
        serving_argv = (
            "plan",
            "serve",
            model,
            "--cluster",
            cluster,
            "--gpus",
            "16",
            "--rate",
            rate,
            "--prompt",
            prompt,
            "--output",
            output,
            "--slo",
            slo,
            "--engine",
            engine,
        )
        yield Case(f"plan serve {model} with {engine} on {cluster}", serving_argv)


def _list_jobs() -> Iterator[Case]:
    for precision in ("fp32", "bf16"):
        for name, (ranks, _) in LAYOUTS.items():
            file = _name_job(name, precision)
            several = ("--nproc-per-node", str(ranks)) if ranks > 1 else ()
            run = f"runs/{file[:-5]}"
            argv = ("train", f"{{work}}/{file}", "--output-dir", f"{{work}}/{run}", *several)
            yield Case(
                f"losses of {name} in {precision}", argv, (f"{run}/metrics.jsonl",), LOSS_FIELDS
            )
    sft = (
        "train",
        "--recipe",
        "sft",
        "{work}/models/llama",
        "data.sources={work}/chats.jsonl",
        "epochs=1",
        "--output-dir",
        "{work}/runs/sft",
    )
    yield Case("losses of SFT", sft, ("runs/sft/metrics.jsonl",), LOSS_FIELDS)
    grpo = (
        "train",
        "--recipe",
        "grpo",
        "sorting-digits",
        "steps=6",
        "--output-dir",
        "{work}/runs/grpo",
    )
    yield Case("losses of GRPO", grpo, ("runs/grpo/metrics.jsonl",), LOSS_FIELDS)


def write_inputs(work: Path, words: Mapping[str, str]) -> None:
    """Write the job files, chats and small models that the cases read."""
    for precision in ("fp32", "bf16"):
        for name, (_, layout) in LAYOUTS.items():
            text = _respell(JOB.format(seed=7, precision=precision, layout=layout), words)
            text = text.replace("{cache}", str(work / "tokens"))
            (work / _name_job(name, precision)).write_text(text, encoding="utf-8")
    chats = [
        {"messages": [{"role": "user", "content": f"What is {a} plus {b}?"},
                      {"role": "assistant", "content": str(a + b)}]}
        for a in range(8) for b in range(8)
    ]  # fmt: skip
    lines = "".join(json.dumps(chat) + "\n" for chat in chats)
    (work / "chats.jsonl").write_text(lines, encoding="utf-8")
    for name in ARCHITECTURES:
        _write_model(work / "models" / name, name)


def _name_job(layout: str, precision: str) -> str:
    return f"{layout.replace(',', '').replace(' ', '-')}-{precision}.toml"


def _write_model(folder: Path, architecture: str) -> None:
    """Write a small model of random weights and a tokenizer of bytes as a Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(sum(architecture.encode()))
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 258,
        "max_position_embeddings": 256,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 257,
    }
    config = AutoConfig.for_model(architecture, **sizes)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<s>": 256, "</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    chat = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' "
        "%}</s>{% endif %}\n{% endfor %}"
    )
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=chat
    )
    fast.save_pretrained(folder)


def record(tree: Path, words: Mapping[str, str], only: str | None) -> dict[str, Any]:
    """Run every case with the package of a tree; return the answers by case."""
    answers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_inputs(work, words)
        for case in list_cases():
            if only and not re.search(only, case.name):
                continue
            began_s = time.monotonic()
            answers[case.name] = _run(case, tree, work, words)
            failed = "error" in answers[case.name]
            print(f"{time.monotonic() - began_s:7.1f} s  {case.name}{': FAILED' if failed else ''}",
                  file=sys.stderr, flush=True)  # fmt: skip
    return answers


def _run(case: Case, tree: Path, work: Path, words: Mapping[str, str]) -> Any:
    places = {"work": str(work), "shared": str(SHARED), "tree": str(tree)}
    argv = [_respell(word, words).format(**places) for word in case.argv]
    environment = os.environ | {
        "PYTHONPATH": f"{tree / 'src'}", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0", "XDG_CACHE_HOME": str(work / "cache"), "NO_COLOR": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "meshwright", *argv, "--json"]
    run = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    if run.returncode not in (0, 1):
        return {"error": f"exit {run.returncode}: {run.stderr.strip()[-1500:]}"}
    if case.outputs:
        fields = [_respell(field, words) for field in case.fields]
        return [_read_rows(work / output, fields) for output in case.outputs]
    return _drop_volatile(json.loads(run.stdout), measured=case.measures)


def _read_rows(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    pattern = re.compile("|".join(f"(?:{field})" for field in fields))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{key: row[key] for key in row if pattern.fullmatch(key)} for row in rows]


def _drop_volatile(value: Any, *, measured: bool) -> Any:
    match value:
        case dict():
            return {
                key: _drop_volatile(item, measured=measured)
                for key, item in value.items()
                if not VOLATILE.fullmatch(key) and not (measured and MEASURED.fullmatch(key))
            }
        case list():
            return [_drop_volatile(item, measured=measured) for item in value]
        case _:
            return value


def _respell(text: str, words: Mapping[str, str]) -> str:
    """Replace today's words by those of the other revision."""
    if not words:
        return text
    ends = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return re.sub(rf"(?<![\w-])(?:{ends})(?![\w-])", lambda match: words[match[0]], text)


class Difference(NamedTuple):
    """Where two answers differ."""

    where: str
    before: Any
    after: Any
    renamed: bool
    """Only a string differs, or the set of keys: a renamed word."""


def compare_values(before: Any, after: Any, where: str = "") -> Iterator[Difference]:
    """Yield what differs between two answers; keys may be renamed."""
    match before, after:
        case dict(), dict():
            for key in before.keys() & after.keys():
                yield from compare_values(before[key], after[key], f"{where}.{key}")
            lost = {key: before[key] for key in before.keys() - after.keys()}
            added = {key: after[key] for key in after.keys() - before.keys()}
            yield from _compare_unmatched(lost, added, where)
        case list(), list() if len(before) == len(after):
            for index, (old, new) in enumerate(zip(before, after, strict=True)):
                yield from compare_values(old, new, f"{where}[{index}]")
        case str(), str():
            if before != after:
                yield Difference(where, before, after, renamed=True)
        case float(), float() if math.isnan(before) and math.isnan(after):
            pass
        case _:
            if type(before) is not type(after) or before != after:
                yield Difference(where, before, after, renamed=False)


def _compare_unmatched(
    lost: dict[str, Any], added: dict[str, Any], where: str
) -> Iterator[Difference]:
    """Compare fields that only one side has: their numbers have to agree as a set."""
    before, after = Counter(_list_numbers(lost)), Counter(_list_numbers(added))
    if before != after:
        yield Difference(
            f"{where}: {sorted(lost)} -> {sorted(added)}",
            sorted((before - after).elements(), key=str)[:MAX_SHOWN],
            sorted((after - before).elements(), key=str)[:MAX_SHOWN],
            renamed=False,
        )


def _list_numbers(value: Any) -> Iterator[str]:
    match value:
        case dict():
            for item in value.values():
                yield from _list_numbers(item)
        case list():
            for item in value:
                yield from _list_numbers(item)
        case str() | bool() | None:
            pass
        case _:
            yield repr(value)


def compare(before: dict[str, Any], after: dict[str, Any], *, allow_renamed_words: bool) -> int:
    """Print the differences of two records; return how many cases differ."""
    num_different = 0
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            print(f"{name}: only in {'the first' if name in before else 'the second'} record")
            num_different += 1
            continue
        if "error" in before[name] or "error" in after[name]:
            print(f"{name}: failed: {before[name] if 'error' in before[name] else after[name]}")
            num_different += 1
            continue
        found = list(compare_values(before[name], after[name]))
        shown = [each for each in found if not (each.renamed and allow_renamed_words)]
        for difference in shown[:MAX_SHOWN]:
            print(f"{name}{difference.where}: {difference.before!r} -> {difference.after!r}")
        if len(shown) > MAX_SHOWN:
            print(f"{name}: {len(shown) - MAX_SHOWN} more")
        num_different += bool(shown)
    print(f"{len(before.keys() | after.keys())} cases, {num_different} differ")
    return num_different


def main() -> int:
    """Record or compare, as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="run every case and write the answers")
    recording.add_argument("out", type=Path)
    recording.add_argument(
        "--tree", type=Path, default=ROOT, help="the checkout to run (default: this one)"
    )
    recording.add_argument(
        "--words", type=Path, help="JSON object: today's words to those of the tree"
    )
    recording.add_argument(
        "--only", metavar="REGEX", help="record only the cases whose name matches"
    )
    comparing = verbs.add_parser("compare", help="compare two records exactly")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument(
        "--allow-renamed-words", action="store_true", help="accept changed strings"
    )
    args = parser.parse_args()
    if args.verb == "record":
        words = json.loads(args.words.read_text(encoding="utf-8")) if args.words else {}
        answers = record(args.tree.resolve(), words, args.only)
        args.out.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
        return 1 if any("error" in answer for answer in answers.values()) else 0
    before, after = (
        json.loads(path.read_text(encoding="utf-8")) for path in (args.before, args.after)
    )
    return 1 if compare(before, after, allow_renamed_words=args.allow_renamed_words) else 0


if __name__ == "__main__":
    sys.exit(main())
