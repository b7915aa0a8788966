"""`mw train --recipe`: a model and records in, something learnt out; faults by file and line."""

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="trains a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

from meshwright.cli import main
from meshwright.spec.file_formats import load_data
from tests.run.posttrain.supervised.tiny import chats, model_folder, pairs, write
from tests.run.train.tiny import rows_of

Captured = pytest.CaptureFixture[str]
QUICK = ["layout.precision=fp32", "workload.global_batch=4", "device.threads=1",
         "device.type=cpu", "logging.progress=none", "optimizer.lr=0.01"]  # fmt: skip

LOOP = [
    "steps=1",
    "prompts_per_step=2",
    "group_size=2",
    "evaluate.num_prompts=0",
    "warm_up.steps=1",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work beside a model and two files of records."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_folder(), "base")
    shutil.copytree(model_folder(), "untold", ignore=lambda *_: ["chat_template.jinja"])
    write(Path("chats.jsonl"), chats(20))
    write(Path("pairs.jsonl"), pairs(20))
    write(Path("empty.jsonl"), [])
    write(Path("silent.jsonl"), [*chats(1), {"messages": []}])
    write(Path("alike.jsonl"), [{**one, "rejected": one["chosen"]} for one in pairs(3)])
    write(Path("few.jsonl"), chats(3))


def refused(words: list[str], capsys: Captured) -> str:
    assert main(["train", *words]) == 2
    return capsys.readouterr().err


def test_a_model_is_begun_with_by_its_path(capsys: Captured) -> None:
    words = [
        "--recipe",
        "lora",
        "base",
        "data.sources=chats.jsonl",
        "data.validation_fraction=0.1",
        *QUICK,
    ]
    assert main(["train", *words, "epochs=2", "adapter.target_modules=q_proj,v_proj"]) == 0
    printed = capsys.readouterr()
    assert "18 records" in printed.out
    assert "held-out loss" in printed.out
    assert "mw serve base --lora-modules own=runs/base-lora/adapter" in printed.err
    config = json.loads(Path("runs/base-lora/adapter/adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert main(["convert", "runs/base-lora", "merged", "--merge-adapter"]) == 0
    assert "adapter, merged, after step" in capsys.readouterr().out
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= {
        path.name for path in Path("merged").iterdir()
    }


@pytest.mark.parametrize("word", ["q_proj", "[q_proj]", '["q_proj"]'])
def test_one_target_on_the_command_line_is_a_list_of_one(word: str, capsys: Captured) -> None:
    words = ["--recipe", "lora", "base", "data.sources=chats.jsonl", *QUICK, "epochs=1"]
    assert main(["train", *words, f"adapter.target_modules={word}"]) == 0
    config = json.loads(Path("runs/base-lora/adapter/adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj"]


def test_an_adapter_may_have_the_spellings_of_peft(capsys: Captured) -> None:
    Path("lora.toml").write_text(
        'initial_load_path = "base"\n[recipe]\nkind = "lora"\n[adapter]\nr = 2\nlora_alpha = 4\n'
    )
    words = ["lora.toml", "data.sources=chats.jsonl", *QUICK]
    assert main(["train", *words, "adapter.rank=8", "--dry-run", "--json"]) == 0
    found = {each["field"]: each for each in json.loads(capsys.readouterr().out)["values"]}
    assert (found["adapter.rank"]["value"], found["adapter.alpha"]["value"]) == (8, 4)
    assert found["adapter.alpha"]["source"] == "lora.toml"
    assert "adapter.r: is PEFT's name of rank" in refused(
        [*words, "adapter.rank=8", "adapter.r=8"], capsys
    )


def test_what_a_run_began_with_is_not_written_over(capsys: Captured) -> None:
    words = ["--recipe", "sft", "base", "data.sources=chats.jsonl", *QUICK]
    assert main(["train", *words, "--stop-at-step", "1"]) == 0
    before = {path.name: path.read_bytes() for path in Path("base").iterdir()}
    for folder in ("base", "runs/../base", "runs/base-sft"):
        assert main(["convert", "runs/base-sft", folder]) == 2
        assert "would be written over" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in Path("base").iterdir()} == before


def test_a_run_goes_on_by_its_folder_and_for_longer(capsys: Captured) -> None:
    words = ["--recipe", "dpo", "base", "data.sources=pairs.jsonl", *QUICK]
    assert main(["train", *words, "--stop-at-step", "2"]) == 0
    capsys.readouterr()
    assert main(["train", "runs/base-dpo", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["steps"] == answer["total_steps"] == 5
    assert main(["train", "runs/base-dpo", "epochs=2"]) == 0
    assert set(rows_of(Path("runs/base-dpo"), "margin")) == set(range(1, 11))


def test_a_file_names_its_recipe(capsys: Captured) -> None:
    Path("mine").mkdir()
    Path("mine/dpo.toml").write_text(
        'initial_load_path = "../base"\nepochs = 1\n[recipe]\nkind = "dpo"\nbeta = 0.3\n[data]\n'
        'sources = ["../pairs.jsonl"]\nvalidation_fraction = 0.2\n[chats]\ntrain_on = "last"\n'
    )
    assert main(["train", "mine/dpo.toml", *QUICK, "--stop-at-step", "1"]) == 0
    kept = load_data(Path("runs/dpo/config.toml"))
    assert kept["recipe"] == {"kind": "dpo", "beta": 0.3}
    assert kept["chats"] == {"train_on": "last"}
    capsys.readouterr()
    assert main(["train", "mine/dpo.toml", *QUICK, "recipe.beta=0.5", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "recipe.beta" in told
    assert "0.5" in told
    assert "recipe dpo" in told


@pytest.mark.parametrize(
    ("given", "asked", "steps", "source"),
    [
        ("epochs = 2\n", "workload.tokens=256", 1, "command line"),
        ("[workload]\ntokens = 256\n", "epochs=2", 4, "epochs=2, command line"),
        ("", "seed=1", 2, "epochs=1, default"),
    ],
)
def test_the_command_line_says_how_long_a_run_is(
    given: str, asked: str, steps: int, source: str, capsys: Captured
) -> None:
    Path("sft.toml").write_text(f'initial_load_path = "base"\n{given}[recipe]\nkind = "sft"\n')
    words = ["sft.toml", "data.sources=chats.jsonl", *QUICK, asked, "--dry-run"]
    assert main(["train", *words, "--json"]) == 0
    found = {each["field"]: each for each in json.loads(capsys.readouterr().out)["values"]}
    assert found["workload.tokens"]["value"] == steps * 4 * 64
    assert found["workload.tokens"]["source"] == source


def test_a_recipe_may_not_change_while_a_run_goes_on(capsys: Captured) -> None:
    words = [
        "base",
        "data.sources=pairs.jsonl",
        *QUICK,
        "--output-dir",
        "run",
        "--stop-at-step",
        "1",
    ]
    assert main(["train", "--recipe", "dpo", *words]) == 0
    assert "the run began with 0.1" in refused(
        ["--recipe", "dpo", *words, "recipe.beta=0.2"], capsys
    )
    told = refused(["--recipe", "ipo", *words], capsys)
    assert "run: holds a run of dpo, and this is one of ipo\n  hint: give this run a folder" in told


def test_reinforcement_learning_says_what_of_an_adapter_it_lacks(capsys: Captured) -> None:
    words = ["--recipe", "grpo", "sorting-digits", *LOOP]
    told = refused([*words, "adapter.rank=8", "adapter.dropout=0.1"], capsys)
    assert "adapter.dropout: the engine drew with all inputs" in told
    assert "adapter.ranc" in refused([*words, "adapter.ranc=8"], capsys)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ppo", "a setting of grpo: objective.adv_estimator=gae"),
        ("sfft", "sft"),
        ("x", "use one of"),
    ],
)
def test_a_recipe_that_there_is_not_is_told_by_what_there_is(
    name: str, said: str, capsys: Captured
) -> None:
    told = refused(["--recipe", name, "sorting-digits"], capsys)
    assert "--recipe" in told
    assert said in told


def test_a_folder_with_a_run_of_another_kind_is_left_as_it_is(capsys: Captured) -> None:
    words = ["base", "data.sources=chats.jsonl", *QUICK]
    assert (
        main(["train", "--recipe", "sft", *words, "--output-dir", "sft", "--stop-at-step", "1"])
        == 0
    )
    loop = ["--recipe", "grpo", "sorting-digits", *LOOP]
    assert main(["train", *loop, "--output-dir", "grpo"]) == 0
    capsys.readouterr()
    kept = {name: Path(name, "config.toml").read_text() for name in ("sft", "grpo")}
    for other, folder, said in (
        (["--recipe", "lora", *words], "sft", "holds a run of sft, and this is one of lora"),
        (["--recipe", "sft", *words], "grpo", "holds a run of grpo, and this is one of sft"),
        (loop, "sft", "holds a run of sft, and this is one of grpo"),
        ([*loop, "seed=9"], "grpo", "seed differ from the run in grpo"),
    ):
        told = refused([*other, "--output-dir", folder], capsys)
        assert said in told
        assert told.count("error:") == 1
        assert Path(folder, "config.toml").read_text() == kept[folder]
    shutil.rmtree("sft/checkpoints")
    rows = Path("sft/metrics.jsonl").read_text()
    assert "holds a run of sft" in refused([*loop, "--output-dir", "sft"], capsys)
    assert Path("sft/metrics.jsonl").read_text() == rows


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--recipe", "dpo", "base", "data.sources=chats.jsonl"],
         "chats.jsonl:1: holds chats, and dpo learns from pairs"),
        (["--recipe", "sft", "base", "data.sources=pairs.jsonl"],
         "pairs.jsonl:1: holds pairs, and sft learns from chats"),
        (["--recipe", "kto", "base", "data.sources=chats.jsonl"], "learns from verdicts"),
        (["--recipe", "sft", "base", "data.sources=nowhere.jsonl"], "nowhere.jsonl: there is no"),
        (["--recipe", "sft", "base"], "name files of records: data.sources=chats.jsonl"),
        (["--recipe", "sft", "nowhere"], "nowhere: is neither a model nor a job"),
        (["--recipe", "sft", "untold", "data.sources=chats.jsonl"],
         "chats.jsonl:1: messages: the model has no chat template\n  hint: set chats.tokenizer"),
        (["--recipe", "sft", "base", "data.sources=chats.jsonl", "recipe.beta=1"],
         "recipe.beta: SFTRecipe has no field"),
        (["--recipe", "sft", "base", "data.sources=chats.jsonl", "epoch=2"],
         "command line: epoch: there is no part named 'epoch'\n  hint: did you mean epochs?"),
        (["--recipe", "sft", "base", "data.sources=chats.jsonl", "epochs=2", "workload.tokens=9"],
         "command line: epochs: stands beside workload.tokens"),
        (["--recipe", "sft", "base", "data.sources=chats.jsonl", "chats.train_on=some"],
         "chats.train_on: 'some' is not one of"),
        (["--recipe", "lora", "base", "data.sources=chats.jsonl",
          "adapter.target_modules=[nothing]"],
         "adapter.target_modules: 'nothing' names no linear layer"),
        (["--recipe", "lora", "base", "data.sources=chats.jsonl",
          "adapter.target_modules=q_proj,v_prj",
          "--dry-run"], "adapter.target_modules: 'v_prj' names no linear layer"),
        (["--recipe", "lora", "base", "data.sources=chats.jsonl", "layout.pp=2",
          "adapter.dropout=0.1"], "adapter.dropout: under layout.pp other inputs"),
        (["--recipe", "dpo", "base", "data.sources=pairs.jsonl", "workload.packing=concat"],
         "lets chats read each other"),
        (["--recipe", "kto", "base", "data.sources=chats.jsonl", "chats.length_policy=split"],
         "chats.length_policy: kto judges answers as a whole"),
        (["--recipe", "distillation", "base", "data.sources=chats.jsonl"],
         "is no recorded answer of a teacher: it holds messages\n  hint: let a teacher answer"),
        (["--recipe", "sft", "base", "data.sources=empty.jsonl"],
         "empty.jsonl: is empty: it holds no record"),
        (["--recipe", "sft", "base", "data.sources=silent.jsonl"],
         "silent.jsonl:2: messages is an empty list"),
        (["--recipe", "dpo", "base", "data.sources=alike.jsonl"],
         "data: both answers are the same in all 3 pairs"),
        (["--recipe", "sft", "base", "data.sources=few.jsonl", "data.validation_fraction=0.1"],
         "data: there are too few records to train on some and hold out others"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_place(
    words: list[str], what: str, capsys: Captured
) -> None:
    assert what in refused([*words, *QUICK], capsys)
    assert not Path("runs").exists()


def test_a_bad_line_is_named(capsys: Captured) -> None:
    with Path("chats.jsonl").open("a") as file:
        file.write('{"messages": [{"content": "no role"}]}\n')
    told = refused(["--recipe", "sft", "base", "data.sources=chats.jsonl", *QUICK], capsys)
    assert "chats.jsonl:21: message 1 of messages has no role" in told
    assert "fix" in told or "use role and content" in told


SHORT = ["steps=2", "prompts_per_step=2", "group_size=2", "evaluate.num_prompts=4",
         "warm_up.steps=1",
         "device=cpu"]  # fmt: skip


@pytest.mark.slow
def test_reinforcement_learning_is_a_recipe_too(capsys: Captured) -> None:
    words = ["train", "--recipe", "grpo", "sorting-digits", *SHORT, "--output-dir", "digits"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "meshwright.train.loop/2"
    assert answer["steps"] == 2
    assert set(answer["held_out"]) == {"0", "2"}
    assert main(["train", "digits"]) == 0
    told = capsys.readouterr().err
    assert "was finished before, and nothing is trained after step 2" in told


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["nothing"], "nothing: is no task, file or model"),
        (["sorting-digits", "--stop-at-step", "3"], "--stop-at-step: is nothing that"),
        (["sorting-digits", "stepps=3"], "stepps: RLConfig has no field"),
        (["sorting-digits", "group_size=0"], "command line: group_size: 0 is not a whole number"),
        (
            ["sorting-digits", "group_size=1"],
            "group_size: z-scored compares answers to a prompt",
        ),
        (["sorting-digits", "seed=a"], "command line: seed: "),
        (["sorting-digits", "warm_up=10"], "hint: set a field of it: warm_up.steps=10"),
        (["sorting-digits", "warm_up.steps=3", "warm_up=10"], "warm_up=10: stands beside"),
        (["sorting-digits", "warm_up=10", "warm_up.steps=3"], "warm_up.steps=3: stands beside"),
    ],
)
def test_what_the_loop_does_not_know_is_refused(
    words: list[str], what: str, capsys: Captured
) -> None:
    assert what in refused(["--recipe", "grpo", *words], capsys)


def test_every_value_of_a_loop_is_told_with_its_source(capsys: Captured) -> None:
    words = ["--recipe", "grpo", "sorting-digits", "optimizer.lr=1e-3", "--replay", "some.jsonl"]
    assert main(["train", *words, "--dry-run", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "meshwright.train.job/2"
    found = {each["field"]: (each["value"], each["source"]) for each in answer["values"]}
    assert found["optimizer.lr"] == (1e-3, "command line")
    assert found["optimizer.weight_decay"] == (0.01, "sorting-digits")
    assert found["replay"] == ("some.jsonl", "--replay")
    assert found["folder"] == ("runs/sorting-digits-grpo", "default")
    assert found["task.digits"] == (4, "default")


def test_a_recipe_is_launched_as_any_job(capsys: Captured) -> None:
    Path("dpo.toml").write_text(
        'initial_load_path = "base"\n[recipe]\nkind = "dpo"\n[layout]\ndp = 8\n[data]\n'
        'sources = ["pairs.jsonl"]\n'
    )
    assert main(["launch", "slurm", "dpo.toml"]) == 0
    assert "dpo.toml" in capsys.readouterr().out
    assert main(["launch", "slurm", "dpo.toml", "recipe.beta=-1", "layout.tp=2"]) == 2
    assert "recipe.beta" in capsys.readouterr().err
    assert main(["launch", "slurm", "dpo.toml", "layout.tp=2"]) == 0
    capsys.readouterr()
    asked = ["layout.tp=2", "layout.sequence_parallel=true", "layout.overlap_tp=true"]
    assert main(["launch", "slurm", "dpo.toml", *asked, "adapter.rank=4"]) == 2
    assert "layout.overlap_tp" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("default:resuming with a different layout")
def test_a_run_begun_by_replicas_is_ended_by_one_device(capsys: Captured) -> None:
    words = ["--recipe", "dpo", "base", "data.sources=pairs.jsonl", *QUICK, "optimizer.lr=0.001"]
    with pytest.raises(SystemExit) as end:
        main(
            [
                "train",
                *words,
                "layout.dp=2",
                "--nproc-per-node",
                "2",
                "--stop-at-step",
                "3",
                "--output-dir",
                "two",
            ]
        )
    assert end.value.code == 0
    assert main(["train", "two", "layout.dp=1"]) == 0
    assert "dp 2 → 1" in capsys.readouterr().err
    assert main(["train", *words, "--output-dir", "one"]) == 0
    for figure in ("loss", "margin"):
        alone, moved = rows_of(Path("one"), figure), rows_of(Path("two"), figure)
        assert moved == pytest.approx(alone, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--recipe", "sft", "base", "--rollout-only"], "--rollout-only: only reinforcement"),
        (["--recipe", "sft", "base", "--replay", "file"], "--replay: only reinforcement"),
        (["--recipe", "grpo", "base"], "nothing says what is asked"),
        (["--recipe", "grpo", "base"], "add task.name=questions task.train=FILE"),
        (["--recipe", "grpo", "base", "task.train=a.jsonl"], "hint: set task.name=questions"),
        (["--recipe", "grpo", "base", "task.name=qestions"], "did you mean questions?"),
        (
            [
                "--recipe",
                "grpo",
                "base",
                "task.name=questions",
                'task.rewards=[{kind="number", x=1}]',
            ],
            "task.rewards[0].x: NumberReward has no field 'x'",
        ),
        (["--recipe", "grpo", "sorting-digits", "task.digits=40"], "network.max_positions: 32"),
    ],
)
def test_what_would_be_passed_over_is_refused(
    words: list[str], what: str, capsys: Captured
) -> None:
    assert what in refused(words, capsys)


def test_a_rate_that_is_given_leaves_the_rest_of_a_loop_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "loop.toml"
    path.write_text('[optimizer]\nlr = 1e-3\n[task]\nname = "sorting-digits"\n')
    assert main(["train", "--recipe", "grpo", str(path), "--dry-run"]) == 0
    told = dict(line.split("\t")[:2] for line in capsys.readouterr().out.splitlines())
    assert (told["optimizer.schedule"], told["optimizer.warmup_steps"]) == ("linear", "0")
    assert (told["optimizer.lr"], told["optimizer.weight_decay"]) == ("0.001", "0.0")
    path.write_text('model = "somewhere"\n[task]\nname = "sorting-digits"\n')
    assert main(["train", "--recipe", "grpo", str(path), "--dry-run"]) == 0
    told = dict(line.split("\t")[:2] for line in capsys.readouterr().out.splitlines())
    assert told["optimizer.lr"] == "1e-06"
