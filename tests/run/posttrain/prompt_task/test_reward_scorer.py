"""A reward model judges in a run as it does in its own evaluation, whatever else is scored."""

import math
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.errors import InputError
from meshwright.run.posttrain.data.prepared_dataset import prepare_dataset
from meshwright.run.posttrain.data.records import DataRecord
from meshwright.run.posttrain.prompt_task.prompt_environment import (
    EXACT,
    PromptEnvironment,
    make_reward_model_key,
)
from meshwright.run.posttrain.prompt_task.prompt_files import read_prompt_splits
from meshwright.run.posttrain.prompt_task.reward_scorer import (
    CombinedRewardProvider,
    RewardScorer,
    compute_reward_model_digest,
)
from meshwright.run.posttrain.rl.task_loader import load_task
from meshwright.run.posttrain.rollout.verifiers.verifier_job import VerifierJob
from meshwright.run.posttrain.rollout.verifiers.verifier_pool import VerifierPool
from meshwright.run.posttrain.supervised import RewardModel, export_recipe
from meshwright.run.posttrain.supervised.reward_model import HEAD_FILE, save_reward_head
from tests.run.posttrain.data.small_words import words_of
from tests.run.posttrain.prompt_task.small import (
    liked,
    prompts_in,
    questions,
    reward_folder,
    settings,
    task,
)
from tests.run.posttrain.prompt_task.test_prompt_environment import turn
from tests.run.posttrain.supervised.tiny import LENGTH, model_folder, recipe_job, trained, write

CPU = torch.device("cpu")
ANSWERS = ("aye", "nay", "the answer is the answer", "talk and talk", "aye")


def scored(folder: Path, texts: tuple[str, ...], scorer: RewardScorer) -> list[float]:
    """Return the scores of answers to a prompt, as a run asks for them."""
    path = str(write(folder / "t.jsonl", questions(1)))
    asked_for = task(path, validation=0.0, rewards=(liked(),))
    parts = read_prompt_splits(asked_for, words_of(), room=60)
    asking = PromptEnvironment(
        parts.train, asked_for.question_rewards, words_of(), digest=parts.digest
    )
    checks = [check for text in texts for check in asking.verifier_jobs(0, turn(text))]
    return [part.value for part in scorer.score(checks)]


def evaluated(texts: tuple[str, ...], model: RewardModel) -> list[float]:
    """Return what the model's own evaluation gives the same answers, each read by itself."""
    prompt = questions(1)[0]["prompt"]
    records = [DataRecord("here", {"prompt": prompt, "completion": text}) for text in texts]
    return model.score_examples(prepare_dataset(records, words_of(), length=4096), most_tokens=1)


