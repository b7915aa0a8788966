"""Two hours of a small fleet as its exporters tell them, with everything that misleads."""

from collections.abc import Callable

T0 = 1_750_003_200.0
"""A multiple of an hour."""
STEP, HOURS = 30.0, 2
BLANK = 140737488355328.0
Value = Callable[[float], float | None]
"""The value so many minutes after the start; None: no sample."""


def planted() -> dict[str, list[tuple[float, float]]]:
    """Return times and values of each series.

    n1 has an exporter with old names, which falls silent from minute 50 to 58, and loses its first
    GPU after minute 90; n2 has one with new names; n3 has a GPU divided into two instances.
    """
    found: dict[str, list[tuple[float, float]]] = {}

    def plant(name: str, labels: str, value: Value) -> None:
        times = [T0 + STEP * at for at in range(round(HOURS * 3600 / STEP) + 1)]
        told = [(time, value((time - T0) / 60)) for time in times]
        samples = [(time, each) for time, each in told if each is not None]
        if samples:
            found.setdefault(f"{name}{{{labels}}}", []).extend(samples)

    def spoken(value: Value) -> Value:
        return lambda minute: None if 50 < minute < 58 else value(minute)

    # n1: GPU-b has index 1 until its neighbour is lost, then 0; job 71 holds GPU-a for 50 minutes.
    for gpu, uuid, here in (
        (0, "GPU-a", lambda minute: minute <= 90),
        (1, "GPU-b", lambda minute: minute <= 90),
        (0, "GPU-b", lambda minute: minute > 90),
    ):
        base = f'gpu="{gpu}",UUID="{uuid}",Hostname="n1",modelName="NVIDIA A100",instance="n1:9400"'
        first = uuid == "GPU-a"

        def tell(name: str, value: Value, labels: str = base, here: Value = here) -> None:
            plant(name, labels, spoken(lambda minute: value(minute) if here(minute) else None))

        def by_job(minute: float, job: bool, first: bool = first) -> float | None:
            return (90.0 if first else 0.0) if (10 < minute <= 40) == job else None

        if first:
            tell("DCGM_FI_DEV_GPU_UTIL", lambda minute: by_job(minute, False))
            tell(
                "DCGM_FI_DEV_GPU_UTIL", lambda minute: by_job(minute, True), base + ',hpc_job="71"'
            )
        else:
            tell("DCGM_FI_DEV_GPU_UTIL", _always(0.0))
        tell("DCGM_FI_DEV_FB_USED", _always(40000.0))
        tell("DCGM_FI_DEV_FB_FREE", _always(41000.0))
        tell("DCGM_FI_DEV_FB_RESERVED", _always(500.0))
        tell("DCGM_FI_PROF_SM_ACTIVE", lambda minute: BLANK if minute <= 10 else 0.4)
        tell("DCGM_FI_DEV_POWER_USAGE", lambda minute: 2147483632.0 if minute <= 5 else 300.0)
        tell("DCGM_FI_DEV_POWER_VIOLATION", _held_back if first else _always(5e9))
        tell("DCGM_FI_DEV_XID_ERRORS", _xid if first else _always(0.0))
        tell("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", _ecc if first else _always(3.0))
    # n2: new names, shares in place of percents, an Xid that comes twice and never changes.
    base = 'gpu="0",uuid="GPU-c",hostname="n2",modelName="NVIDIA H100",instance="n2:9400"'
    pod = 'exported_pod="train-0",exported_namespace="ml",pod="dcgm-exporter-x",namespace="gpu"'
    plant("DCGM_FI_DEV_GPU_UTIL_RATIO", f"{base},{pod}", _always(0.5))
    plant("DCGM_FI_PROF_TENSOR_UTIL_RATIO", base, _always(0.25))
    plant("DCGM_FI_DEV_XID_ERROR", base, _always(79.0))
    plant(
        "DCGM_EXP_XID_ERRORS_TOTAL", base + ',xid="79"', lambda minute: 1.0 if minute < 80 else 2.0
    )
    # n3: 4/7 busy with half its cycles, 3/7 with none.
    for instance, profile, busy in (("1", "4g.40gb", 0.5), ("2", "3g.40gb", 0.0)):
        part = f'GPU_I_ID="{instance}",GPU_I_PROFILE="{profile}"'
        labels = f'gpu="0",UUID="GPU-d",Hostname="n3",{part},modelName="NVIDIA H100"'
        plant("DCGM_FI_PROF_GR_ENGINE_ACTIVE", labels, _always(busy))
        plant("DCGM_FI_DEV_FB_USED", labels, _always(1024.0))
    # n4: an exporter that tells jobs by a gauge of their numbers.
    labels = 'minor_number="0",uuid="GPU-e",name="Tesla V100",instance="n4:9445"'
    plant("nvidia_gpu_duty_cycle", labels, _always(40.0))
    plant(
        "nvidia_gpu_jobId",
        labels,
        lambda minute: 0.0 if minute <= 20 else 81.0 if minute <= 60 else 82.0,
    )
    # Nodes: 4 processors of n1, one always busy, one waits for storage; it is restarted at 60.
    host = 'instance="10.0.0.1:9100"'
    plant("node_uname_info", host + ',nodename="n1"', _always(1.0))
    for cpu in range(4):
        idle, wait = (0.0 if cpu < 2 else 1.0), (1.0 if cpu == 1 else 0.0)
        for mode, share in (("idle", idle), ("iowait", wait), ("user", 1 - idle - wait)):
            plant("node_cpu_seconds_total", f'{host},cpu="{cpu}",mode="{mode}"', _hourly(share))
    plant("node_memory_MemTotal_bytes", host, _always(1e12))
    plant("node_memory_MemAvailable_bytes", host, _always(6e11))
    plant(
        "lustre_read_bytes_total",
        host + ',component="client",target="a"',
        lambda minute: 6e9 * minute,
    )
    plant(
        "lustre_read_bytes_total",
        host + ',component="ost",target="a"',
        lambda minute: 9e12 * minute,
    )
    plant(
        "node_infiniband_port_data_transmitted_bytes_total",
        host + ',device="mlx5_0",port="1"',
        lambda minute: 6e10 * minute,
    )
    plant(
        "node_infiniband_link_downed_total",
        host + ',device="mlx5_0",port="1"',
        lambda minute: 1.0 if minute >= 70 else 0.0,
    )
    return found


