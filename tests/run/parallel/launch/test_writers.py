"""Job files for Slurm, Kubernetes and Ray: what they say, and that their readers take them."""

import ast
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.errors import InputError
from meshwright.run.parallel.launch.kubernetes import KubernetesOptions, render_manifest
from meshwright.run.parallel.launch.launch_spec import (
    LaunchSpec,
    NodeShape,
    fit_ranks_to_nodes,
    recommend_environment,
)
from meshwright.run.parallel.launch.ray import RayOptions, render_driver
from meshwright.run.parallel.launch.slurm import SlurmOptions, render_health_check, render_sbatch

TWO_NODES = LaunchSpec(
    name="big-run",
    command=("python", "-m", "meshwright", "train", "a job.toml"),
    module=("-m", "meshwright", "train", "a job.toml"),
    node_shape=NodeShape(nodes=2, ranks_per_node=8),
    environment={"WORDS": "it's $HOME"},
)
OWN = LaunchSpec(
    name="own",
    command=("./mine", "$(ls)"),
    node_shape=NodeShape(nodes=1, ranks_per_node=2, device="cpu"),
)


def flags(text: str) -> list[str]:
    return [line.split(" ", 1)[1] for line in text.splitlines() if line.startswith("#SBATCH ")]


@pytest.mark.parametrize(
    ("ranks", "each", "shape"), [(1, 8, (1, 1)), (8, 8, (1, 8)), (16, 8, (2, 8)), (6, 8, (1, 6))]
)
def test_ranks_fill_as_few_nodes_as_will_do(ranks: int, each: int, shape: tuple[int, int]) -> None:
    found = fit_ranks_to_nodes(ranks, each)
    assert (found.nodes, found.ranks_per_node) == shape


def test_nodes_that_cannot_be_filled_equally_are_refused_with_a_number_that_can() -> None:
    with pytest.raises(InputError, match=r"12 ranks do not fill nodes of 8 GPUs .*per-node 6"):
        fit_ranks_to_nodes(12, 8)


def test_interfaces_are_set_only_where_they_are_given() -> None:
    names = {one.name for one in recommend_environment(TWO_NODES.node_shape)}
    assert not names & {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME"}
    given = {
        one.name: one.value
        for one in recommend_environment(TWO_NODES.node_shape, interface="ib0", hca="mlx5")
    }
    assert (given["NCCL_SOCKET_IFNAME"], given["NCCL_IB_HCA"]) == ("ib0", "mlx5")


def test_cpu_ranks_are_told_nothing_of_nccl() -> None:
    assert not any(
        "NCCL" in one.name for one in recommend_environment(OWN.node_shape, hca="mlx5", traces="x")
    )


@pytest.mark.parametrize(
    "changes",
    [{"name": "two words"}, {"command": ()}, {"command": ("a\nb",)}, {"environment": {"A B": "1"}}],
)
def test_what_no_job_file_can_say_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        LaunchSpec(**{"name": "x", "command": ("y",), "node_shape": OWN.node_shape, **changes})


def test_a_slurm_script_asks_for_one_task_for_each_gpu() -> None:
    found = flags(render_sbatch(TWO_NODES, SlurmOptions(account="me", time="1-00:00:00")))
    for flag in ("--nodes=2", "--ntasks-per-node=8", "--gres=gpu:8", "--account=me", "--requeue"):
        assert flag in found
    assert {"--time=1-00:00:00", "--signal=B:USR1@120", "--open-mode=append"} <= set(found)


def test_a_slurm_script_for_cpus_asks_for_no_gpus() -> None:
    assert not any("gres" in flag for flag in flags(render_sbatch(OWN, SlurmOptions())))


def test_without_restarts_nothing_queues_again() -> None:
    text = render_sbatch(OWN, SlurmOptions(restarts=0, health=False))
    assert "--no-requeue" in flags(text)
    assert "requeue " not in text
    assert "trap" not in text


@pytest.mark.parametrize("start", [TWO_NODES, OWN], ids=["gpus", "cpus"])
@pytest.mark.parametrize("options", [SlurmOptions(), SlurmOptions(restarts=0, container="i:1")])
def test_a_slurm_script_is_shell(start: LaunchSpec, options: SlurmOptions, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(render_sbatch(start, options))
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_words_and_variables_reach_the_shell_as_they_are(tmp_path: Path) -> None:
    text = render_sbatch(TWO_NODES, SlurmOptions())
    assert "python -m meshwright train 'a job.toml' &" in text
    line = next(line for line in text.splitlines() if line.startswith("export WORDS="))
    said = subprocess.run(
        ["bash", "-c", f'{line}; echo "$WORDS"'], capture_output=True, text=True, check=True
    )
    assert said.stdout == "it's $HOME\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"time": "soon"}, "time: 'soon' is no time"),
        ({"partition": "a b"}, "partition: 'a b' is not one word"),
        ({"flags": ("reservation",)}, "sbatch: 'reservation' is no flag"),
        ({"signal_before_s": 1}, "signal_before_s"),
    ],
)
def test_options_that_slurm_would_refuse_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        SlurmOptions(**changes)


SOUND = {"index": "0\n1", "ecc": "0, 0\n1, [N/A]", "slow": "0, Not Active\n1, Not Active"}


