"""Engines made from folders: on one device or on several, asleep, awake, and with new weights."""

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import msgspec
import torch

from meshwright.errors import InputError
from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine.executor import rank_commands
from meshwright.run.serve.engine.executor.rank_commands import (
    ServingCommandHandler,
    UpdateRejectedError,
)
from meshwright.run.serve.engine.model_runner.model_runner import ModelRunner
from meshwright.run.serve.engine.sequence_state import SequenceState
from meshwright.run.serve.engine_client import MEMORY_TAGS, MemoryTag
from meshwright.run.serve.llm import LLM
from meshwright.run.serve.model.loader import compute_weights_id
from meshwright.run.serve.request import OutputSink, Request
from meshwright.run.serve.sampling_params import SamplingParams, StructuredOutputsParams
from meshwright.spec.scheduler_config import SchedulerConfig
from tests.run.serve.engine.small import reference
from tests.run.serve.engine.test_engine import PROMPTS, expected
from tests.run.serve.model.small import made, small
from tests.run.serve.model.test_gguf import trained

LIMITS = SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=4, block_size=4, num_gpu_blocks=48)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_hf_checkpoint(small(), path)
    trained(digits=True).save(str(path / "tokenizer.json"))
    return path


def llm_of(folder: Path, **given: Any) -> LLM:
    torch.set_num_threads(1)
    return LLM(
        folder, EngineConfig(scheduler_config=LIMITS, device="cpu", max_model_len=64, **given)
    )


def test_a_folder_answers_as_its_model_does(folder: Path) -> None:
    llm = llm_of(folder)
    found = llm.generate(PROMPTS, GREEDY)
    assert [list(each.outputs[0].token_ids) for each in found] == expected()
    assert {what for what, _ in llm.startup_s} >= {"tokenizer", "weights", "cache"}
    assert found[0].text == llm.tokenizer.decode(found[0].outputs[0].token_ids)


def test_who_may_write_most_begins_first_and_answers_keep_their_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, lengths = llm_of(folder), (2, 9, 5, None)
    samplings = [msgspec.structs.replace(GREEDY, max_tokens=most) for most in lengths]
    asked: list[int | None] = []
    taken = llm.engine.add_request

    def add(ask: Request, sink: OutputSink) -> list[SequenceState]:
        asked.append(ask.sampling_params.max_tokens)
        return taken(ask, sink)

    monkeypatch.setattr(llm.engine, "add_request", add)
    found = llm.generate(PROMPTS[:4], samplings)
    assert asked == [None, 9, 5, 2]
    written = [len(each.outputs[0].token_ids) for each in found]
    assert written[:3] == [2, 9, 5]


def test_sleep_gives_memory_back_and_waking_changes_no_answer(folder: Path) -> None:
    llm = llm_of(folder)
    llm.generate(PROMPTS[:2], GREEDY)
    llm.lifecycle.sleep()
    weights = llm.engine.runner.model.decoder.parameters()
    assert sum(weight.numel() for weight in weights) == 0
    with pytest.raises(InputError, match="is sleeping"):
        llm.generate(PROMPTS[:1], GREEDY)
    llm.lifecycle.wake_up()
    found = llm.generate(PROMPTS[:2], GREEDY)
    assert [list(each.outputs[0].token_ids) for each in found] == expected()[:2]
    assert found[0].cached_tokens == 0


@pytest.mark.parametrize("first", MEMORY_TAGS)
@pytest.mark.parametrize("level", [1, 2])
def test_weights_and_cache_wake_one_after_the_other(
    folder: Path, first: MemoryTag, level: int
) -> None:
    def awake() -> set[str]:
        runner = llm.engine.runner
        held = sum(weight.numel() for weight in runner.model.decoder.parameters())
        return {
            name
            for name, size in zip(MEMORY_TAGS, (held, len(runner.kv_cache.layers)), strict=True)
            if size
        }

    llm = llm_of(folder)
    llm.lifecycle.sleep(level)
    assert awake() == set()
    for _ in range(2):
        llm.lifecycle.wake_up([first])
        assert awake() == {first}, "the other one stays asleep"
        assert llm.lifecycle.is_sleeping
    with pytest.raises(InputError, match="is sleeping"):
        llm.generate(PROMPTS[:1], GREEDY)
    if first == "weights":
        llm.lifecycle.update_weights(str(folder))
        assert awake() == {"weights"}, "new weights need no cache"
    else:
        with pytest.raises(InputError, match="has no room for them"):
            llm.lifecycle.update_weights(str(folder))
    llm.lifecycle.wake_up()
    assert awake() == set(MEMORY_TAGS)
    llm.lifecycle.update_weights(str(folder))
    found = llm.generate(PROMPTS[:2], GREEDY)
    assert [list(each.outputs[0].token_ids) for each in found] == expected()[:2]


