"""A tiny chat model in a folder, sets of records with something to learn, and jobs on them."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import torch
from msgspec.structs import replace

from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.nn.weight_init import materialize
from meshwright.run.posttrain.supervised import RecipeJob, open_recipe, parse_recipe
from meshwright.run.train.loop import train
from meshwright.run.train.train_result import TrainResult
from meshwright.spec.config_sources import ConfigSource, merge_sources
from meshwright.spec.model import AttentionSpec, BlockSpec, MLPSpec, Model, Rotary
from meshwright.spec.model.huggingface.config_json import read_config
from tests.run.posttrain.data.small_words import CHATML, words_of

LETTERS = "bcdfghjklm"
LENGTH = 64


def deep() -> Model:
    """Return one of more layers."""
    return replace(dense(), pattern="8*plain")


def dense() -> Model:
    """Return a small model."""
    attention = AttentionSpec(heads=2, kv_heads=2, head_dim=16, rotary=Rotary())
    block = BlockSpec(name="plain", mixer=attention, mlp=MLPSpec(width=64))
    return Model(
        name="m", hidden=32, vocab=words_of().vocab_size, blocks=(block,), pattern="2*plain",
        max_positions=LENGTH, family="llama",
    )  # fmt: skip


def sparse() -> Model:
    """Return a small model of routed experts, and one that all tokens share."""
    return read_config(
        {
            "model_type": "qwen2_moe", "hidden_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 48, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "num_hidden_layers": 2, "decoder_sparse_step": 1, "vocab_size": words_of().vocab_size,
            "max_position_embeddings": LENGTH,
        }
    )  # fmt: skip


@cache
def model_folder(made: Callable[[], Model] = dense) -> Path:
    """Return a folder with a model of drawn weights, its tokenizer and its template."""
    folder = Path(mkdtemp(prefix="mw-recipes-"))
    words, model = words_of(), made()
    decoder = build_decoder(model, dtype=torch.float32)
    materialize(decoder, "cpu", seed=0)
    # Adapters leave the head as it is: one of drawn weights could tell words hardly apart.
    decoder.head_weight.data.mul_(30)
    save_hf_checkpoint(decoder, folder)
    words.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}'
    )
    return folder


def letter_of(number: int) -> str:
    """Return the letter of a record; every tenth record, which is held out, has any of them."""
    return LETTERS[(number + number // 10) % len(LETTERS)]


def asked(letter: str, number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{letter} {number}"}]


def chats(count: int = 40) -> list[dict[str, Any]]:
    """Return chats whose answer is the letter that was said, twice."""
    return [
        {"messages": [*asked(letter, n), {"role": "assistant", "content": f"{letter}{letter}"}]}
        for n in range(count)
        for letter in [letter_of(n)]
    ]


def pairs(count: int = 40) -> list[dict[str, Any]]:
    """Return pairs of which `aye` is chosen and `nay` rejected."""
    return [
        {"prompt": asked(letter_of(n), n), "chosen": "aye", "rejected": "nay"} for n in range(count)
    ]


def verdicts(count: int = 40) -> list[dict[str, Any]]:
    """Return answers of which `aye` is liked and `nay` is not."""
    return [
        {
            "prompt": asked(letter_of(n), n),
            "completion": "aye" if liked else "nay",
            "label": liked,
        }
        for n in range(count)
        for liked in [(n + n // 10) % 2 == 0]
    ]


def uneven_verdicts(count: int = 60) -> list[dict[str, Any]]:
    """Return such answers of 1, 2 or 14 words: a replica gets more tokens than another."""
    random = Random(3)
    return [
        each | {"completion": " ".join([each["completion"]] * random.choice([1, 2, 14]))}
        for each in verdicts(count)
    ]


def told(count: int = 40) -> list[dict[str, Any]]:
    """Return what a teacher who draws words at random would have written down."""
    random, size = Random(5), words_of().vocab_size
    return [
        {
            "prompt": [random.randrange(size) for _ in range(2 + n % 4)],
            "tokens": [random.randrange(size) for _ in range(3)],
            "words": [random.sample(range(size), 4) for _ in range(3)],
            "logprobs": [[math.log(p) for p in (0.4, 0.3, 0.1, 0.05)] for _ in range(3)],
        }
        for n in range(count)
    ]


RECORDS = {"dpo": pairs, "ipo": pairs, "reward": pairs, "kto": verdicts, "distillation": told}


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def recipe_data(kind: str, source: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a recipe's job as plain data."""
    data: dict[str, Any] = {
        "seed": 1,
        "initial_load_path": str(model_folder()),
        "recipe": {"kind": kind},
        "epochs": 6.0,
        "layout": {"precision": "fp32", "microbatch": 1},
        "workload": {"sequence_length": LENGTH, "global_batch": 2},
        "data": {"sources": [str(source)], "validation_fraction": 0.1},
        "optimizer": {"lr": 0.01, "warmup_steps": 0, "weight_decay": 0.0},
        "checkpoint": {"every_steps": 5},
        "logging": {"progress": "none"},
        "device": {"threads": 1, "type": "cpu"},
    }
    if kind in ("lora", "dora"):
        data["adapter"] = {"rank": 8, "alpha": 16.0, "dora": kind == "dora"}
    merged = merge_sources(
        [ConfigSource("tiny", data), ConfigSource("changes", changes or {})]
    ).data
    return {name: value for name, value in merged.items() if value is not None}


def recipe_job(
    kind: str, folder: Path, changes: dict[str, Any] | None = None, **records: Any
) -> RecipeJob:
    """Return a recipe's job, its records being written into a folder."""
    made = records.get("records") or RECORDS.get(kind, chats)()
    return parse_recipe(recipe_data(kind, write(folder / "records.jsonl", made), changes))


def trained(job: RecipeJob, run: Path, **more: Any) -> TrainResult:
    """Train a recipe to its end, or as far as `stop_at_step` says."""
    task, counted = open_recipe(job)
    return train(counted, run, task=task, environment={}, **more)
