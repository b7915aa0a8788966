"""Manifests of a job for Kubernetes: a JobSet, or a PyTorchJob of Kubeflow's training operator.

One pod for each node, in which torchrun starts the ranks. Pods find each other by the name of the
first, which a headless service gives it: JobSet and the operator make that service themselves.
"""

import re
from typing import Any, Literal, NamedTuple

import msgspec
import yaml

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.launch.launch_spec import (
    LaunchSpec,
    check_writable,
    recommend_environment,
)
from meshwright.spec.field_checks import FieldChecker

ManifestKind = Literal["jobset", "pytorchjob"]

_PORT = 29500
_OPERATOR_PORT = 23456
"""The port that the training operator names `pytorchjob-port`, and puts in MASTER_PORT."""
_LONGEST_NAME = 40
"""A pod's host name has 63 letters at most, and has the job's name in it."""
_LONGEST_KEY = 253
"""Letters of a key in a ConfigMap."""
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTP]i?)?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
"""Name of an object, or of a namespace."""
_FOLDER = re.compile(r"/[^:]*")
_WORD = re.compile(r"[^\s'\"]+")
_CONFIG = "/etc/meshwright"
"""Folder of the job file in a pod."""
_ENDING_S = 300
"""How long a pod that is asked to end may save."""


class KubernetesOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What only Kubernetes is told."""

    image: str
    """Container image with meshwright in it."""
    kind: ManifestKind = "jobset"
    """Who looks after the pods."""
    namespace: str = ""
    """Namespace; empty is the one of kubectl's context."""
    cpus: str = ""
    """CPU cores of each pod."""
    memory: str = ""
    """Host memory of each pod, such as 900Gi."""
    shared_memory: str = ""
    """Size of /dev/shm, which NCCL and data loaders use; empty lets it grow with the memory."""
    gpu: str = "nvidia.com/gpu"
    """Name of the GPUs among a node's resources."""
    resources: tuple[str, ...] = ()
    """Further resources of each pod, such as rdma/hca=8."""
    volume_claims: tuple[str, ...] = ()
    """Volumes to mount, as CLAIM:FOLDER."""
    node_selector: tuple[str, ...] = ()
    """Labels that nodes must have, such as pool=h100."""
    queue: str = ""
    """Queue of Kueue that admits the job."""
    secret: str = ""
    """Secret that holds the variables given as `--env NAME`; empty is JOB-env."""
    run_as_user: int | None = None
    """User id that containers run as; the image decides where it is not given."""
    restarts: int = 3
    """How often all pods start again after a failure."""
    socket_ifname: str = ""
    """Network interface by which ranks meet."""
    nccl_ib_hca: str = ""
    """InfiniBand cards of NCCL."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_empty(image=self.image)
        bounds.one_of("kind", self.kind, ("jobset", "pytorchjob"))
        bounds.count(least=0, restarts=self.restarts)
        for name in ("cpus", "memory", "shared_memory"):
            value = getattr(self, name)
            if value and not _QUANTITY.fullmatch(value):
                bounds.add(name, f"{value!r} is no quantity", "write it like 64, 500m or 900Gi")
        for claim in self.volume_claims:
            name, colon, folder = claim.partition(":")
            if not (_NAME.fullmatch(name) and colon and _FOLDER.fullmatch(folder)):
                bounds.add("volume_claims", f"{claim!r} is no mount", "write it like CLAIM:/data")
        for name in ("resources", "node_selector"):
            for word in getattr(self, name):
                if not re.fullmatch(r"[^=\s]+=[^=\s]+", word):
                    bounds.add(name, f"{word!r} sets nothing", "write it like NAME=VALUE")
        for name in ("namespace", "queue", "secret"):
            value = getattr(self, name)
            if value and not _NAME.fullmatch(value):
                fix = "use lower-case letters, digits and dashes"
                bounds.add(name, f"{value!r} is no name for Kubernetes", fix)
        for name in ("image", "gpu"):
            value = getattr(self, name)
            if value and not _WORD.fullmatch(value):
                bounds.add(name, f"{value!r} is not one word", "leave out spaces and quotes")
        bounds.count(least=1, run_as_user=self.run_as_user)
        bounds.problems += check_writable(self)
        bounds.raise_problems()


class ConfigFile(NamedTuple):
    """A small file that pods are given along with the manifest."""

    source: str
    """Its name on this machine."""
    text: str

    @property
    def name(self) -> str:
        """Its name in a ConfigMap, where few characters are allowed."""
        return re.sub(r"[^A-Za-z0-9._-]+|^\.+", "-", self.source)[-_LONGEST_KEY:]

    @property
    def path(self) -> str:
        """Where pods have it."""
        return f"{_CONFIG}/{self.name}"


def render_manifest(
    start: LaunchSpec, options: KubernetesOptions, config: ConfigFile | None = None
) -> str:
    """Write the manifest that kubectl applies; pods are given `config` in a volume."""
    make = _jobset if options.kind == "jobset" else _pytorchjob
    start = _escape_references(start)
    parts = [make(start, options, config)]
    if config is not None:
        data = {config.name: config.text}
        named = _metadata(_config_name(start), options)
        parts.insert(0, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": named, "data": data})
    dumped = (yaml.dump(part, Dumper=_Dumper, sort_keys=False, width=10_000) for part in parts)
    body = "---\n".join(dumped)
    why = "".join(f"#   {one.name}: {one.reason}\n" for one in _settings(start, options))
    return (
        f"# Written by mw launch k8s{start.origin}: {start.node_shape}.\n"
        f"# kubectl apply -f FILE starts it; its variables:\n{why}"
        f"{_describe_secret(start, options)}{body}"
    )


def _describe_secret(start: LaunchSpec, options: KubernetesOptions) -> str:
    """Say how the Secret is made from variables of a shell, whose values stand in no file."""
    if not start.inherited:
        return ""
    words = "".join(f' --from-literal={name}="${name}"' for name in start.inherited)
    namespace = f" --namespace {options.namespace}" if options.namespace else ""
    made = f"kubectl create secret generic{namespace} {_secret_name(start, options)}{words}"
    return f"# Make the Secret first: {made}\n"


def _secret_name(start: LaunchSpec, options: KubernetesOptions) -> str:
    return options.secret or f"{normalize_kubernetes_name(start.name)}-env"


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as such."""