def test_who_is_half_awake_can_sleep_again(folder: Path) -> None:
    llm = llm_of(folder)
    for part in MEMORY_TAGS:
        llm.lifecycle.sleep()
        llm.lifecycle.wake_up([part])
        llm.lifecycle.sleep()
        runner = llm.engine.runner
        assert sum(weight.numel() for weight in runner.model.decoder.parameters()) == 0
        assert runner.kv_cache.is_sleeping
        llm.lifecycle.wake_up()
    found = llm.generate(PROMPTS[:2], GREEDY)
    assert [list(each.outputs[0].token_ids) for each in found] == expected()[:2]


def no_memory(*_: object, **__: object) -> Any:
    raise RuntimeError("out of memory")


def answers(llm: LLM) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS[:2], GREEDY)]


@pytest.mark.parametrize(
    ("parts", "lacks"),
    [
        (MEMORY_TAGS, "weights"),
        (MEMORY_TAGS, "cache"),
        (MEMORY_TAGS, "graphs"),
        (("cache",), "cache"),
        (("weights",), "graphs"),
    ],
)
def test_who_finds_no_memory_to_wake_with_sleeps_on_and_wakes_later(
    folder: Path, parts: tuple[MemoryTag, ...], lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_of(folder)
    runner, doer = llm.engine.runner, llm.lifecycle.run_on_first_rank
    assert isinstance(runner, ModelRunner)
    assert isinstance(doer, ServingCommandHandler)
    llm.lifecycle.sleep()
    llm.lifecycle.wake_up([part for part in MEMORY_TAGS if part not in parts])
    with monkeypatch.context() as patch:
        patch.setattr(doer, "_graphs", True)
        lacking = {"weights": torch.Tensor, "cache": runner.kv_cache, "graphs": runner}[lacks]
        patch.setattr(
            lacking, {"weights": "to", "cache": "_layer"}.get(lacks, "capture"), no_memory
        )
        with pytest.raises(
            UpdateRejectedError, match="it cannot wake, and sleeps on: out of memory"
        ):
            llm.lifecycle.wake_up(parts)
    held = sum(weight.numel() for weight in runner.model.decoder.parameters())
    assert (held == 0) == ("weights" in parts)
    assert (not runner.kv_cache._pools) == runner.kv_cache.is_sleeping == ("cache" in parts)
    llm.lifecycle.wake_up()
    assert answers(llm) == expected()[:2]


def test_who_cannot_keep_its_weights_stays_awake(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_of(folder)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", no_memory)
        with pytest.raises(UpdateRejectedError, match="it stays awake: out of memory"):
            llm.lifecycle.sleep()
    assert not llm.lifecycle.is_sleeping
    assert answers(llm) == expected()[:2]


def test_a_folder_that_cannot_be_read_leaves_the_old_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_of(folder)
    monkeypatch.setattr(rank_commands, "find_checkpoint_mismatches", no_memory)
    with pytest.raises(UpdateRejectedError, match="the old weights stay: out of memory"):
        llm.lifecycle.update_weights(str(folder))
    assert answers(llm) == expected()[:2]


def test_new_weights_answer_and_nothing_old_is_found(folder: Path, tmp_path: Path) -> None:
    llm = llm_of(folder)
    llm.generate([PROMPTS[3]], GREEDY)
    other = made(small().model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.3)
    save_hf_checkpoint(other, tmp_path)
    llm.lifecycle.update_weights(str(tmp_path))
    (found,) = llm.generate([PROMPTS[3]], GREEDY)
    ids = list(PROMPTS[3])
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(other(torch.tensor([ids]))[0, -1].argmax()))
    assert list(found.outputs[0].token_ids) == ids[len(PROMPTS[3]) :]
    assert found.cached_tokens == 0


def test_weights_are_called_by_the_files_they_were_read_from(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    engines = [llm_of(folder), llm_of(folder)]
    first, other = (llm.engine for llm in engines)
    assert first.weights_id == other.weights_id != ""
    called = first.weights_id
    engines[0].lifecycle.update_weights(str(tmp_path))
    assert first.weights_id != called
    engines[0].lifecycle.update_weights(str(folder))
    assert first.weights_id == called
    before = compute_weights_id(tmp_path)
    os.utime(tmp_path / "model.safetensors", (1, 1))
    assert compute_weights_id(tmp_path) != before


def test_vectors_do_not_depend_on_what_else_is_asked(folder: Path) -> None:
    llm = llm_of(folder)
    alone = llm.lifecycle.embed([PROMPTS[3]])
    assert llm.lifecycle.embed(PROMPTS)[3] == pytest.approx(alone[0], abs=1e-6)
    assert llm.engine.scheduler.block_pool.used_block_count == 0


def test_more_than_the_context_is_refused_before_weights_are_read(folder: Path) -> None:
    context = small().model.max_positions
    with pytest.raises(InputError, match=f"{context + 1:,} is more than the {context:,} tokens"):
        LLM(folder, EngineConfig(scheduler_config=LIMITS, device="cpu", max_model_len=context + 1))


def test_ranks_that_heads_do_not_divide_by_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="attention heads"):
        llm_of(folder, tensor_parallel_size=3)


def test_drawn_weights_need_no_words() -> None:
    limits = SchedulerConfig(
        max_num_batched_tokens=24, max_num_seqs=4, block_size=4, num_gpu_blocks=48
    )
    llm = LLM(small().model, EngineConfig(scheduler_config=limits, device="cpu", max_model_len=64))
    (found,) = llm.generate([1, 2, 3], GREEDY)
    assert len(found.outputs[0].token_ids) == 12
    with pytest.raises(InputError, match="requires a tokenizer"):
        llm.run_requests(
            [
                Request(
                    prompt_token_ids=(1,),
                    sampling_params=SamplingParams(
                        structured_outputs=StructuredOutputsParams(kind="json_object")
                    ),
                )
            ]
        )
    with pytest.raises(InputError, match="no tokenizer"):
        llm.generate(["text"])


def test_four_bits_answer(folder: Path) -> None:
    llm = llm_of(folder, quantization="int4")
    (found,) = llm.generate([PROMPTS[3]], GREEDY)
    assert len(found.outputs[0].token_ids) == 12


def test_a_draft_from_a_folder_saves_steps_asleep_and_awake(folder: Path) -> None:
    llm = llm_of(folder, speculative_model=str(folder), num_speculative_tokens=3)
    for level in (1, 0):
        before = llm.engine.stats().steps
        found = llm.generate(PROMPTS[:3], GREEDY)
        assert [list(each.outputs[0].token_ids) for each in found] == expected()[:3]
        # Steps of their own for the prompts; then four tokens with each.
        assert llm.engine.stats().steps - before <= 3 + 3
        if level:
            llm.lifecycle.sleep(level)
            draft = llm.engine.runner.draft_runner  # type: ignore[attr-defined]
            assert sum(weight.numel() for weight in draft.model.decoder.parameters()) == 0
            llm.lifecycle.wake_up()


def test_a_grammar_holds_with_a_draft(tmp_path: Path) -> None:
    words = trained(digits=True)
    save_hf_checkpoint(
        made(msgspec.structs.replace(small().model, vocab=words.get_vocab_size())), tmp_path
    )
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    digits = StructuredOutputsParams(kind="regex", text="[0-9]{3,}")
    drawn = []
    for draft in ("", str(tmp_path)):
        llm = llm_of(tmp_path, speculative_model=draft)
        for seed in (4, None):
            asked = SamplingParams(
                temperature=0.9, max_tokens=12, structured_outputs=digits, seed=seed
            )
            (found,) = llm.run_requests(
                [Request(prompt_token_ids=PROMPTS[1], sampling_params=asked)]
            )
            assert found.text.isdigit()
            drawn += [found.outputs[0].token_ids] if seed else []
    assert drawn[0] == drawn[1]


def test_an_engine_that_is_closed_leaves_no_thread(tmp_path: Path) -> None:
    words = trained(digits=True)
    save_hf_checkpoint(
        made(msgspec.structs.replace(small().model, vocab=words.get_vocab_size())), tmp_path
    )
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    llm, before = llm_of(tmp_path), set(threading.enumerate())
    asked = SamplingParams(
        max_tokens=3, structured_outputs=StructuredOutputsParams(kind="regex", text="[0-9]{3,}")
    )
    llm.run_requests([Request(prompt_token_ids=PROMPTS[1], sampling_params=asked)])
    own = [each for each in set(threading.enumerate()) - before if each.name.startswith("masks")]
    assert len(own) == 1
    llm.engine.close()
    own[0].join(30)
    assert not own[0].is_alive()


def test_drafts_that_cannot_be_are_refused(folder: Path, tmp_path: Path) -> None:
    save_hf_checkpoint(small(), tmp_path)
    trained(digits=False).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="have the same ids"):
        llm_of(folder, speculative_model=str(tmp_path))
    with pytest.raises(InputError, match="on one device"):
        llm_of(folder, speculative_model=str(folder), tensor_parallel_size=2)