def test_scores_are_those_of_its_own_evaluation_bit_by_bit(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    found = scored(tmp_path, ANSWERS, RewardScorer(liked(), CPU))
    assert found == evaluated(ANSWERS, RewardModel.load(reward_folder()))
    assert len(set(found)) == 4, "equal answers have equal rewards, and others have others"


def test_a_score_does_not_hang_on_what_is_scored_beside_it(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    scorer = RewardScorer(liked(), CPU)
    together = scored(tmp_path, ANSWERS, scorer)
    assert together == [scored(tmp_path, (each,), scorer)[0] for each in ANSWERS]
    assert together[::-1] == scored(tmp_path, ANSWERS[::-1], scorer)


def test_a_model_that_the_recipe_trained_likes_what_it_was_taught(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    trained(recipe_job("reward", tmp_path, {"epochs": 2.0}), tmp_path / "run")
    export_recipe(tmp_path / "run", tmp_path / "exported", dtype=torch.float32)
    scorer = RewardScorer(liked(model=str(tmp_path / "exported")), CPU)
    found = scored(tmp_path, ("aye", "nay"), scorer)
    assert found[0] > found[1]
    assert found == evaluated(("aye", "nay"), RewardModel.load(tmp_path / "exported"))


def test_the_adapter_of_a_run_judges_beside_its_model(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    changes = {"epochs": 1.0, "adapter": {"rank": 2}}
    trained(recipe_job("reward", tmp_path, changes), tmp_path / "run")
    adapter = str(tmp_path / "run" / "adapter")
    scorer = RewardScorer(liked(model=str(model_folder()), adapter=adapter), CPU)
    model = RewardModel.load(model_folder(), adapter=adapter)
    assert scored(tmp_path, ("aye",), scorer) == evaluated(("aye",), model)


def test_scores_are_clipped_where_that_is_asked(tmp_path: Path) -> None:
    whole = scored(tmp_path, ANSWERS, RewardScorer(liked(), CPU))
    most = sorted(map(abs, whole))[2]
    found = scored(tmp_path, ANSWERS, RewardScorer(liked(clip=most), CPU))
    assert found == [math.copysign(min(abs(each), most), each) for each in whole]
    assert found != whole


def test_a_score_that_is_no_number_is_no_verdict(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(reward_folder(), folder)
    save_reward_head(torch.full((1, 32), math.nan), folder)
    scorer = RewardScorer(liked(model=str(folder)), CPU)
    (part,) = scorer.score([VerifierJob(name="liked", verifier="", payload={"tokens": [5, 6]})])
    assert (part.outcome, part.value, part.reason) == ("error", 0.0, "its score is nan")


def test_what_no_reward_can_be_is_no_verdict_and_the_others_have_theirs() -> None:
    scorer = RewardScorer(liked(), CPU)
    asked = [[5, 6], [5, 292], [7, 8]]
    checks = [VerifierJob(name="liked", verifier="", payload={"tokens": each}) for each in asked]
    heavy = VerifierJob(name="liked", verifier="", payload={"tokens": [5, 6]}, weight=1e39)
    first, strange, last, large = scorer.score([*checks, heavy])
    assert (first.outcome, last.outcome) == ("ok", "ok")
    assert [first.value, last.value] == RewardModel.load(reward_folder()).score_completions(
        [[5, 6], [7, 8]]
    )
    assert (strange.outcome, strange.value) == ("error", 0.0)
    assert strange.reason == "token 292 is none of its model's"
    assert (large.outcome, large.value) == ("error", 0.0)
    assert "too much with a weight of 1e+39" in large.reason


def test_a_checksum_tells_weights_apart_and_not_places(tmp_path: Path) -> None:
    first = compute_reward_model_digest(str(reward_folder()))
    shutil.copytree(reward_folder(), tmp_path / "copy")
    assert compute_reward_model_digest(str(tmp_path / "copy")) == first
    save_reward_head(torch.zeros(1, 32), tmp_path / "copy")
    assert compute_reward_model_digest(str(tmp_path / "copy")) != first


def test_models_and_verifiers_judge_as_one(tmp_path: Path) -> None:
    scorer = RewardScorer(liked(), CPU)
    text = {"text": "a", "answers": ["a"], "pattern": "", "normalization": "strip"}
    exact = VerifierJob(name="exact", verifier=EXACT, payload=text)
    model = VerifierJob(
        name="liked",
        verifier=make_reward_model_key(liked()),
        payload={"tokens": [5, 6]},
        weight=0.5,
    )
    with VerifierPool([EXACT], workers=1) as pool:
        judges = CombinedRewardProvider(pool, [scorer])
        parts = [each.result() for each in judges.submit([model, exact, model])]
        assert set(judges.fingerprints) == {EXACT, "reward model liked"}
    assert [part.name for part in parts] == ["liked", "exact", "liked"]
    assert parts[0].fingerprint == judges.fingerprints["reward model liked"] == scorer.fingerprint
    assert (parts[0].value, parts[0].weight) == (parts[2].value, 0.5)


def spoiled(folder: Path, **given: Any) -> str:
    """Return a reward model with other words or less room."""
    shutil.copytree(reward_folder(), folder)
    if "word" in given:
        path = folder / "tokenizer.json"
        path.write_text(path.read_text().replace('"<|endoftext|>"', '"<|other|>"'))
    if "room" in given:
        path = folder / "config.json"
        path.write_text(path.read_text().replace(f": {LENGTH}", f": {given['room']}"))
    if "head" in given:
        (folder / HEAD_FILE).unlink()
    if "adapter" in given:
        (folder / "config.json").rename(folder / "adapter_config.json")
    return str(folder)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"word": 1}, r"task.rewards\[0\].model: .* has another vocabulary than the policy"),
        ({"room": 16}, r"task.rewards\[0\].model: reads 16 tokens, and a prompt with its answer"),
        ({"head": 0}, r"task.rewards\[0\].model: .* holds no reward_head.safetensors"),
        (
            {"adapter": 1},
            r"task.rewards\[0\].model: .* holds no config.json.*RUN FOLDER --merge-adapter",
        ),
    ],
)
def test_a_model_that_cannot_judge_this_policy_is_refused_before_anything_runs(
    tmp_path: Path, given: dict[str, int], told: str
) -> None:
    model = spoiled(tmp_path / "model", **given)
    asked_for = task(prompts_in(tmp_path), rewards=(liked(model=model),))
    with pytest.raises(InputError, match=told):
        load_task(settings(asked_for))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"device": "cudda"}, r"task.rewards\[0\].device: .*cudda"),
        ({"device": "cuda:99"}, r"task.rewards\[0\].device: .*CUDA device"),
        ({"adapter": "nowhere"}, r"task.rewards\[0\].adapter: nowhere holds no reward_head"),
    ],
)
def test_a_place_that_is_not_there_is_refused_before_anything_runs(
    tmp_path: Path, given: dict[str, str], told: str
) -> None:
    asked_for = task(prompts_in(tmp_path), rewards=(liked(**given),))
    with pytest.raises(InputError, match=told):
        load_task(settings(asked_for))


def test_only_who_scores_needs_reward_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for = task(prompts_in(tmp_path), rewards=(liked(model=str(tmp_path / "away")),))
    given = settings(asked_for)
    with pytest.raises(InputError, match="away"):
        load_task(given)
    assert load_task(msgspec.structs.replace(given, replay="rollouts.jsonl")).train.name
    second = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (second | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    assert load_task(given).train.name
