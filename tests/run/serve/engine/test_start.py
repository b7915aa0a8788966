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
from meshwright.run.nn.huggingface import save
from meshwright.run.serve.asked import Ask, Grammar, Sampling, Sink
from meshwright.run.serve.engine import doing
from meshwright.run.serve.engine.answer import Answer
from meshwright.run.serve.engine.doing import Doer, Unchanged
from meshwright.run.serve.engine.runner import Runner
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.interface import MEMORY, Memory
from meshwright.run.serve.llm import LLM
from meshwright.run.serve.model.load import name_of
from meshwright.spec.serving import Limits
from tests.run.serve.engine.small import reference
from tests.run.serve.engine.test_engine import PROMPTS, expected
from tests.run.serve.model.small import made, small
from tests.run.serve.model.test_gguf import trained

LIMITS = Limits(batch_tokens=24, batch_requests=4, block_tokens=4, kv_blocks=48)
GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(small(), path)
    trained(digits=True).save(str(path / "tokenizer.json"))
    return path


def llm_of(folder: Path, **given: Any) -> LLM:
    torch.set_num_threads(1)
    return LLM(folder, EngineSettings(limits=LIMITS, device="cpu", max_length=64, **given))


def test_a_folder_answers_as_its_model_does(folder: Path) -> None:
    llm = llm_of(folder)
    found = llm.generate(PROMPTS, GREEDY)
    assert [list(each.choices[0].tokens) for each in found] == expected()
    assert {what for what, _ in llm.start_up} >= {"words", "weights", "cache"}
    assert found[0].text == llm.words.decode(found[0].choices[0].tokens)


def test_who_may_write_most_begins_first_and_answers_keep_their_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, lengths = llm_of(folder), (2, 9, 5, None)
    samplings = [msgspec.structs.replace(GREEDY, max_tokens=most) for most in lengths]
    asked: list[int | None] = []
    taken = llm.engine.add

    def add(ask: Ask, sink: Sink) -> list[Answer]:
        asked.append(ask.sampling.max_tokens)
        return taken(ask, sink)

    monkeypatch.setattr(llm.engine, "add", add)
    found = llm.generate(PROMPTS[:4], samplings)
    assert asked == [None, 9, 5, 2]
    written = [len(each.choices[0].tokens) for each in found]
    assert written[:3] == [2, 9, 5]


def test_sleep_gives_memory_back_and_waking_changes_no_answer(folder: Path) -> None:
    llm = llm_of(folder)
    llm.generate(PROMPTS[:2], GREEDY)
    llm.upkeep.sleep()
    weights = llm.engine.runner.forward.decoder.parameters()
    assert sum(weight.numel() for weight in weights) == 0
    with pytest.raises(InputError, match="it sleeps"):
        llm.generate(PROMPTS[:1], GREEDY)
    llm.upkeep.wake()
    found = llm.generate(PROMPTS[:2], GREEDY)
    assert [list(each.choices[0].tokens) for each in found] == expected()[:2]
    assert found[0].cached_tokens == 0


@pytest.mark.parametrize("first", MEMORY)
@pytest.mark.parametrize("level", [1, 2])
def test_weights_and_cache_wake_one_after_the_other(
    folder: Path, first: Memory, level: int
) -> None:
    def awake() -> set[str]:
        runner = llm.engine.runner
        held = sum(weight.numel() for weight in runner.forward.decoder.parameters())
        return {name for name, size in zip(MEMORY, (held, len(runner.cache.layers)), strict=True)
                if size}  # fmt: skip

    llm = llm_of(folder)
    llm.upkeep.sleep(level)
    assert awake() == set()
    for _ in range(2):
        llm.upkeep.wake([first])
        assert awake() == {first}, "the other one stays asleep"
        assert llm.upkeep.asleep
    with pytest.raises(InputError, match="it sleeps"):
        llm.generate(PROMPTS[:1], GREEDY)
    if first == "weights":
        llm.upkeep.update_weights(str(folder))
        assert awake() == {"weights"}, "new weights need no cache"
    else:
        with pytest.raises(InputError, match="has no room for them"):
            llm.upkeep.update_weights(str(folder))
    llm.upkeep.wake()
    assert awake() == set(MEMORY)
    llm.upkeep.update_weights(str(folder))
    found = llm.generate(PROMPTS[:2], GREEDY)
    assert [list(each.choices[0].tokens) for each in found] == expected()[:2]


def test_who_is_half_awake_can_sleep_again(folder: Path) -> None:
    llm = llm_of(folder)
    for part in MEMORY:
        llm.upkeep.sleep()
        llm.upkeep.wake([part])
        llm.upkeep.sleep()
        runner = llm.engine.runner
        assert sum(weight.numel() for weight in runner.forward.decoder.parameters()) == 0
        assert runner.cache.asleep
        llm.upkeep.wake()
    found = llm.generate(PROMPTS[:2], GREEDY)
    assert [list(each.choices[0].tokens) for each in found] == expected()[:2]