_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
"""Text that needs no quotes in any YAML: other readers than PyYAML take 1e3 and 0o7 for numbers."""
_TRUTHS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _TRUTHS
    style = "|" if "\n" in text else None if plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _config_name(start: LaunchSpec) -> str:
    return f"{normalize_kubernetes_name(start.name)}-job"


def normalize_kubernetes_name(text: str) -> str:
    """Turn a name into one that Kubernetes takes."""
    name = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")
    if not name or not name[0].isalpha() or len(name) > _LONGEST_NAME:
        what = f"{text!r} is no name for Kubernetes"
        fix = f"give --name with a letter first and at most {_LONGEST_NAME} in all"
        raise InputError([Problem("name", what, fix)])
    return name


def _jobset(
    start: LaunchSpec, options: KubernetesOptions, config: ConfigFile | None
) -> dict[str, Any]:
    name = normalize_kubernetes_name(start.name)
    words = start.torchrun_command(
        # What stands as $(NAME) Kubernetes fills in.
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        f"--master-addr={name}-nodes-0-0.{name}",
        f"--master-port={_PORT}",
    )
    pods = {
        "completionMode": "Indexed",
        "parallelism": start.node_shape.nodes,
        "completions": start.node_shape.nodes,
        # One pod that fails ends all: the JobSet starts them again together.
        "backoffLimit": 0,
        "template": {
            "spec": {"restartPolicy": "Never", **_pod(start, options, words, _PORT, config)}
        },
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(name, options),
        "spec": {
            # The first pod is looked up before it is ready.
            "network": {
                "enableDNSHostnames": True,
                "subdomain": name,
                "publishNotReadyAddresses": True,
            },
            "failurePolicy": {"maxRestarts": options.restarts},
            "replicatedJobs": [{"name": "nodes", "replicas": 1, "template": {"spec": pods}}],
        },
    }


