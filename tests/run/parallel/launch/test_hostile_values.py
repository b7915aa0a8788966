"""Values of users in generated files: quoted so that they arrive as they are, or refused."""

import ast
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.errors import InputError
from meshwright.run.parallel.launch.kubernetes import (
    ConfigFile,
    KubernetesOptions,
    ManifestKind,
    render_manifest,
)
from meshwright.run.parallel.launch.launch_spec import LaunchSpec, NodeShape
from meshwright.run.parallel.launch.ray import RayOptions, render_driver
from meshwright.run.parallel.launch.slurm import SlurmOptions, render_sbatch
from tests.run.parallel.launch.hostile_text import UNWRITABLE, WORDS

SHAPE = NodeShape(nodes=1, ranks_per_node=2, device="cpu")
GROUPS = [WORDS[at : at + 10] for at in range(0, len(WORDS), 10)]
"""A shell takes milliseconds to start, so that scripts hold ten words each."""


def spec(*words: str, **changes: Any) -> LaunchSpec:
    return LaunchSpec(**{
        "name": "job", "command": ("stub", *words), "node_shape": SHAPE,
        "environment": {f"VALUE_{index}": word for index, word in enumerate(words)},
        "source": f"{words[0] if words else 'job'}.toml", **changes,
    })  # fmt: skip


def run_bash(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a batch script beside stubs of Slurm, which write down how they were called."""
    stubs = folder / "stubs"
    stubs.mkdir()
    report = (
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"with open({str(folder / 'calls')!r}, 'a') as file:\n"
        "    words = {'words': sys.argv[1:], 'environment': dict(os.environ)}\n"
        "    file.write(json.dumps(words) + '\\n')\n"
    )
    for name, body in {"srun": report, "scontrol": "#!/bin/sh\necho node1\n"}.items():
        (stubs / name).write_text(body)
        (stubs / name).chmod(0o755)
    return subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env={"PATH": f"{stubs}:{os.defpath}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1",
             "SLURM_JOB_NUM_NODES": "1", "HOME": "/somewhere"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def run_sbatch(text: str, folder: Path) -> list[dict[str, Any]]:
    """Run a batch script; return words and variables of each program that srun starts."""
    done = run_bash(text, folder)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


@pytest.mark.parametrize("words", GROUPS, ids=lambda words: words[0][:12] or "empty")
def test_a_slurm_script_hands_words_and_variables_over_as_they_are(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    start = spec(*words)
    options = SlurmOptions(folder=f"{words[0]}/{words[-1]}", container=words[1], mounts=words[2])
    *_, rank = run_sbatch(render_sbatch(start, options), tmp_path)
    assert rank["words"][-len(start.command) :] == list(start.command)
    assert f"--container-image={words[1]}" in rank["words"]
    assert {name: rank["environment"][name] for name in start.environment} == start.environment
    assert not list(tmp_path.rglob("PWNED"))


@pytest.mark.parametrize("word", WORDS)
def test_the_commands_line_of_a_slurm_script_reads_back_as_the_command(word: str) -> None:
    text = render_sbatch(spec(word), SlurmOptions(restarts=0, health=False))
    assert shlex.split(text.splitlines()[-1]) == ["stub", word]


@pytest.mark.parametrize("folder", ["a b", "$(touch PWNED)", "@DISK_KIB@", "'", "x`touch PWNED`"])
def test_the_look_at_a_node_takes_a_folder_as_it_is(folder: str, tmp_path: Path) -> None:
    text = render_sbatch(spec("x"), SlurmOptions(folder=folder, disk_bytes=1))
    look, _ = run_sbatch(text, tmp_path)
    script = look["words"][-1]
    assert f"  place={shlex.quote(folder)}\n" in script
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_a_manifest_holds_every_value_as_it_is(word: str, kind: ManifestKind) -> None:
    start = spec(word, module=("-m", "stub", word))
    text = render_manifest(start, KubernetesOptions(image="i:1", kind=kind), ConfigFile(
        f"{word}.toml", f"key = {word!r}\n"
    ))  # fmt: skip
    config, job = yaml.safe_load_all(text)
    container = _containers(job)[0]
    assert expand(container["command"][-1]) == word
    values = {one["name"]: one["value"] for one in container["env"]}
    assert expand(values["VALUE_0"]) == word
    assert list(config["data"].values()) == [f"key = {word!r}\n"]
    assert config["data"].keys() <= {ConfigFile(f"{word}.toml", "").name}


def _containers(job: dict[str, Any]) -> list[dict[str, Any]]:
    inner = job["spec"]
    if job["kind"] == "JobSet":
        pod = inner["replicatedJobs"][0]["template"]["spec"]["template"]
    else:
        pod = inner["pytorchReplicaSpecs"]["Master"]["template"]
    return list(pod["spec"]["containers"])


def expand(text: str) -> str:
    """Expand references as Kubernetes does (third_party/forked/golang/expansion/expand.go)."""
    found, at = "", 0
    while at < len(text):
        if text[at] == "$" and at + 1 < len(text):
            if text[at + 1] == "$":
                found, at = found + "$", at + 2
                continue
            if text[at + 1] == "(" and ")" in text[at + 2 :]:
                end = text.index(")", at + 2)
                found, at = found + "<expanded>", end + 1
                continue
        found, at = found + text[at], at + 1
    return found


@pytest.mark.parametrize("word", WORDS)
def test_scalars_of_a_manifest_are_text_in_every_yaml(word: str) -> None:
    """Readers of YAML 1.2 take `1e3` and `0o17` for numbers, where PyYAML reads text."""
    text = render_manifest(spec(word), KubernetesOptions(image="i:1"))
    (value,) = [
        line.strip().removeprefix("value: ")
        for before, line in zip(text.splitlines(), text.splitlines()[1:], strict=False)
        if before.strip() == "- name: VALUE_0" or before.strip() == '- name: "VALUE_0"'
    ]
    assert value.startswith('"') or (value[0].isalpha() and value not in ("yes", "no", "y", "n"))


@pytest.mark.parametrize("word", WORDS)
def test_a_ray_driver_holds_every_value_as_it_is(word: str) -> None:
    start = spec(word)
    tree = ast.parse(render_driver(start, RayOptions(address=word.strip() or "auto")))
    values = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert values["PROGRAM"] == ["--no-python", "stub", word]
    assert values["VARIABLES"]["VALUE_0"] == word
    kinds = {type(node).__name__ for node in tree.body}
    assert kinds == {"Import", "ImportFrom", "Assign", "FunctionDef", "If"}


@pytest.mark.parametrize("text", UNWRITABLE)
def test_words_that_no_file_can_hold_are_refused(text: str) -> None:
    for changes in ({"command": ("stub", text)}, {"environment": {"NAME": text}}, {"name": text}):
        with pytest.raises(InputError):
            spec(**changes)


@pytest.mark.parametrize("text", UNWRITABLE)
@pytest.mark.parametrize("field", ["folder", "container", "mounts", "log", "socket_ifname", "setup",
                                   "flags", "partition"])  # fmt: skip
def test_slurm_options_that_no_script_can_hold_are_refused(text: str, field: str) -> None:
    changes: dict[str, Any] = {field: (f"-{text}",) if field in ("setup", "flags") else text}
    with pytest.raises(InputError):
        SlurmOptions(**changes)


@pytest.mark.parametrize("text", ["a b", "a#b", "'a'", 'a"b', "a\\b"])
@pytest.mark.parametrize("field", ["account", "partition", "qos", "constraint", "exclude", "log"])
def test_slurm_options_that_sbatch_reads_otherwise_are_refused(text: str, field: str) -> None:
    changes: dict[str, Any] = {field: text}
    with pytest.raises(InputError, match="is not one word"):
        SlurmOptions(**changes)


@pytest.mark.parametrize("text", UNWRITABLE)
def test_a_job_file_of_any_name_stays_in_its_comment(text: str) -> None:
    start = spec("x", source=f'a{text}b"""touch PWNED.toml')
    head, *rest = render_sbatch(start, SlurmOptions()).split("\n")[1:]
    assert head.startswith("# Written by mw launch slurm from a")
    assert rest[0].startswith("#SBATCH --job-name")
    job = yaml.safe_load(render_manifest(start, KubernetesOptions(image="i:1")))
    assert job["kind"] == "JobSet"
    assert ast.get_docstring(ast.parse(render_driver(start, RayOptions()))) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "a b"},
        {"image": "a\nb"},
        {"namespace": "a: b"},
        {"namespace": "$(touch PWNED)"},
        {"secret": "a b; touch PWNED"},
        {"queue": "Q"},
        {"volume_claims": ("a b:/data",)},
        {"volume_claims": ("data:/a:b",)},
        {"volume_claims": ("data:/a\nb",)},
        {"resources": ("a=b\x1b",)},
        {"node_selector": ("a\u2028=b",)},
        {"run_as_user": 0},
    ],
)
def test_kubernetes_options_that_no_manifest_can_hold_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        KubernetesOptions(**{"image": "i:1", **changes})