@pytest.mark.parametrize(
    ("answers", "disk_bytes", "reason"),
    [
        (SOUND, 0, ""),
        (SOUND, 1, ""),
        ({**SOUND, "index": "0"}, 0, "1 GPUs answer, 2 were asked for"),
        ({**SOUND, "ecc": "0, 0\n1, 3"}, 0, "GPU 1 has 3 uncorrected memory errors"),
        ({**SOUND, "slow": "0, Active\n1, Not Active"}, 0, "GPU 0 is slowed down"),
        ({**SOUND, "index": "FAIL"}, 0, "nvidia-smi fails: no driver answers"),
        (None, 0, "there is no nvidia-smi"),
        (SOUND, 10**18, "checkpoints need"),
    ],
    ids=["sound", "room", "lost GPU", "memory", "hot", "driver", "no driver", "full disk"],
)
def test_an_unfit_node_is_told_from_a_sound_one(
    answers: dict[str, str] | None, disk_bytes: int, reason: str, tmp_path: Path
) -> None:
    if answers is not None:
        fake = tmp_path / "nvidia-smi"
        fake.write_text(
            "#!/bin/bash\n"
            f'case "$1" in *ecc*) echo "{answers["ecc"]}";;\n'
            f'*slowdown*) echo "{answers["slow"]}";;\n'
            f'*) [ "{answers["index"]}" = FAIL ] && {{ echo no driver answers; exit 9; }}\n'
            f'echo "{answers["index"]}";; esac\n'
        )
        fake.chmod(0o755)
    start = LaunchSpec(name="x", command=("y",), node_shape=NodeShape(nodes=1, ranks_per_node=2))
    options = SlurmOptions(folder=str(tmp_path / "runs" / "new"), disk_bytes=disk_bytes)
    done = subprocess.run(
        ["bash", "-c", render_health_check(start, options)],
        env={"PATH": f"{tmp_path}:{os.defpath}", "SLURMD_NODENAME": "n7"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "note:" not in line]
    if reason:
        assert done.returncode == 1
        assert len(said) == 1
        assert said[0].startswith("meshwright: node n7: ")
        assert reason in said[0]
    else:
        assert (done.returncode, said) == (0, [])


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    if document["kind"] == "JobSet":
        inner = spec["replicatedJobs"][0]["template"]["spec"]
        assert (inner["parallelism"], inner["completions"]) == (2, 2)
        assert inner["completionMode"] == "Indexed"
        return dict(inner["template"]["spec"])
    replicas = spec["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 1)
    return dict(replicas["Worker"]["template"]["spec"])


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_a_manifest_has_a_pod_for_each_node(kind: Any) -> None:
    options = KubernetesOptions(
        image="i:1",
        kind=kind,
        volume_claims=("data:/data",),
        memory="900Gi",
        resources=("rdma/hca=8",),
    )
    pod = pod_of(yaml.safe_load(render_manifest(TWO_NODES, options)))
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert container["command"][:3] == ["torchrun", "--nnodes=2", "--nproc-per-node=8"]
    assert container["command"][-4:] == ["-m", "meshwright", "train", "a job.toml"]
    limits = container["resources"]["limits"]
    assert limits == {"memory": "900Gi", "nvidia.com/gpu": "8", "rdma/hca": "8"}
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert volumes[mounts["/data"]]["persistentVolumeClaim"] == {"claimName": "data"}
    assert {"name": "WORDS", "value": "it's $HOME"} in container["env"]


def test_pods_of_a_jobset_meet_at_the_first_by_its_name() -> None:
    document = yaml.safe_load(render_manifest(TWO_NODES, KubernetesOptions(image="i:1")))
    assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert document["spec"]["network"]["subdomain"] == "big-run"
    words = pod_of(document)["containers"][0]["command"]
    assert "--master-addr=big-run-nodes-0-0.big-run" in words
    assert "--node-rank=$(JOB_COMPLETION_INDEX)" in words


def test_a_pytorchjob_has_its_operator_say_where_pods_meet() -> None:
    document = yaml.safe_load(
        render_manifest(TWO_NODES, KubernetesOptions(image="i:1", kind="pytorchjob"))
    )
    assert document["apiVersion"] == "kubeflow.org/v1"
    words = pod_of(document)["containers"][0]["command"]
    assert {"--node-rank=$(RANK)", "--master-addr=$(MASTER_ADDR)"} <= set(words)


def test_kubernetes_fills_in_nothing_that_the_user_wrote() -> None:
    text = render_manifest(OWN, KubernetesOptions(image="i:1"))
    spec = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert spec["containers"][0]["command"][-3:] == ["--no-python", "./mine", "$$(ls)"]


@pytest.mark.parametrize("name", ["-", "9lives", "a" * 50])
def test_names_that_kubernetes_refuses_are_refused(name: str) -> None:
    start = LaunchSpec(name="x", command=("y",), node_shape=OWN.node_shape)
    with pytest.raises(InputError, match=r"is no name|no name of a job"):
        render_manifest(
            LaunchSpec(name=name, command=start.command, node_shape=start.node_shape),
            KubernetesOptions(image="i"),
        )


@pytest.mark.parametrize(
    "changes", [{"image": ""}, {"memory": "much"}, {"volume_claims": ("data",)}, {"kind": "pod"}]
)
def test_options_that_kubernetes_would_refuse_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        KubernetesOptions(**{"image": "i:1", **changes})


@pytest.mark.parametrize("start", [TWO_NODES, OWN], ids=["gpus", "cpus"])
def test_a_ray_driver_is_a_program_with_the_jobs_figures(start: LaunchSpec) -> None:
    tree = ast.parse(render_driver(start, RayOptions(address="ray://head:10001")))
    compile(tree, "driver.py", "exec")
    values = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert values["ADDRESS"] == "ray://head:10001"
    assert values["GPUS_PER_NODE"] == (8 if start is TWO_NODES else 0)
    assert values["PROGRAM"] == list(start.module or ("--no-python", *start.command))
    assert start.environment.items() <= values["VARIABLES"].items()
