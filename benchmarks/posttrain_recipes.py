"""Recipes of post-training on one device: positions a second and memory, beside plain training.

Weights are drawn and chats made up, so nothing is learnt that matters: what is measured is how long
a step of packed chats takes by each recipe, and what the device held.
"""

import json
import random
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.result import figure

NAME = "posttrain_recipes"
QUESTION = "How fast are supervised recipes on one device, and how much memory do they take?"
RECIPES = ("sft", "lora", "dora", "dpo", "kto", "reward")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def measure(quick: bool) -> dict[str, object]:
    """Train some steps by each recipe."""
    import torch

    on_gpu = torch.cuda.is_available()
    small = quick or not on_gpu
    length, batch, steps = (128, 2, 4) if small else (4096, 8, 10)
    figures = []
    with TemporaryDirectory() as place:
        folder = Path(place)
        parameters = _write_model(folder / "model", length, small=small)
        for kind in RECIPES:
            _write_records(folder / "records.jsonl", kind, steps * batch * length)
            job = _job(kind, folder, length, batch, steps, small=small)
            step_s, memory_gib = _trained(job, folder / kind)
            figures.append(figure(f"{kind}, speed", batch * length / step_s, "positions/s"))
            if on_gpu:
                figures.append(figure(f"{kind}, memory", memory_gib, "GiB"))
    notes = (
        f"{parameters / 1e6:,.1f}M parameters with drawn weights, {batch} packed sequences of "
        f"{length:,} to a step, {'fp32' if small else 'bf16'}; adapters of rank 16 on all linear "
        f"layers; median of {steps - 2} steps after two. Positions hold prompts, answers and "
        "padding. The reference of dpo and kto is computed before the first step."
    )
    return {"figures": figures, "notes": notes}


def _write_model(folder: Path, length: int, *, small: bool) -> int:
    """Write a model with drawn weights, a tokenizer and a template; return its parameters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from meshwright.run.nn.decoder_builder import build_decoder
    from meshwright.run.nn.huggingface import save_hf_checkpoint
    from meshwright.run.nn.weight_init import materialize
    from meshwright.spec.model import AttentionSpec, BlockSpec, MLPSpec, Model, Rotary

    wide, heads, layers = (64, 4, 2) if small else (1024, 16, 12)
    mixer = AttentionSpec(heads=heads, kv_heads=max(2, heads // 4), head_dim=wide // heads,
                      rotary=Rotary())  # fmt: skip
    block = BlockSpec(name="plain", mixer=mixer, mlp=MLPSpec(width=4 * wide))
    model = Model(
        name="drawn", family="llama", hidden=wide, vocab=512 if small else 32_768,
        blocks=(block,), pattern=f"{layers}*plain", max_positions=length,
    )  # fmt: skip
    decoder = build_decoder(model, dtype=torch.float32 if small else torch.bfloat16)
    materialize(decoder, "cpu", seed=0)
    save_hf_checkpoint(decoder, folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    return sum(one.numel() for one in decoder.parameters())


def _write_records(path: Path, kind: str, tokens: int) -> None:
    """Write records of one kind, with about so many tokens in all; a byte is one."""
    rng = random.Random(0)
    written, lines = 0, []
    most = min(1500, tokens // 8)

    def text(share: float) -> str:
        count = rng.randint(8, max(9, int(most * share)))
        return "".join(rng.choice("bcdfghjkmnpqrst ") for _ in range(count))

    while written < tokens:
        asked = [{"role": "user", "content": text(0.5)}]
        one: dict[str, Any]
        if kind in ("dpo", "reward"):
            one = {"prompt": asked, "chosen": text(0.25), "rejected": text(0.25)}
        elif kind == "kto":
            one = {"prompt": asked, "completion": text(0.25), "label": rng.random() < 0.5}
        else:
            one = {"messages": [*asked, {"role": "assistant", "content": text(0.5)}]}
        line = json.dumps(one)
        lines.append(line)
        written += len(line) // 2
    path.write_text("".join(line + "\n" for line in lines))


def _job(
    kind: str, folder: Path, length: int, batch: int, steps: int, *, small: bool
) -> dict[str, Any]:
    job: dict[str, Any] = {
        "initial_load_path": str(folder / "model"),
        "recipe": {"kind": kind},
        "layout": {"precision": "fp32" if small else "bf16", "microbatch": 1 if small else 2},
        "workload": {
            "tokens": steps * batch * length,
            "sequence_length": length,
            "global_batch": batch,
        },
        "data": {"sources": [str(folder / "records.jsonl")]},
        "optimizer": {"lr": 1e-5, "warmup_steps": 0, "weight_decay": 0.0},
        "checkpoint": {"every_steps": 10_000},
        "logging": {"progress": "none"},
    }
    if small:
        job["device"] = {"threads": 1}
    if kind in ("lora", "dora"):
        job["adapter"] = {"rank": 16, "dora": kind == "dora"}
    return job


def _trained(data: dict[str, Any], run: Path) -> tuple[float, float]:
    """Return the median time of a step, and the most memory that the device had in use."""
    import gc

    import torch

    from meshwright.run.posttrain.supervised import open_recipe, parse_recipe
    from meshwright.run.train.logging.jsonl import read_rows
    from meshwright.run.train.loop import train

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    task, job = open_recipe(parse_recipe(data))
    outcome = train(job, run, task=task, environment={})
    rows = [row["step_s"] for row in read_rows(run / "metrics.jsonl") if "step_s" in row]
    return median(rows[2:]), (outcome.max_memory_allocated_bytes or 0) / 2**30