def _pytorchjob(
    start: LaunchSpec, options: KubernetesOptions, config: ConfigFile | None
) -> dict[str, Any]:
    words = start.torchrun_command(
        # The operator numbers pods in RANK; torchrun gives each rank its own.
        "--node-rank=$(RANK)",
        "--master-addr=$(MASTER_ADDR)",
        "--master-port=$(MASTER_PORT)",
    )
    # Each pod starts again by itself, where a JobSet starts all of them together.
    pod = {"spec": _pod(start, options, words, _OPERATOR_PORT, config)}
    replicas = {"Master": {"replicas": 1, "restartPolicy": "OnFailure", "template": pod}}
    if start.node_shape.nodes > 1:
        others = start.node_shape.nodes - 1
        replicas["Worker"] = {"replicas": others, "restartPolicy": "OnFailure", "template": pod}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(normalize_kubernetes_name(start.name), options),
        "spec": {
            "runPolicy": {"backoffLimit": options.restarts, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _metadata(name: str, options: KubernetesOptions) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name}
    if options.namespace:
        found["namespace"] = options.namespace
    if options.queue:
        found["labels"] = {"kueue.x-k8s.io/queue-name": options.queue}
    return found


def _settings(start: LaunchSpec, options: KubernetesOptions) -> list[Any]:
    return recommend_environment(
        start.node_shape,
        interface=options.socket_ifname,
        hca=options.nccl_ib_hca,
        traces="/tmp/nccl-rank-",  # noqa: S108 - of the container
    )


def _pod(
    start: LaunchSpec,
    options: KubernetesOptions,
    words: tuple[str, ...],
    port: int,
    config: ConfigFile | None,
) -> dict[str, Any]:
    limits = {"cpu": options.cpus} if options.cpus else {}
    limits |= {"memory": options.memory} if options.memory else {}
    limits |= (
        {options.gpu: str(start.node_shape.ranks_per_node)}
        if start.node_shape.device == "cuda"
        else {}
    )
    limits |= _pairs(options.resources)
    chosen = {one.name: one.value for one in _settings(start, options)} | start.environment
    memory = {"medium": "Memory"}
    memory |= {"sizeLimit": options.shared_memory} if options.shared_memory else {}
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": memory}]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    for index, each in enumerate(options.volume_claims):
        claim, _, folder = each.partition(":")
        name = f"claim-{index}"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": name, "mountPath": folder})
    if config is not None:
        volumes.append({"name": "job", "configMap": {"name": _config_name(start)}})
        mounts.append({"name": "job", "mountPath": _CONFIG})
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": options.image,
        "command": list(words),
        "env": [{"name": name, "value": value} for name, value in chosen.items()]
        + [_read_from_secret(name, start, options) for name in start.inherited],
        "ports": [{"name": "pytorchjob-port", "containerPort": port}],
        "volumeMounts": mounts,
        "securityContext": _container_security(options),
    }
    if limits:
        container["resources"] = {"limits": limits, "requests": dict(limits)}
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": _ENDING_S,
        # Ranks ask Kubernetes nothing.
        "automountServiceAccountToken": False,
        "securityContext": _pod_security(options),
        "containers": [container],
        "volumes": volumes,
    }
    if options.node_selector:
        pod["nodeSelector"] = _pairs(options.node_selector)
    return pod


def _pairs(words: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _read_from_secret(name: str, start: LaunchSpec, options: KubernetesOptions) -> dict[str, Any]:
    reference = {"name": _secret_name(start, options), "key": name}
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def _pod_security(options: KubernetesOptions) -> dict[str, Any]:
    found: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if options.run_as_user is not None:
        user = options.run_as_user
        found |= {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return found


def _container_security(options: KubernetesOptions) -> dict[str, Any]:
    """Drop what ranks do not need: root keeps its say over files of others, RDMA pins memory."""
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    kept = ["CHOWN", "DAC_OVERRIDE", "FOWNER"] if options.run_as_user is None else []
    if options.nccl_ib_hca or any("rdma" in name.lower() for name in options.resources):
        kept.append("IPC_LOCK")
    if kept:
        capabilities["add"] = kept
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def _escape_references(start: LaunchSpec) -> LaunchSpec:
    """Keep Kubernetes from filling in a `$(…)` that the user wrote."""
    return msgspec.structs.replace(
        start,
        command=tuple(map(_literal, start.command)),
        module=tuple(map(_literal, start.module)),
        environment={name: _literal(value) for name, value in start.environment.items()},
    )


def _literal(text: str) -> str:
    """Write a text in which Kubernetes finds neither a reference nor an escaped dollar sign."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text