def no_memory(*_: object, **__: object) -> Any:
    raise RuntimeError("out of memory")


def answers(llm: LLM) -> list[list[int]]:
    return [list(each.choices[0].tokens) for each in llm.generate(PROMPTS[:2], GREEDY)]


@pytest.mark.parametrize(
    ("parts", "lacks"),
    [
        (MEMORY, "weights"),
        (MEMORY, "cache"),
        (MEMORY, "graphs"),
        (("cache",), "cache"),
        (("weights",), "graphs"),
    ],
)
def test_who_finds_no_memory_to_wake_with_sleeps_on_and_wakes_later(
    folder: Path, parts: tuple[Memory, ...], lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_of(folder)
    runner, doer = llm.engine.runner, llm.upkeep.first
    assert isinstance(runner, Runner)
    assert isinstance(doer, Doer)
    llm.upkeep.sleep()
    llm.upkeep.wake([part for part in MEMORY if part not in parts])
    with monkeypatch.context() as patch:
        patch.setattr(doer, "_graphs", True)
        lacking = {"weights": torch.Tensor, "cache": runner.cache, "graphs": runner}[lacks]
        patch.setattr(
            lacking, {"weights": "to", "cache": "_layer"}.get(lacks, "capture"), no_memory
        )
        with pytest.raises(Unchanged, match="it cannot wake, and sleeps on: out of memory"):
            llm.upkeep.wake(parts)
    held = sum(weight.numel() for weight in runner.forward.decoder.parameters())
    assert (held == 0) == ("weights" in parts)
    assert (not runner.cache._pools) == runner.cache.asleep == ("cache" in parts)
    llm.upkeep.wake()
    assert answers(llm) == expected()[:2]


def test_who_cannot_keep_its_weights_stays_awake(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_of(folder)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", no_memory)
        with pytest.raises(Unchanged, match="it stays awake: out of memory"):
            llm.upkeep.sleep()
    assert not llm.upkeep.asleep
    assert answers(llm) == expected()[:2]


def test_a_folder_that_cannot_be_read_leaves_the_old_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_of(folder)
    monkeypatch.setattr(doing, "misfits", no_memory)
    with pytest.raises(Unchanged, match="the old weights stay: out of memory"):
        llm.upkeep.update_weights(str(folder))
    assert answers(llm) == expected()[:2]


def test_new_weights_answer_and_nothing_old_is_found(folder: Path, tmp_path: Path) -> None:
    llm = llm_of(folder)
    llm.generate([PROMPTS[3]], GREEDY)
    other = made(small().model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.3)
    save(other, tmp_path)
    llm.upkeep.update_weights(str(tmp_path))
    (found,) = llm.generate([PROMPTS[3]], GREEDY)
    ids = list(PROMPTS[3])
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(other(torch.tensor([ids]))[0, -1].argmax()))
    assert list(found.choices[0].tokens) == ids[len(PROMPTS[3]) :]
    assert found.cached_tokens == 0


def test_weights_are_called_by_the_files_they_were_read_from(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    engines = [llm_of(folder), llm_of(folder)]
    first, other = (llm.engine for llm in engines)
    assert first.weights == other.weights != ""
    called = first.weights
    engines[0].upkeep.update_weights(str(tmp_path))
    assert first.weights != called
    engines[0].upkeep.update_weights(str(folder))
    assert first.weights == called
    before = name_of(tmp_path)
    os.utime(tmp_path / "model.safetensors", (1, 1))
    assert name_of(tmp_path) != before


def test_vectors_do_not_depend_on_what_else_is_asked(folder: Path) -> None:
    llm = llm_of(folder)
    alone = llm.upkeep.embed([PROMPTS[3]])
    assert llm.upkeep.embed(PROMPTS)[3] == pytest.approx(alone[0], abs=1e-6)
    assert llm.engine.batcher.pool.held == 0


def test_more_than_the_context_is_refused_before_weights_are_read(folder: Path) -> None:
    context = small().model.max_positions
    with pytest.raises(InputError, match=f"{context + 1:,} is more than the {context:,} tokens"):
        LLM(folder, EngineSettings(limits=LIMITS, device="cpu", max_length=context + 1))


def test_ranks_that_heads_do_not_divide_by_are_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="attention heads"):
        llm_of(folder, tp=3)


def test_drawn_weights_need_no_words() -> None:
    limits = Limits(batch_tokens=24, batch_requests=4, block_tokens=4, kv_blocks=48)
    llm = LLM(small().model, EngineSettings(limits=limits, device="cpu", max_length=64))
    (found,) = llm.generate([1, 2, 3], GREEDY)
    assert len(found.choices[0].tokens) == 12
    with pytest.raises(InputError, match="needs the model's words"):
        llm.answer([Ask(prompt=(1,), sampling=Sampling(grammar=Grammar(kind="json_object")))])
    with pytest.raises(InputError, match="no words"):
        llm.generate(["text"])


def test_four_bits_answer(folder: Path) -> None:
    llm = llm_of(folder, weights="int4")
    (found,) = llm.generate([PROMPTS[3]], GREEDY)
    assert len(found.choices[0].tokens) == 12


def test_a_draft_from_a_folder_saves_steps_asleep_and_awake(folder: Path) -> None:
    llm = llm_of(folder, draft=str(folder), guesses=3)
    for level in (1, 0):
        before = llm.engine.gauges().steps
        found = llm.generate(PROMPTS[:3], GREEDY)
        assert [list(each.choices[0].tokens) for each in found] == expected()[:3]
        # Steps of their own for the prompts; then four tokens with each.
        assert llm.engine.gauges().steps - before <= 3 + 3
        if level:
            llm.upkeep.sleep(level)
            draft = llm.engine.runner.draft  # type: ignore[attr-defined]
            assert sum(weight.numel() for weight in draft.forward.decoder.parameters()) == 0
            llm.upkeep.wake()


def test_a_grammar_holds_with_a_draft(tmp_path: Path) -> None:
    words = trained(digits=True)
    save(made(msgspec.structs.replace(small().model, vocab=words.get_vocab_size())), tmp_path)
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    digits = Grammar(kind="regex", text="[0-9]{3,}")
    drawn = []
    for draft in ("", str(tmp_path)):
        llm = llm_of(tmp_path, draft=draft)
        for seed in (4, None):
            asked = Sampling(temperature=0.9, max_tokens=12, grammar=digits, seed=seed)
            (found,) = llm.answer([Ask(prompt=PROMPTS[1], sampling=asked)])
            assert found.text.isdigit()
            drawn += [found.choices[0].tokens] if seed else []
    assert drawn[0] == drawn[1]


def test_an_engine_that_is_closed_leaves_no_thread(tmp_path: Path) -> None:
    words = trained(digits=True)
    save(made(msgspec.structs.replace(small().model, vocab=words.get_vocab_size())), tmp_path)
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    llm, before = llm_of(tmp_path), set(threading.enumerate())
    asked = Sampling(max_tokens=3, grammar=Grammar(kind="regex", text="[0-9]{3,}"))
    llm.answer([Ask(prompt=PROMPTS[1], sampling=asked)])
    own = [each for each in set(threading.enumerate()) - before if each.name.startswith("masks")]
    assert len(own) == 1
    llm.engine.close()
    own[0].join(30)
    assert not own[0].is_alive()


def test_drafts_that_cannot_be_are_refused(folder: Path, tmp_path: Path) -> None:
    save(small(), tmp_path)
    trained(digits=False).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="have the same numbers"):
        llm_of(folder, draft=str(tmp_path))
    with pytest.raises(InputError, match="on one device"):
        llm_of(folder, draft=str(folder), tp=2)


