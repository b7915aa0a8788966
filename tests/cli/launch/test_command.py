"""`mw launch`: dry unless asked, and what it refuses before a queue would."""

import ast
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from meshwright.cli import main

Captured = pytest.CaptureFixture[str]

TINY = (Path(__file__).parents[3] / "examples/train-tiny.toml").read_text()
JOB = TINY.replace("microbatch = 2", "dp = 16").replace("global_batch = 8", "global_batch = 16")


@pytest.fixture(autouse=True)
def at_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("MESHWRIGHT_SLURM")]:
        monkeypatch.delenv(name)


def fake_sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> Path:
    program = folder / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\ncat > {folder}/submitted\n{line}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return folder / "submitted"


def test_the_script_is_printed_and_nothing_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    submitted = fake_sbatch(tmp_path, monkeypatch, "echo 7")
    assert main(["launch", "slurm", "job.toml"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("#!/bin/bash\n")
    assert "#SBATCH --nodes=2\n" in printed.out
    assert "nothing was started: --submit does" in printed.err
    assert not submitted.exists()


def test_submit_hands_over_the_same_script_and_answers_with_the_jobs_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    submitted = fake_sbatch(tmp_path, monkeypatch, "echo '4711;north'")
    words = ["launch", "slurm", "job.toml", "--submit", "--output", "job.sh"]
    assert main([*words, "--quiet"]) == 0
    assert capsys.readouterr().out == "4711\n"
    assert submitted.read_text() == Path("job.sh").read_text()


def test_what_sbatch_refuses_is_said_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    fake_sbatch(tmp_path, monkeypatch, "echo 'sbatch: error: invalid partition' >&2; exit 1")
    assert main(["launch", "slurm", "job.toml", "--submit"]) == 2
    said = capsys.readouterr().err
    assert "error: sbatch: invalid partition" in said
    assert "hint: sinfo" in said


def test_without_slurm_submit_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["launch", "slurm", "job.toml", "--submit"]) == 3
    assert "submit it where Slurm is" in capsys.readouterr().err


def test_words_after_the_file_change_the_job_and_reach_the_trainer(capsys: Captured) -> None:
    words = [
        "launch",
        "slurm",
        "job.toml",
        "layout.dp=4",
        "--python",
        "py",
        "--output-dir",
        "runs/a",
    ]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "meshwright.launch/1"
    assert (answer["nodes"], answer["ranks_per_node"]) == (1, 4)
    wanted = [
        "py",
        "-m",
        "meshwright",
        "train",
        "job.toml",
        "layout.dp=4",
        "--output-dir",
        "runs/a",
    ]
    assert answer["command"] == wanted


def test_a_site_sets_its_options_once_as_variables_and_flags_win(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("MESHWRIGHT_SLURM_PARTITION", "site")
    monkeypatch.setenv("MESHWRIGHT_SLURM_ACCOUNT", "ours")
    assert main(["launch", "slurm", "job.toml", "--account", "mine"]) == 0
    printed = capsys.readouterr().out
    assert "--partition=site" in printed
    assert "--account=mine" in printed


def test_a_job_for_the_cpu_asks_for_no_gpus(capsys: Captured) -> None:
    assert main(["launch", "slurm", "job.toml", "device.type=cpu"]) == 0
    assert "gres" not in capsys.readouterr().out


def test_a_layout_that_does_not_fit_the_model_is_refused_before_it_queues(
    capsys: Captured,
) -> None:
    Path("job.toml").write_text(
        'model = "llama3.1-8b"\ncluster = "h100-superpod"\n[layout]\ntp = 3\n'
    )
    assert main(["launch", "slurm", "job.toml"]) == 2
    assert "job.toml: layout.tp: 3 does not divide" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--time", "soon"], "--time: 'soon' is no time"),
        (["--gpus-per-node", "5"], "16 ranks do not fill nodes of 5 GPUs"),
        (["--gpus-per-node", "0"], "--gpus-per-node: 0 is not a whole number"),
        (["--wrap", "'open"], '--wrap: "\'open" is no line of shell'),
        (["--env", "TWO WORDS"], "--env: 'TWO WORDS' sets nothing"),
        (["--cpus-per-rank", "many"], "--cpus-per-rank"),
        (["--partitoin", "x"], "did you mean --partition?"),
        (["layout.dp=0"], "command line: layout.dp"),
        (["layout.tp=3"], "command line: layout.tp: 3 does not divide"),
        (["optimizer.rate=1"], "command line: optimizer.rate: OptimizerConfig has no field"),
    ],
)
def test_mistakes_are_named_with_their_flag(words: list[str], said: str, capsys: Captured) -> None:
    assert main(["launch", "slurm", "job.toml", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_manifest_needs_an_image(capsys: Captured) -> None:
    assert main(["launch", "k8s", "job.toml"]) == 2
    said = capsys.readouterr().err
    assert "--image: is missing" in said
    assert said.count("error:") == 1


IN_A_POD = ["--image", "i:1", "--volume-claim", "data:/data", "data.cache_dir=/data/cache"]


def test_a_manifest_can_be_read_from_where_it_was_written(capsys: Captured) -> None:
    words = ["--kind", "pytorchjob", "--resource", "rdma/hca=8", "-o", "job.yaml"]
    assert main(["launch", "k8s", "job.toml", *IN_A_POD, *words]) == 0
    assert "kubectl apply -f job.yaml does" in capsys.readouterr().err
    config, job = yaml.safe_load_all(Path("job.yaml").read_text())
    assert job["kind"] == "PyTorchJob"
    assert config["data"] == {"job.toml": JOB}


def test_a_pod_has_the_job_file_and_keeps_the_run_in_a_volume(capsys: Captured) -> None:
    assert main(["launch", "k8s", "job.toml", *IN_A_POD, "--json"]) == 0
    words = json.loads(capsys.readouterr().out)["command"][3:]
    assert words[:2] == ["train", "/etc/meshwright/job.toml"]
    assert words[-2:] == ["--output-dir", "/data/runs/job"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--image", "i:1"], "--output-dir: runs/job is in no volume"),
        ([*IN_A_POD, "--output-dir", "/srv/run"], "use --output-dir /data/run"),
        (IN_A_POD[:-1], "job.toml: data.cache_dir: ../build/cache is a path of this machine"),
        ([*IN_A_POD, "data.sources=mine"], "command line: data.sources: mine is a path of this"),
    ],
)
def test_what_a_pod_has_not_or_loses_is_refused(
    words: list[str], said: str, capsys: Captured
) -> None:
    assert main(["launch", "k8s", "job.toml", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_says_something_else_is_not_overwritten_unasked(capsys: Captured) -> None:
    words = ["launch", "slurm", "job.toml", "--output", "job.sh"]
    assert main(words) == main(words) == 0, "the same text is no loss"
    Path("job.sh").write_text("mine")
    assert main(words) == 2
    assert "--output job.sh: is there already" in capsys.readouterr().err
    assert Path("job.sh").read_text() == "mine"
    assert main([*words, "--force"]) == 0
    assert Path("job.sh").read_text() != "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch", "--quiet", "slurm", "job.toml"], "--quiet stands before the verb"),
        (["--quiet", "launch", "slurm", "job.toml"], "write it last: mw launch slurm … --quiet"),
    ],
)
def test_a_flag_too_early_is_told_where_it_belongs(
    words: list[str], said: str, capsys: Captured
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_ray_driver_is_printed(capsys: Captured) -> None:
    assert main(["launch", "ray", "job.toml"]) == 0
    compile(capsys.readouterr().out, "driver.py", "exec")


HOSTILE_NAMES = (
    'a"""+str(__import__("os").system("touch PWNED"))+""".toml',
    "a\ntouch PWNED\n.toml",
    "a\n#SBATCH --wrap=id\n.toml",
    "a\nHEALTH\ntouch PWNED\n.toml",
    "$(touch PWNED).toml",
    "`touch PWNED`.toml",
    "a; touch PWNED.toml",
    "a'b.toml",
    'a"b.toml',
    "a\u2028kind: Pod.toml",
    "a\x85kind: Pod.toml",
    "\x1b]0;title\x07.toml",
    "a\r\ntouch PWNED.toml",
)
LAUNCHERS = ("slurm", "k8s", "ray")


@pytest.mark.parametrize("wrapped", [False, True], ids=["trainer", "wrap"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_job_file_of_any_name_runs_nothing_of_its_name(
    name: str, launcher: str, wrapped: bool, capsys: Captured
) -> None:
    Path(name).write_text(JOB)
    words = ["launch", launcher, name, "--name", "ok", "-o", "out"]
    pod = ["data.cache_dir=/data/cache", "--image", "i:1", "--volume-claim", "data:/data"]
    words += pod if launcher == "k8s" else []
    words += ["--wrap", "python train.py"] if wrapped else []
    code = main(words)
    assert code in (0, 2)
    assert "\x1b" not in capsys.readouterr().err
    if code:
        return
    text = Path("out").read_text()
    if launcher == "slurm":
        assert subprocess.run(["bash", "-n", "out"], check=False).returncode == 0
        commands = [line for line in text.splitlines() if line and line[0] not in "# "]
        assert not any(line.startswith("touch") for line in commands)
    elif launcher == "k8s":
        assert {part["kind"] for part in yaml.safe_load_all(text)} <= {"ConfigMap", "JobSet"}
    else:
        kinds = {type(node).__name__ for node in ast.parse(text).body}
        assert kinds == {"Import", "ImportFrom", "Assign", "FunctionDef", "If"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    "variable",
    ["WANDB_API_KEY=k3y", "HF_TOKEN=k3y", "AWS_SECRET_ACCESS_KEY=k3y", "PGPASSWORD=k3y",
     "MYSQL_PWD=k3y", "HTTPS_PROXY=http://me:k3y@proxy:80"],
)  # fmt: skip
def test_a_secret_is_not_written_into_a_job_file(
    launcher: str, variable: str, capsys: Captured
) -> None:
    image = ["--image", "i:1"] if launcher == "k8s" else []
    words = ["launch", launcher, "job.toml", "--wrap", "python train.py", *image]
    assert main([*words, "--env", variable]) == 2
    said = capsys.readouterr()
    assert "looks like a secret" in said.err
    assert "k3y" not in said.err + said.out
    assert main([*words, "--env", variable.partition("=")[0]]) == 0
    assert variable.partition("=")[0] in capsys.readouterr().out
    assert main([*words, "--env", variable, "--plain-secrets"]) == 0
    assert "k3y" in capsys.readouterr().out


@pytest.mark.parametrize(
    "variable",
    ["PWD=/data", "TOKENIZERS_PARALLELISM=false", "KEYS_PER_SHARD=8", "OMP_NUM_THREADS=4"],
)
def test_other_variables_are_written_into_a_job_file(variable: str, capsys: Captured) -> None:
    assert main(["launch", "slurm", "job.toml", "--env", variable]) == 0
    assert f"export {variable}" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_finds_nothing_in_a_slurm_script() -> None:
    assert main(["launch", "slurm", "job.toml", "--env", "HF_TOKEN", "-o", "out"]) == 0
    done = subprocess.run(
        ["shellcheck", "-s", "bash", "--severity=warning", "out"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""
