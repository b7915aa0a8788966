"""Job files: one file says all, every problem of it is listed, and other commands read it too."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.run.train.job.job_file import (
    JOB_TABLES,
    dump_job,
    load_job,
    read_job,
    read_job_with_origins,
    resolve_paths,
)
from meshwright.run.train.job.train_job import TrainJob
from meshwright.spec.file_formats import load_data
from meshwright.spec.job_spec import TRAINER_SECTIONS, read_job_spec
from tests.run.train.tiny import STEPS, job_data, tiny_job, write_job

NOWHERE = Path("nowhere")
EXAMPLES = sorted((Path(__file__).parents[4] / "examples").glob("train-*.toml"))


def by(group: str, operation: str, algorithm: str) -> dict[str, str]:
    return {"group": group, "operation": operation, "algorithm": algorithm}


def problems(data: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(InputError) as refused:
        read_job(data)
    return {problem.where: problem.what for problem in refused.value.problems}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_sound(path: Path) -> None:
    assert load_job(path).check() == ()


@pytest.mark.parametrize("text", ["a,b", "[a, b]", "[a,b]"])
def test_a_list_can_be_written_as_a_shell_leaves_it(tmp_path: Path, text: str) -> None:
    path = write_job(tmp_path / "job.toml", NOWHERE)
    assert load_job(path, {"data": {"sources": text}}).data.sources == ("a", "b")
    one = load_job(path, {"layout": {"recompute": "selective", "recompute_ops": "mlp_act"}})
    assert one.layout.recompute_ops == ("mlp_act",)


def test_a_job_says_how_long_it_is() -> None:
    assert tiny_job(NOWHERE).workload.num_steps == STEPS


def test_every_problem_of_a_file_is_listed_with_the_file_and_its_path(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("""
seed = -1
colour = "blue"
model = "llama3.1-8c"
[layout]
precison = "bf16"
[workload]
tokens = 100
sequence_length = 0
global_batch = 8
[data]
sources = []
[optimizer]
lr = "fast"
[device]
threads = 0
""")
    with pytest.raises(InputError) as refused:
        load_job(path, {"optimizer": {"eps": -1}})
    assert [problem.where for problem in refused.value.problems] == [
        f"{path}: seed",
        f"{path}: colour",
        f"{path}: model",
        f"{path}: layout.precison",
        f"{path}: workload.sequence_length",
        f"{path}: data.sources",
        f"{path}: optimizer.lr",
        "command line: optimizer.eps",
        f"{path}: device.threads",
    ]


def test_what_is_missing_is_said() -> None:
    assert problems({}) == dict.fromkeys(("model", "workload", "data"), "is missing")


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"layout": {"tp": 3}}, "layout.tp"),
        ({"layout": {"microbatch": 3}}, "layout.microbatch"),
        ({"layout": {"global_batch": 8}}, "layout.global_batch"),
        ({"layout": {"precision": "nvfp4"}}, "layout.precision"),
        ({"layout": {"offload": ["optimizer"]}}, "layout.offload"),
        ({"layout": {"moment_precision": "fp8"}}, "layout.moment_precision"),
        ({"layout": {"recompute": "selective", "recompute_ops": ["moe_act"]}},
         "layout.recompute_ops"),
        ({"workload": {"adapter": {"rank": 4}}}, "workload.adapter"),
        ({"workload": {"kind": "requests"}}, "workload.kind"),
        ({"model": {"positions": "learned"}, "workload": {"sequence_length": 64}},
         "workload.sequence_length"),
        ({"eval": {"sequences": 0}}, "eval.sequences"),
        ({"moe": {"capacity_factor": 1.25}}, "moe.capacity_factor"),
        ({"moe": {"capacity_factor": 0}}, "moe.capacity_factor"),
        ({"device": {"collective_algorithms": [by("pd", "all_reduce", "ring")]}},
         "device.collective_algorithms[0].group"),
        ({"device": {"collective_algorithms": [by("tp", "all_reduce", "rign")]}},
         "device.collective_algorithms[0].algorithm"),
        ({"device": {"collective_algorithms": [by("tp", "broadcast", "ring")]}},
         "device.collective_algorithms[0].operation"),
        ({"device": {"collective_algorithms": [by("tp", "all_reduce", each) for each in ("ring",
                                                                                         "chain")]}},
         "device.collective_algorithms[1]"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(changes: dict[str, Any], where: str) -> None:
    assert where in problems(job_data(NOWHERE, changes))


def test_a_wrong_algorithm_is_refused_where_it_was_written(tmp_path: Path) -> None:
    chosen = {"device": {"collective_algorithms": [by("dp-cp", "all_reduce", "bruck")]}}
    path = write_job(tmp_path / "job.toml", NOWHERE, chosen)
    with pytest.raises(InputError) as refused:
        load_job(path)
    (problem,) = refused.value.problems
    assert problem.where == f"{path}: device.collective_algorithms[0].algorithm"
    assert "ring" in problem.fix


def test_parts_that_can_be_read_are_judged_beside_those_that_cannot() -> None:
    found = problems(job_data(NOWHERE, {"layout": {"microbatch": 3}, "optimizer": {"lr": "x"}}))
    assert set(found) == {"optimizer.lr", "layout.microbatch"}


def test_changes_win_over_the_file_and_are_known_as_such(tmp_path: Path) -> None:
    path = write_job(tmp_path / "job.toml", NOWHERE)
    asked = read_job_with_origins(path, {"optimizer": {"lr": 0.5}})
    assert asked.job.optimizer.lr == 0.5
    assert asked.get_origin("optimizer.lr") == "command line"
    assert asked.get_origin("optimizer.warmup_steps") == str(path)
    assert asked.get_origin("optimizer.eps") == "default"


def test_paths_count_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.toml").touch()
    data = {
        "model": "model.toml",
        "initial_load_path": "weights",
        "data": {
            "sources": ["tokens", {"path": "/whole/tokens"}, "builtin", "builtin:1MB"],
            "validation_sources": [{"path": "held", "weight": 2}],
            "tokenizer": "tokenizer.json",
            "cache_dir": "cache",
        },
    }
    assert resolve_paths(tmp_path, data) == {
        "model": str(tmp_path / "model.toml"),
        "initial_load_path": str(tmp_path / "weights"),
        "data": {
            "sources": [str(tmp_path / "tokens"), {"path": "/whole/tokens"}, "builtin",
                        "builtin:1MB"],
            "validation_sources": [{"path": str(tmp_path / "held"), "weight": 2}],
            "tokenizer": str(tmp_path / "tokenizer.json"),
            "cache_dir": str(tmp_path / "cache"),
        },
    }  # fmt: skip


def test_names_are_no_paths(tmp_path: Path) -> None:
    data = {"model": "llama3.1-8b", "data": {"tokenizer": "bytes", "cache_dir": ""}}
    assert resolve_paths(tmp_path, data) == data


def test_a_written_job_reads_back_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_job(Path("tokens"), {"data": {"cache_dir": "cache"}})
    monkeypatch.chdir(tmp_path)
    written = tmp_path / "run" / "config.toml"
    written.parent.mkdir()
    written.write_text(dump_job(job))
    again = load_job(written)
    assert again.data.sources == (str(tmp_path / "tokens"),)
    assert again.data.cache_dir == str(tmp_path / "cache")
    assert (again.model, again.layout, again.workload) == (job.model, job.layout, job.workload)


def test_other_commands_read_the_same_file(tmp_path: Path) -> None:
    path = write_job(tmp_path / "job.toml", NOWHERE)
    work = read_job_spec({**load_data(path), "cluster": "h100-superpod"})
    job = load_job(path)
    assert (work.model, work.layout, work.workload) == (job.model, job.layout, job.workload)


def test_a_cluster_beside_a_job_is_passed_over() -> None:
    data = {**job_data(NOWHERE), "cluster": "h100-superpod", "gpus": 1}
    assert read_job(data) == tiny_job(NOWHERE)


def test_predictions_pass_over_every_part_that_only_training_reads() -> None:
    assert set(TRAINER_SECTIONS) == set(JOB_TABLES) - {"model", "layout", "workload"}
    assert set(JOB_TABLES) == set(TrainJob.__struct_fields__)


MOE = {
    "name": "dense",
    "mixer": {"kind": "attention", "heads": 2, "kv_heads": 1, "head_dim": 8, "rotary": {}},
    "mlp": {"kind": "experts", "count": 4, "top_k": 2, "width": 16},
}


def test_experts_that_cannot_be_shared_out_are_reported_once() -> None:
    given = {
        "model": {"blocks": [MOE]},
        "layout": {"dp": 3, "ep": 3},
        "workload": {"global_batch": 6},
    }
    with pytest.raises(InputError) as refused:
        read_job(job_data(NOWHERE, given))
    assert [each.where for each in refused.value.problems] == ["layout.ep"]


def test_room_of_experts_reaches_the_modules_and_too_little_is_remarked() -> None:
    given = {"model": {"blocks": [MOE]}, "moe": {"capacity_factor": 0.5}}
    job = read_job(job_data(NOWHERE, given))
    assert job.make_build_options().capacity_factor == 0.5
    assert any("moe.capacity_factor is 0.5" in remark for remark in job.list_warnings())