def _always(value: float) -> Value:
    return lambda _minute: value


def _hourly(share: float) -> Value:
    """A share of the seconds since the last full hour."""
    return lambda minute: share * 60 * (minute % 60)


def _held_back(minute: float) -> float:
    """Nanoseconds: grows from minute 12 to 30, by a second in two."""
    return 3e10 * min(max(minute - 12, 0.0), 18.0)


def _xid(minute: float) -> float:
    return 31.0 if minute > 40 else 0.0


def _ecc(minute: float) -> float:
    """Five, seven from minute 30 on; begins anew at 60, and is one from 70 on."""
    return 5.0 if minute < 30 else 7.0 if minute < 60 else 0.0 if minute < 70 else 1.0


def planted_pods() -> dict[str, list[tuple[float, float]]]:
    """Two hours of a Kubernetes cluster as kube-state-metrics tells them.

    `train-0` crashes at minute 30 and ends well at 60, `worker-0` is deleted at 80, `web` has no
    GPU, `rank-0` is deleted at 35 and is back at 45 as another pod; node k1 is cordoned from minute
    20 to 40, and down from 100 on.
    """
    found: dict[str, list[tuple[float, float]]] = {}

    def plant(name: str, labels: str, value: Value) -> None:
        times = [T0 + STEP * at for at in range(round(HOURS * 3600 / STEP) + 1)]
        told = [(time, value((time - T0) / 60)) for time in times]
        found[f"{name}{{{labels}}}"] = [(time, each) for time, each in told if each is not None]

    for pod, uid, owner, kind, begin, end in (
        ("train-0", "u1", "train", "Job", 0.0, 200.0),
        ("worker-0", "u2", "worker-5b4", "ReplicaSet", 0.0, 80.0),
        ("web", "u3", "web-1", "ReplicaSet", 0.0, 200.0),
        ("rank-0", "u4", "rank", "StatefulSet", 0.0, 35.0),
        ("rank-0", "u5", "rank", "StatefulSet", 55.0, 200.0),
    ):
        one = f'namespace="ml",pod="{pod}",uid="{uid}"'

        def tell(
            name: str, labels: str, value: Value, begin: float = begin, end: float = end
        ) -> None:
            plant(name, labels, lambda minute: value(minute) if begin <= minute <= end else None)

        tell("kube_pod_created", one, _always(T0 + 60 * begin - 600))
        tell("kube_pod_start_time", one, _always(T0 + 60 * begin - 300))
        tell("kube_pod_info", f'{one},node="k1"', _always(1.0))
        tell("kube_pod_labels", f'{one},label_hub_jupyter_org_username="ann"', _always(1.0))
        tell("kube_pod_owner", f'{one},owner_kind="{kind}",owner_name="{owner}"', _always(1.0))
        asked = f'{one},container="c",node="k1"'
        tell("kube_pod_container_resource_requests", f'{asked},resource="cpu"', _always(16.0))
        if pod != "web":
            gpus = f'{asked},resource="nvidia_com_gpu"'
            tell("kube_pod_container_resource_requests", gpus, _always(4.0))
        crash, done = (30.0, 60.0) if pod == "train-0" else (1000.0, 1000.0)
        for phase in ("Pending", "Running", "Succeeded", "Failed", "Unknown"):
            tell("kube_pod_status_phase", f'{one},phase="{phase}"', _phase(phase, done))
        restarts = f'{one},container="c"'
        tell("kube_pod_container_status_restarts_total", restarts, _from(crash))
    plant("kube_pod_completion_time", 'namespace="ml",pod="train-0",uid="u1"',
          lambda minute: T0 + 3600 if minute >= 60 else None)  # fmt: skip
    reason = 'namespace="ml",pod="train-0",uid="u1",container="c",reason="OOMKilled"'
    plant("kube_pod_container_status_last_terminated_reason", reason,
          lambda minute: 1.0 if minute >= 30 else None)  # fmt: skip
    plant("kube_node_info", 'node="k1"', _always(1.0))
    for resource, amount in (("nvidia_com_gpu", 8.0), ("cpu", 96.0), ("memory", 1e12)):
        plant("kube_node_status_capacity", f'node="k1",resource="{resource}"', _always(amount))
    plant("kube_node_spec_unschedulable", 'node="k1"', lambda minute: float(20 <= minute < 40))
    ready = 'node="k1",condition="Ready",status="true"'
    plant("kube_node_status_condition", ready, lambda minute: float(minute < 100))
    return found


def _from(at: float) -> Value:
    return lambda minute: float(minute >= at)


def _phase(phase: str, done: float) -> Value:
    return lambda minute: float(phase == ("Succeeded" if minute >= done else "Running"))
