"""From records to answers: what a recipe trained is exported, served and scored."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="trains a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import torch

from meshwright.errors import InputError
from meshwright.run.posttrain.data import prepare_dataset
from meshwright.run.posttrain.supervised import RewardModel, export_recipe
from meshwright.run.serve.llm import LLM
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams
from tests.run.posttrain.data.small_words import words_of
from tests.run.posttrain.supervised.tiny import chats, model_folder, pairs, recipe_job, trained

GIVEN: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "max_model_len": 64}


def answers(llm: LLM, adapter: str | None = None) -> list[str]:
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    asks = []
    for one in chats(10):
        text = llm.tokenizer.apply_chat_template(one["messages"][:1], add_generation_prompt=True)
        prompt = tuple(llm.tokenizer.encode(text, special=False))
        asks.append(Request(prompt_token_ids=prompt, sampling_params=greedy, lora_name=adapter))
    return [each.text for each in llm.run_requests(asks)]


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_is_served_beside_its_model_and_merged_alike(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(recipe_job(kind, tmp_path), run)
    both = LLM(model_folder(), lora_modules={"own": str(run / "adapter")}, **GIVEN)
    learnt, before = answers(both, "own"), answers(both)
    assert learnt != before
    assert json.loads((run / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    wrote = export_recipe(run, tmp_path / "merged", merge=True)
    assert wrote.description == "adapter, merged"
    assert answers(LLM(tmp_path / "merged", **GIVEN)) == learnt
    export_recipe(run, tmp_path / "adapter")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "adapter" / name).read_bytes() == (run / "adapter" / name).read_bytes()


def test_a_whole_model_is_served_and_answers_what_it_was_trained_to(tmp_path: Path) -> None:
    changes = {"epochs": 12.0, "workload": {"global_batch": 4}}
    trained(recipe_job("sft", tmp_path, changes, records=chats(60)), tmp_path / "run")
    wrote = export_recipe(tmp_path / "run", tmp_path / "model")
    assert wrote.dtype == torch.float32
    found = answers(LLM(tmp_path / "model", **GIVEN))
    right = [one["messages"][1]["content"] for one in chats(10)]
    assert sum(a == b for a, b in zip(found, right, strict=True)) >= 8
    with pytest.raises(InputError, match="every weight was trained"):
        export_recipe(tmp_path / "run", tmp_path / "other", merge=True)


@pytest.mark.parametrize("adapter", [None, {"rank": 4}], ids=["whole", "adapter"])
def test_a_reward_model_is_saved_and_scores(adapter: dict[str, Any] | None, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes: dict[str, Any] = {"optimizer": {"lr": 0.003}, "epochs": 2.0}
    changes |= {"adapter": adapter} if adapter else {}
    trained(recipe_job("reward", tmp_path, changes), run)
    if adapter is None:
        export_recipe(run, tmp_path / "model")
        model = RewardModel.load(tmp_path / "model")
    else:
        model = RewardModel.load(model_folder(), adapter=run / "adapter")
        export_recipe(run, tmp_path / "merged", merge=True)
    source = tmp_path / "new.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in pairs(60)[50:]))
    examples = prepare_dataset([source], words_of(), length=64)
    rewards = model.score_examples(examples)
    assert all(chosen > other for chosen, other in zip(rewards[::2], rewards[1::2], strict=True))
    assert rewards == pytest.approx(model.score_examples(examples, most_tokens=20), abs=1e-4)
    if adapter is not None:
        merged = RewardModel.load(tmp_path / "merged").score_examples(examples)
        assert rewards == pytest.approx(merged, abs=1e-3)
    with pytest.raises(InputError, match="gives no rewards"):
        RewardModel.load(model_folder())


def test_a_gguf_file_is_trained_beside_and_merged_into_a_folder(tmp_path: Path) -> None:
    from tests.run.nn.huggingface.reference import opened
    from tests.run.posttrain.data.small_words import CHATML
    from tests.run.serve.model.gguf_made import write_gguf

    file = tmp_path / "base.gguf"
    described = json.loads((model_folder() / "tokenizer.json").read_text())
    described["gguf"] = {"model": "gpt2", "pre": "gpt-2", "bos": 1, "eos": 2, "add_bos": False,
                         "template": CHATML}  # fmt: skip
    write_gguf(file, opened(model_folder()), tokenizer=json.dumps(described))
    job = recipe_job("lora", tmp_path, {"initial_load_path": str(file), "epochs": 2.0})
    trained(job, tmp_path / "run")
    export_recipe(tmp_path / "run", tmp_path / "merged", merge=True)
    both = LLM(file, lora_modules={"own": str(tmp_path / "run" / "adapter")}, **GIVEN)
    assert answers(LLM(tmp_path / "merged", **GIVEN)) == answers(both, "own") != answers(both)
