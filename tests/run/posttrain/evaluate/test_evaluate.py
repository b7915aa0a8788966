"""A model's answers are judged as text, by likelihood, and by tests in bounded processes."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import torch

from meshwright.errors import InputError
from meshwright.run.nn.build import build
from meshwright.run.nn.huggingface import save
from meshwright.run.nn.initialise import materialise
from meshwright.run.posttrain.data.records import Record
from meshwright.run.posttrain.evaluate.code import Judgement, Program, VerifiedCode, program_of
from meshwright.run.posttrain.evaluate.exact import is_right
from meshwright.run.posttrain.evaluate.harness import evaluate
from meshwright.run.posttrain.evaluate.questions import (
    Choices,
    Code,
    Exact,
    question_of,
    read_questions,
)
from meshwright.run.posttrain.evaluate.report import pass_at, score_of
from meshwright.run.serve.asked import Ask, Sampling
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.llm import LLM, Choice, Completion
from meshwright.run.serve.model.load import load_served
from meshwright.run.serve.model.words import Words
from meshwright.spec.model import Attention, Block, Mlp, Model, Rotary
from meshwright.spec.serving import Limits
from tests.run.posttrain.data.small_words import CHATML, words_of

SHORT = Sampling(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    attention = Attention(heads=2, kv_heads=1, head_dim=16, rotary=Rotary())
    block = Block(name="plain", mixer=attention, mlp=Mlp(width=32))
    size = words_of().size
    model = Model(
        name="m", hidden=32, vocab=size, blocks=(block,), pattern="2*plain", max_positions=128
    )
    decoder = build(model, dtype=torch.float32)
    materialise(decoder, "cpu", seed=0)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.mul_(4)
    save(decoder, path)
    words_of().tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHATML)
    (path / "generation_config.json").write_text('{"eos_token_id": 2}')
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    torch.set_num_threads(1)
    limits = Limits(batch_tokens=48, batch_requests=8, block_tokens=4, kv_blocks=128)
    return LLM(folder, EngineSettings(limits=limits, device="cpu", max_length=128))


class Told:
    """Answers with what it was told, in turn; never the same for two questions."""

    def __init__(self, *texts: str) -> None:
        self.words: Words = words_of()
        self._texts = list(texts)

    def check(self, ask: Ask) -> None:
        """Take anything."""

    def answer(self, asks: Sequence[Ask]) -> list[Completion]:
        """Answer asks, all at once."""
        return [
            Completion(
                prompt=ask.prompt,
                choices=tuple(
                    Choice(text=self._texts.pop(0), tokens=(1,), finish="stop")
                    for _ in range(ask.sampling.n)
                ),
            )
            for ask in asks
        ]


def test_exact_answers_are_those_that_the_model_gives(llm: LLM) -> None:
    prompts = ["the user and", "talk"]
    said = [one.text for one in llm.generate(prompts, SHORT)]
    message = [{"role": "user", "content": "hi"}]
    chatted = llm.chat(message, SHORT).text
    questions = [
        Exact(prompt=prompts[0], answers=["no", said[0]]),
        Exact(prompt=prompts[1], answers=[said[1] + "no"]),
        Exact(prompt=message, answers=[chatted]),
    ]
    report = evaluate(llm, questions, sampling=SHORT)
    assert [one.right for one in report.verdicts] == [(True,), (False,), (True,)]
    assert report["exact"].share == pytest.approx(2 / 3)
    assert report.cut == 3
    assert "3 answers were ended by max_tokens" in str(report)


def test_choices_are_as_likely_as_the_model_itself_says(llm: LLM, folder: Path) -> None:
    decoder = load_served(folder, dtype=torch.float32)
    choices = [" answer", " the the the answer talk", " user"]
    questions = [
        Choices(prompt=prompt, choices=choices, right=right)
        for prompt in ("the user and", "talk the", "and the")
        for right in range(3)
    ]
    report = evaluate(llm, questions)
    words = llm.words
    for question, verdict in zip(questions, report.verdicts, strict=True):
        assert isinstance(question.prompt, str)
        before = words.encode(question.prompt)
        sums, tokens = [], []
        for choice in choices:
            ids = torch.tensor([words.encode(question.prompt + choice)])
            with torch.no_grad():
                likely = decoder(ids).float().log_softmax(-1)[0, :-1]
            own = likely.gather(1, ids[0, 1:, None])[len(before) - 1 :, 0]
            sums.append(float(own.sum()))
            tokens.append(len(own))
        by = {
            "sum": sums,
            "per_token": [one / count for one, count in zip(sums, tokens, strict=True)],
            "per_byte": [
                one / len(choice.encode()) for one, choice in zip(sums, choices, strict=True)
            ],
        }
        told = [json.loads(one)["logprob"] for one in verdict.reasons]
        assert told == pytest.approx(sums, abs=1e-4)
        for name, values in by.items():
            assert verdict.measures[name] == (values.index(max(values)) == question.right)
    assert report["choices sum"].share == pytest.approx(1 / 3)
    # Lengths matter in this model, or the measures could not be told apart.
    assert any(len(set(verdict.measures.values())) == 2 for verdict in report.verdicts)


def test_what_is_exact_is_found_and_normalised() -> None:
    assert is_right(" 42\n", ["42"], normal="strip")
    assert not is_right("Paris.", ["paris"], normal="strip")
    assert is_right('"The  Paris."', ["the paris"], normal="words")
    text = "1 and 2 #### 3 or #### 4"
    assert is_right(text, ["4"], pattern=r"#### (\S+)", normal="strip")
    assert not is_right("nothing", ["4"], pattern=r"#### (\S+)", normal="strip")
    with pytest.raises(InputError, match="no regular expression"):
        is_right(text, ["4"], pattern="(", normal="strip")


def test_programs_are_taken_out_of_answers() -> None:
    assert program_of("Sure:\n```python\nx = 1\n```\nDone ```y```.") == "x = 1\n"
    assert program_of("```\nx = 1\n") == "x = 1\n"
    assert program_of("    return 2", prefix="def f():\n") == "def f():\n    return 2"


@pytest.mark.slow
def test_programs_pass_or_fail_by_their_tests_whatever_they_do() -> None:
    programs = [
        "def f(x): return x * x",
        "def f(x): return x",
        "def f(x)",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "while True: pass",
        "f = lambda x: x * x\nif __name__ == '__main__': raise ValueError",
    ]
    runner = VerifiedCode(deadline_s=1.0)
    found = runner.run([Program(one, "assert f(2) == 4\nassert f(3) == 9") for one in programs])
    assert [one.passed for one in found] == [True, False, False, False, False, False, True]
    reasons = [one.reason for one in found]
    assert reasons[0] == "passed"
    assert reasons[1].startswith("tests line 1: AssertionError")
    assert reasons[2].startswith("program: SyntaxError")
    assert reasons[3].startswith("program line 1: SystemExit")
    assert reasons[5].startswith("time-out")


class Right:
    """Runs nothing: what has `good` in it passes."""

    def run(self, programs: Sequence[Program]) -> list[Judgement]:
        """Return what became of each."""
        return [Judgement("good" in one.text, one.tests) for one in programs]


def test_code_is_judged_by_who_runs_it_for_each_answer_drawn() -> None:
    questions = [Code(prompt="a", tests="A"), Code(prompt="b", tests="B")]
    told = Told("good", "bad", "bad", "bad", "bad", "bad")
    report = evaluate(told, questions, sampling=Sampling(n=3), at=(1, 2), runner=Right())
    assert [one.right for one in report.verdicts] == [(True, False, False), (False,) * 3]
    assert report.verdicts[1].reasons == ("B",) * 3
    assert report["code"].share == pytest.approx(1 / 6)
    assert report["code pass@2"].share == pytest.approx(1 / 3)
    with pytest.raises(InputError, match="asks for 4 answers"):
        evaluate(told, questions, sampling=Sampling(n=3), at=(4,))


def test_what_was_not_answered_is_not_called_wrong() -> None:
    class Broken(Told):
        def answer(self, asks: Sequence[Ask]) -> list[Completion]:
            failed = Choice(text="", tokens=(), finish="error")
            return [Completion(prompt=ask.prompt, choices=(failed,)) for ask in asks]

    with pytest.raises(InputError, match="here: was not answered"):
        evaluate(Broken(), [Exact(prompt="a", answers=["a"], where="here")])
    with pytest.raises(InputError, match="here: has a prompt without tokens"):
        evaluate(Broken(), [Exact(prompt="", answers=["a"], where="here")])


def test_prompts_that_are_too_long_are_named_by_their_lines_before_any_is_answered(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, short = "the user and " * 60, "the user and"
    lines = [
        {"prompt": short, "answer": "a"},
        {"prompt": long, "answer": "a"},
        {"prompt": long, "choices": ["a", "b"], "right": 0},
        *({"prompt": long, "answer": "a"} for _ in range(8)),
    ]
    path = tmp_path / "held-out.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(llm, "answer", lambda _: pytest.fail("something was answered"))
    with pytest.raises(InputError, match="leave no room for an answer in 128") as found:
        evaluate(llm, read_questions([path])[:3])
    named = [problem.where for problem in found.value.problems]
    assert set(named) == {f"{path}:2", f"{path}:3"}
    with pytest.raises(InputError, match=r"2 more are refused likewise"):
        evaluate(llm, read_questions([path]))
    # What is wrong with all of them is said once.
    with pytest.raises(InputError, match=r"^adapter: ") as found:
        evaluate(llm, [Exact(prompt=short, answers=["a"])] * 2, adapter="nobody")
    assert len(found.value.problems) == 1


def test_questions_are_read_by_their_fields() -> None:
    def of(**values: object) -> object:
        return question_of(Record("here", values))

    user = {"role": "user", "content": "hi"}
    said = {"role": "assistant", "content": "ho"}
    assert of(prompt="a", answer="b") == Exact(prompt="a", answers=["b"], where="here")
    assert of(prompt="a", answer=4) == Exact(prompt="a", answers=["4"], where="here")
    assert of(prompt="a", answers=["b", "c"]) == Exact(prompt="a", answers=["b", "c"], where="here")
    assert of(messages=[user, said]) == Exact(prompt=[user], answers=["ho"], where="here")
    assert of(messages=[user], answer="x") == Exact(prompt=[user], answers=["x"], where="here")
    assert of(prompt="a", choices=["b", "c"], right=1) == Choices(
        prompt="a", choices=["b", "c"], right=1, where="here"
    )
    assert of(prompt="a", tests="t", prefix="p") == Code(
        prompt="a", tests="t", prefix="p", where="here"
    )
    for wrong, fault in (
        ({"text": "a"}, "holds text, which is no question"),
        ({"prompt": "a", "answers": []}, "no right answer"),
        ({"prompt": "a", "answer": True}, "asks what cannot be asked"),
        ({"prompt": "a", "choices": ["b", "c"], "right": 2}, "of which 2 is right"),
        ({"prompt": "a", "choices": ["b", "c", "b"], "right": 0}, "the right choice twice, 'b'"),
        ({"messages": [user, said], "answer": "x"}, "answered by its last message"),
    ):
        with pytest.raises(InputError, match=f"here: .*{fault}"):
            of(**wrong)


def test_only_what_training_held_out_is_asked() -> None:
    records = [Record(f"here:{n}", {"prompt": str(n), "answer": "a"}) for n in range(10)]
    assert [one.where for one in read_questions(records, validation=0.2)] == ["here:4", "here:9"]
    assert len(read_questions(records)) == 10
    with pytest.raises(InputError, match="among what is held out"):
        read_questions(records[:3], validation=0.2)


def test_shares_come_with_intervals() -> None:
    assert pass_at([True, False, False, False], 2) == pytest.approx(1 - 3 / 6)
    assert pass_at([True, True], 2) == 1.0
    half = score_of("x", [1.0, 0.0] * 50)
    assert (half.low, half.high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    none = score_of("x", [0.0] * 10)
    assert none.low == pytest.approx(0.0, abs=1e-12)
    assert none.high == pytest.approx(0.2775, abs=1e-4)