TENSOR_PARALLEL = """
import sys
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.errors import InputError
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.run.serve.llm import LLM
from meshwright.spec.scheduler_config import SchedulerConfig
import torch
torch.set_num_threads(1)
limits = SchedulerConfig(
    max_num_batched_tokens=24, max_num_seqs=4, block_size=4, num_gpu_blocks=48
)
settings = EngineConfig(
    scheduler_config=limits, device="cpu", max_model_len=64, tensor_parallel_size=2
)
llm = LLM(sys.argv[1], settings)
prompts = [tuple(map(int, text.split())) for text in sys.argv[2].split(",")]
sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
for found in llm.generate(prompts, sampling):
    print(*found.outputs[0].token_ids)
warm = SamplingParams(temperature=1.5, seed=3, max_tokens=12, ignore_eos=True)
print(*llm.generate(prompts[:1], warm)[0].outputs[0].token_ids)
print(len(llm.lifecycle.embed(prompts[:1])[0]))
ask = Request(prompt_token_ids=prompts[3], sampling_params=sampling, prompt_logprobs=1)
(told,) = llm.run_requests([ask])
print(*(f"{each.logprob:.5f}" for each in told.prompt_logprobs))
try:
    llm.run_requests([Request(prompt_token_ids=prompts[3], do_remote_decode=True)])
except InputError as error:
    print(error)
"""


@pytest.mark.slow
def test_two_ranks_answer_as_one_does(folder: Path) -> None:
    import subprocess
    import sys

    prompts = ",".join(" ".join(map(str, prompt)) for prompt in PROMPTS)
    command = [sys.executable, "-c", TENSOR_PARALLEL, str(folder), prompts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    *lines, told, refused = done.stdout.splitlines()
    *greedy, warm, width = [list(map(int, line.split())) for line in lines]
    assert greedy == expected()
    alone = SamplingParams(temperature=1.5, seed=3, max_tokens=12, ignore_eos=True)
    (one,) = llm_of(folder).generate(PROMPTS[:1], alone)
    assert warm == list(one.outputs[0].token_ids)
    assert width == [small().model.hidden]
    assert reference(small, PROMPTS[0], 12) == greedy[0]
    with torch.no_grad():
        whole_TV = small()(torch.tensor([PROMPTS[3]]))[0].log_softmax(1)
    wanted = [float(row_V[token]) for row_V, token in zip(whole_TV, PROMPTS[3][1:], strict=False)]
    assert [float(each) for each in told.split()] == pytest.approx(wanted, abs=1e-4)
    assert "on one device" in refused