TENSOR_PARALLEL = """
import sys
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.errors import InputError
from meshwright.run.serve.asked import Ask, Sampling
from meshwright.run.serve.llm import LLM
from meshwright.spec.serving import Limits
import torch
torch.set_num_threads(1)
limits = Limits(batch_tokens=24, batch_requests=4, block_tokens=4, kv_blocks=48)
settings = EngineSettings(limits=limits, device="cpu", max_length=64, tp=2)
llm = LLM(sys.argv[1], settings)
prompts = [tuple(map(int, text.split())) for text in sys.argv[2].split(",")]
sampling = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
for found in llm.generate(prompts, sampling):
    print(*found.choices[0].tokens)
warm = Sampling(temperature=1.5, seed=3, max_tokens=12, ignore_eos=True)
print(*llm.generate(prompts[:1], warm)[0].choices[0].tokens)
print(len(llm.upkeep.embed(prompts[:1])[0]))
(told,) = llm.answer([Ask(prompt=prompts[3], sampling=sampling, prompt_logprobs=1)])
print(*(f"{each.logprob:.5f}" for each in told.prompt_logprobs))
try:
    llm.answer([Ask(prompt=prompts[3], hands_over=True)])
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
    alone = Sampling(temperature=1.5, seed=3, max_tokens=12, ignore_eos=True)
    (one,) = llm_of(folder).generate(PROMPTS[:1], alone)
    assert warm == list(one.choices[0].tokens)
    assert width == [small().model.hidden]
    assert reference(small, PROMPTS[0], 12) == greedy[0]
    with torch.no_grad():
        whole_TV = small()(torch.tensor([PROMPTS[3]]))[0].log_softmax(1)
    wanted = [float(row_V[token]) for row_V, token in zip(whole_TV, PROMPTS[3][1:], strict=False)]
    assert [float(each) for each in told.split()] == pytest.approx(wanted, abs=1e-4)
    assert "on one device" in refused
