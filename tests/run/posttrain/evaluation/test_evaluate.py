"""A model's answers are judged as text, by likelihood, and by tests in bounded processes."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

import torch

from meshwright.errors import InputError
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.nn.weight_init import materialize
from meshwright.run.posttrain.data.records import DataRecord
from meshwright.run.posttrain.evaluation.code_execution import (
    CodeSubmission,
    SubmissionResult,
    SubprocessCodeRunner,
    extract_code,
)
from meshwright.run.posttrain.evaluation.exact_match import matches_answer
from meshwright.run.posttrain.evaluation.harness import evaluate
from meshwright.run.posttrain.evaluation.questions import (
    CodeQuestion,
    ExactMatchQuestion,
    MultipleChoiceQuestion,
    parse_question,
    read_questions,
)
from meshwright.run.posttrain.evaluation.report import estimate_accuracy, pass_at_k
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.llm import LLM, CompletionOutput, GenerationOutput
from meshwright.run.serve.model.loader import load_served_model
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer
from meshwright.spec.model import AttentionSpec, BlockSpec, MLPSpec, Model, Rotary
from meshwright.spec.scheduler_config import SchedulerConfig
from tests.run.posttrain.data.small_words import CHATML, words_of

SHORT = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    attention = AttentionSpec(heads=2, kv_heads=1, head_dim=16, rotary=Rotary())
    block = BlockSpec(name="plain", mixer=attention, mlp=MLPSpec(width=32))
    size = words_of().vocab_size
    model = Model(
        name="m", hidden=32, vocab=size, blocks=(block,), pattern="2*plain", max_positions=128
    )
    decoder = build_decoder(model, dtype=torch.float32)
    materialize(decoder, "cpu", seed=0)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.mul_(4)
    save_hf_checkpoint(decoder, path)
    words_of().backend_tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHATML)
    (path / "generation_config.json").write_text('{"eos_token_id": 2}')
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    torch.set_num_threads(1)
    limits = SchedulerConfig(
        max_num_batched_tokens=48, max_num_seqs=8, block_size=4, num_gpu_blocks=128
    )
    return LLM(folder, EngineConfig(scheduler_config=limits, device="cpu", max_model_len=128))


class Told:
    """Answers with what it was told, in turn; never the same for two questions."""

    def __init__(self, *texts: str) -> None:
        self.tokenizer: Tokenizer = words_of()
        self._texts = list(texts)

    def validate_request(self, ask: Request) -> None:
        """Take anything."""

    def run_requests(self, asks: Sequence[Request]) -> list[GenerationOutput]:
        """Answer asks, all at once."""
        return [
            GenerationOutput(
                prompt_token_ids=ask.prompt_token_ids,
                outputs=tuple(
                    CompletionOutput(text=self._texts.pop(0), token_ids=(1,), finish_reason="stop")
                    for _ in range(ask.sampling_params.n)
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
        ExactMatchQuestion(prompt=prompts[0], answers=["no", said[0]]),
        ExactMatchQuestion(prompt=prompts[1], answers=[said[1] + "no"]),
        ExactMatchQuestion(prompt=message, answers=[chatted]),
    ]
    report = evaluate(llm, questions, sampling=SHORT)
    assert [one.right for one in report.results] == [(True,), (False,), (True,)]
    assert report["exact"].share == pytest.approx(2 / 3)
    assert report.num_truncated == 3
    assert "3 answers were ended by max_tokens" in str(report)


def test_choices_are_as_likely_as_the_model_itself_says(llm: LLM, folder: Path) -> None:
    decoder = load_served_model(folder, dtype=torch.float32)
    choices = [" answer", " the the the answer talk", " user"]
    questions = [
        MultipleChoiceQuestion(prompt=prompt, choices=choices, right=right)
        for prompt in ("the user and", "talk the", "and the")
        for right in range(3)
    ]
    report = evaluate(llm, questions)
    words = llm.tokenizer
    for question, verdict in zip(questions, report.results, strict=True):
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
    assert any(len(set(verdict.measures.values())) == 2 for verdict in report.results)


def test_what_is_exact_is_found_and_normalised() -> None:
    assert matches_answer(" 42\n", ["42"], normalization="strip")
    assert not matches_answer("Paris.", ["paris"], normalization="strip")
    assert matches_answer('"The  Paris."', ["the paris"], normalization="words")
    text = "1 and 2 #### 3 or #### 4"
    assert matches_answer(text, ["4"], pattern=r"#### (\S+)", normalization="strip")
    assert not matches_answer("nothing", ["4"], pattern=r"#### (\S+)", normalization="strip")
    with pytest.raises(InputError, match="no regular expression"):
        matches_answer(text, ["4"], pattern="(", normalization="strip")


def test_programs_are_taken_out_of_answers() -> None:
    assert extract_code("Sure:\n```python\nx = 1\n```\nDone ```y```.") == "x = 1\n"
    assert extract_code("```\nx = 1\n") == "x = 1\n"
    assert extract_code("    return 2", prefix="def f():\n") == "def f():\n    return 2"


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
    runner = SubprocessCodeRunner(deadline_s=1.0)
    found = runner.run(
        [CodeSubmission(one, "assert f(2) == 4\nassert f(3) == 9") for one in programs]
    )
    assert [one.passed for one in found] == [True, False, False, False, False, False, True]
    reasons = [one.reason for one in found]
    assert reasons[0] == "passed"
    assert reasons[1].startswith("tests line 1: AssertionError")
    assert reasons[2].startswith("program: SyntaxError")
    assert reasons[3].startswith("program line 1: SystemExit")
    assert reasons[5].startswith("timeout")


class Right:
    """Runs nothing: what has `good` in it passes."""

    def run(self, programs: Sequence[CodeSubmission]) -> list[SubmissionResult]:
        """Return what became of each."""
        return [SubmissionResult("good" in one.code, one.tests) for one in programs]


def test_code_is_judged_by_who_runs_it_for_each_answer_drawn() -> None:
    questions = [CodeQuestion(prompt="a", tests="A"), CodeQuestion(prompt="b", tests="B")]
    told = Told("good", "bad", "bad", "bad", "bad", "bad")
    report = evaluate(told, questions, sampling=SamplingParams(n=3), at=(1, 2), runner=Right())
    assert [one.right for one in report.results] == [(True, False, False), (False,) * 3]
    assert report.results[1].reasons == ("B",) * 3
    assert report["code"].share == pytest.approx(1 / 6)
    assert report["code pass@2"].share == pytest.approx(1 / 3)
    with pytest.raises(InputError, match="asks for 4 answers"):
        evaluate(told, questions, sampling=SamplingParams(n=3), at=(4,))


def test_what_was_not_answered_is_not_called_wrong() -> None:
    class Broken(Told):
        def run_requests(self, asks: Sequence[Request]) -> list[GenerationOutput]:
            failed = CompletionOutput(text="", token_ids=(), finish_reason="error")
            return [
                GenerationOutput(prompt_token_ids=ask.prompt_token_ids, outputs=(failed,))
                for ask in asks
            ]

    with pytest.raises(InputError, match="here: was not answered"):
        evaluate(Broken(), [ExactMatchQuestion(prompt="a", answers=["a"], where="here")])
    with pytest.raises(InputError, match="here: has a prompt without tokens"):
        evaluate(Broken(), [ExactMatchQuestion(prompt="", answers=["a"], where="here")])


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
    monkeypatch.setattr(llm, "run_requests", lambda _: pytest.fail("something was answered"))
    with pytest.raises(InputError, match="leave no room for an answer in 128") as found:
        evaluate(llm, read_questions([path])[:3])
    named = [problem.where for problem in found.value.problems]
    assert set(named) == {f"{path}:2", f"{path}:3"}
    with pytest.raises(InputError, match=r"2 more are refused likewise"):
        evaluate(llm, read_questions([path]))
    # What is wrong with all of them is said once.
    with pytest.raises(InputError, match=r"^lora_name: ") as found:
        evaluate(llm, [ExactMatchQuestion(prompt=short, answers=["a"])] * 2, adapter="nobody")
    assert len(found.value.problems) == 1


def test_questions_are_read_by_their_fields() -> None:
    def of(**values: object) -> object:
        return parse_question(DataRecord("here", values))

    user = {"role": "user", "content": "hi"}
    said = {"role": "assistant", "content": "ho"}
    assert of(prompt="a", answer="b") == ExactMatchQuestion(prompt="a", answers=["b"], where="here")
    assert of(prompt="a", answer=4) == ExactMatchQuestion(prompt="a", answers=["4"], where="here")
    assert of(prompt="a", answers=["b", "c"]) == ExactMatchQuestion(
        prompt="a", answers=["b", "c"], where="here"
    )
    assert of(messages=[user, said]) == ExactMatchQuestion(
        prompt=[user], answers=["ho"], where="here"
    )
    assert of(messages=[user], answer="x") == ExactMatchQuestion(
        prompt=[user], answers=["x"], where="here"
    )
    assert of(prompt="a", choices=["b", "c"], right=1) == MultipleChoiceQuestion(
        prompt="a", choices=["b", "c"], right=1, where="here"
    )
    assert of(prompt="a", tests="t", prefix="p") == CodeQuestion(
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
    records = [DataRecord(f"here:{n}", {"prompt": str(n), "answer": "a"}) for n in range(10)]
    assert [one.where for one in read_questions(records, validation=0.2)] == ["here:4", "here:9"]
    assert len(read_questions(records)) == 10
    with pytest.raises(InputError, match="among what is held out"):
        read_questions(records[:3], validation=0.2)


def test_shares_come_with_intervals() -> None:
    assert pass_at_k([True, False, False, False], 2) == pytest.approx(1 - 3 / 6)
    assert pass_at_k([True, True], 2) == 1.0
    half = estimate_accuracy("x", [1.0, 0.0] * 50)
    assert (half.low, half.high) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    none = estimate_accuracy("x", [0.0] * 10)
    assert none.low == pytest.approx(0.0, abs=1e-12)
    assert none.high == pytest.approx(0.2775, abs=1e-4)