def test_values_of_inherited_variables_stand_in_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    start = spec("x", inherited=("HF_TOKEN",))
    script = render_sbatch(start, SlurmOptions())
    manifest = render_manifest(start, KubernetesOptions(image="i:1"))
    driver = render_driver(start, RayOptions())
    assert "verysecret" not in script + manifest + driver
    *_, rank = run_sbatch(f"HF_TOKEN=given\n{script}", tmp_path)
    assert rank["environment"]["HF_TOKEN"] == "given"
    variable = _containers(yaml.safe_load(manifest))[0]["env"][-1]
    reference = {"name": "job-env", "key": "HF_TOKEN"}
    assert variable == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}}
    assert 'kubectl create secret generic job-env --from-literal=HF_TOKEN="$HF_TOKEN"' in manifest


def test_a_script_stops_where_an_inherited_variable_is_missing(tmp_path: Path) -> None:
    script = render_sbatch(spec("x", inherited=("HF_TOKEN",)), SlurmOptions(health=False))
    done = run_bash(script, tmp_path)
    assert done.returncode == 127
    assert done.stderr.endswith("HF_TOKEN: set it where sbatch is called\n")
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_pods_may_not_gain_privileges(kind: ManifestKind) -> None:
    text = render_manifest(spec("x"), KubernetesOptions(image="i:1", kind=kind))
    context = _containers(yaml.safe_load(text))[0]["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"]["drop"] == ["ALL"]
    assert "IPC_LOCK" not in context["capabilities"]["add"]
    assert "automountServiceAccountToken: false" in text
    assert "type: RuntimeDefault" in text


def test_pods_of_a_user_have_no_capabilities_but_those_of_rdma() -> None:
    options = KubernetesOptions(image="i:1", run_as_user=1000, resources=("rdma/hca=1",))
    (container,) = _containers(yaml.safe_load(render_manifest(spec("x"), options)))
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
