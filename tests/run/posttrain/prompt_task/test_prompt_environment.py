"""Which prompt comes when follows from the seed, and answers are checked by what is asked."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="reads a tokenizer")

from meshwright.run.posttrain.prompt_task.prompt_environment import (
    CHOICE,
    CODE_VERIFIER,
    EXACT,
    FORM,
    NUMBER,
    PromptEnvironment,
)
from meshwright.run.posttrain.prompt_task.prompt_files import read_prompt_splits
from meshwright.run.posttrain.prompt_task.reward_config import (
    ExactReward,
    FormatReward,
    NumberReward,
    RewardConfig,
)
from meshwright.run.posttrain.rollout.rollout import RolloutTurn
from meshwright.run.posttrain.rollout.verifiers.verifier_job import VerifierLimits
from meshwright.run.posttrain.rollout.verifiers.verifier_pool import VerifierPool
from tests.run.posttrain.data.small_words import words_of
from tests.run.posttrain.prompt_task.small import liked, questions, task
from tests.run.posttrain.supervised.tiny import write

WORDS = words_of()
END = 2


def environment(
    folder: Path, records: list[dict[str, Any]], *rewards: RewardConfig, seed: int | None = 0
) -> PromptEnvironment:
    asked_for = task(str(write(folder / "t.jsonl", records)), validation=0.0, rewards=rewards)
    parts = read_prompt_splits(asked_for, WORDS, room=60)
    return PromptEnvironment(
        parts.train, asked_for.question_rewards, WORDS, digest=parts.digest, seed=seed
    )


def turn(text: str, *, ended: bool = True) -> RolloutTurn:
    tokens = (*WORDS.encode(text, special=False), *((END,) if ended else ()))
    nothing = (0.0,) * len(tokens)
    finish = "stop" if ended else "length"
    return RolloutTurn(tokens=tokens, logprobs=nothing, finish=finish, version=0, seed=0)  # type: ignore[arg-type]


def test_each_pass_asks_every_prompt_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    asking = environment(tmp_path, questions(12), ExactReward())
    passes = [[asking.prompt_at(12 * one + n).token_ids for n in range(12)] for one in range(3)]
    assert len({tuple(each) for each in passes}) == 3
    assert len({frozenset(each) for each in passes}) == 1
    assert len(set(passes[0])) == 12
    again = environment(tmp_path, questions(12), ExactReward())
    assert [again.prompt_at(n).token_ids for n in range(36)] == [
        one for each in passes for one in each
    ]
    other = environment(tmp_path, questions(12), ExactReward(), seed=1)
    assert [other.prompt_at(n).token_ids for n in range(12)] != passes[0]


def test_without_a_seed_prompts_stay_in_the_order_of_their_file(tmp_path: Path) -> None:
    asking = environment(tmp_path, questions(5), ExactReward(), seed=None)
    told = [asking.prompt_at(n).question.where for n in range(6)]
    assert [each.rpartition(":")[2] for each in told] == ["1", "2", "3", "4", "5", "1"]


def test_answers_are_checked_by_what_their_records_hold(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"prompt": "a", "answer": "#### 4"},
        {"prompt": "b", "choices": ["x", "y"], "right": 1},
        {"prompt": "c", "tests": "assert f() == 4"},
    ]
    shape = FormatReward(pattern=".*4.*", weight=0.5)
    asking = environment(tmp_path, records, NumberReward(), shape, seed=None)
    assert set(asking.verifiers) == {NUMBER, CHOICE, CODE_VERIFIER, FORM}
    assert asking.runs_programs
    right = ["it is 4", "(b)", "```python\ndef f(): return 4\n```"]
    checks = [
        check for n, text in enumerate(right) for check in asking.verifier_jobs(n, turn(text))
    ]
    with VerifierPool(asking.verifiers, workers=1) as pool:
        parts = pool.verify(checks)
    assert [(part.name, part.value, part.weight) for part in parts] == [
        ("number", 1.0, 1.0), ("format", 1.0, 0.5), ("number", 1.0, 1.0), ("format", 0.0, 0.5),
        ("number", 1.0, 1.0), ("format", 1.0, 0.5),
    ]  # fmt: skip
    assert environment(tmp_path, records[:1]).verifiers == (EXACT,)


def test_programs_are_taken_from_behind_the_thoughts(tmp_path: Path) -> None:
    asking = environment(tmp_path, [{"prompt": "c", "tests": "t", "prefix": "p\n"}], ExactReward())
    (check,) = asking.verifier_jobs(0, turn("<think>```\nno\n```</think>```\nyes\n```"))
    assert check.payload == {"program": "p\nyes\n", "tests": "t"}


def test_a_program_that_never_ends_earns_nothing_and_is_counted(tmp_path: Path) -> None:
    records = [{"prompt": "c", "tests": ""}]
    asking = environment(tmp_path, records, ExactReward())
    texts = ["while True: pass", "import os; os._exit(1)", "x = 1"]
    checks = [check for text in texts for check in asking.verifier_jobs(0, turn(text))]
    limits = VerifierLimits(deadline_s=1.0, retries=0, checks_per_process=1)
    with VerifierPool(asking.verifiers, workers=1, limits=limits) as pool:
        parts = pool.verify(checks)
        assert pool.outcome_counts[CODE_VERIFIER] == {"ok": 1, "timeout": 1, "died": 1}
    assert [part.outcome for part in parts] == ["timeout", "died", "ok"]
    assert [part.value for part in parts] == [0.0, 0.0, 1.0]
    assert all(part.has_reward for part in parts)


def test_a_program_whose_error_tells_nothing_or_all_too_much_earns_nothing(tmp_path: Path) -> None:
    asking = environment(tmp_path, [{"prompt": "c", "tests": ""}], ExactReward())
    silent = "class E(Exception):\n  def __str__(self): return 3\nraise E"
    checks = [
        check
        for text in (silent, "raise Exception('x' * 900_000)")
        for check in asking.verifier_jobs(0, turn(text))
    ]
    with VerifierPool(asking.verifiers, workers=1) as pool:
        parts = pool.verify(checks)
    assert [(part.outcome, part.value) for part in parts] == [("ok", 0.0)] * 2
    assert parts[0].reason == "program line 3: E"
    assert len(parts[1].reason) == 400, "it is kept with every answer"


def test_a_pattern_that_never_ends_is_named_and_no_verdict(tmp_path: Path) -> None:
    asking = environment(tmp_path, questions(1), FormatReward(pattern="(a+)+b"))
    checks = list(asking.verifier_jobs(0, turn("a" * 64)))
    limits = VerifierLimits(deadline_s=1.0)
    with VerifierPool(asking.verifiers, workers=1, limits=limits) as pool:
        (part,) = pool.verify(checks)
    assert part.outcome == "timeout"
    assert not part.has_reward
    assert f"verifier {FORM} gave no answer within its deadline of 1 s" in part.reason


def test_a_reward_model_reads_tokens_as_drawn_and_the_end_of_the_chat(tmp_path: Path) -> None:
    asking = environment(tmp_path, questions(1), liked())
    asked = asking.prompt_at(0)
    assert asking.verifiers == ()
    drawn = turn("aye")
    (check,) = asking.verifier_jobs(0, drawn)
    assert check.payload == {"tokens": [*asked.token_ids, *drawn.tokens, *asked.template_suffix]}
    assert asked.template_suffix, "the template ends a line behind an answer"
    cut = turn("aye", ended=False)
    (check,) = asking.verifier_jobs(0, cut)
    assert check.payload == {"tokens": [*asked.token_ids, *cut.tokens]}
