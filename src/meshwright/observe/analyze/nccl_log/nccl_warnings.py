"""What NCCL's warnings mean, and what mends their causes.

Forms of messages are those of NCCL's sources; completion codes are those of libibverbs.
"""

import re
from typing import NamedTuple


class WarningExplanation(NamedTuple):
    """What a warning stands for."""

    name: str
    title: str
    pattern: re.Pattern[str]
    remedy: str
    severity: int
    """0 ends the job, 1 may be the consequence of another rank's end, 2 goes on."""


def _means(name: str, form: str, title: str, remedy: str, severity: int = 0) -> WarningExplanation:
    return WarningExplanation(name, title, re.compile(form, re.IGNORECASE), remedy, severity)


WARNING_EXPLANATIONS = (
    _means(
        "nccl-version-mismatch",
        r"Mismatched NCCL version|NCCL version mismatch",
        "ranks load different versions of NCCL",
        "install the same version on every node; python -c 'import torch;"
        " print(torch.cuda.nccl.version())' and LD_LIBRARY_PATH on each tell which is loaded",
    ),
    _means(
        "duplicate-gpu",
        r"Duplicate GPU detected",
        "two ranks use the same GPU",
        "call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group;"
        " check CUDA_VISIBLE_DEVICES and the processes per node",
    ),
    _means(
        "shared-memory-full",
        r"failed to extend /dev/shm|(creating|attaching to) shared memory segment|"
        r"/dev/shm.*No space",
        "shared memory could not be made",
        "give the container more of /dev/shm: docker run --shm-size=8g or --ipc=host, in"
        " Kubernetes an emptyDir with medium: Memory; remove leftovers /dev/shm/nccl-*",
    ),
    _means(
        "nvlink-peers-off",
        r"P2P is disabled between NVLINK connected GPUs",
        "GPUs joined by NVLink cannot reach each other",
        "nvidia-smi nvlink -s shows the broken link; restart nvidia-fabricmanager, else take the"
        " node out",
    ),
    _means(
        "out-of-device-memory",
        r"Cuda failure.*out of memory",
        "NCCL found no memory left on the GPU",
        "leave it some: a smaller batch, or NCCL_BUFFSIZE=1048576 and fewer communicators",
    ),
    _means(
        "cuda-failure",
        r"Cuda failure",
        "a CUDA call failed",
        "rerun with CUDA_LAUNCH_BLOCKING=1: an earlier kernel may have failed; dmesg | grep Xid"
        " tells faults of the GPU",
    ),
    _means(
        "fabric-retries",
        r"completion .*status=(?:\w+\()?12\b",
        "InfiniBand gave up sending: the other end did not answer (status 12)",
        "look for the rank that ended first; if none did, ibdiagnet or the switch's counters for"
        " the link, and for RoCE the lossless class; NCCL_IB_TIMEOUT=23 only waits longer",
    ),
    _means(
        "fabric-flushed",
        r"completion .*status=(?:\w+\()?5\b",
        "InfiniBand flushed work of a connection that had failed before (status 5)",
        "look at the warning before it, of this rank or its peer",
        1,
    ),
    _means(
        "fabric-error",
        r"Got completion|async fatal event|port error",
        "InfiniBand reports a failed transfer or port",
        "ibstat and the switch's counters tell the port; leave the NIC out with NCCL_IB_HCA=^NAME",
    ),
    _means(
        "queue-pair-refused",
        r"ibv_modify_qp failed",
        "an InfiniBand connection could not be set up",
        "unset NCCL_IB_GID_INDEX so that NCCL chooses; show_gids lists what each NIC has, and"
        " NICs of different networks are told apart with NCCL_IB_HCA",
    ),
    _means(
        "memory-not-pinned",
        r"ibv_reg_(dmabuf_)?mr\S* failed",
        "memory could not be registered with the NIC",
        "ulimit -l unlimited (docker run --ulimit memlock=-1)",
    ),
    _means(
        "no-interface",
        r"no socket interface found|no device found (matching|after)|No usable listening interface",
        "no network interface fits",
        "set NCCL_SOCKET_IFNAME to one that ip -br addr lists, or unset it",
    ),
    _means(
        "peer-gone",
        r"Connection closed by remote|Connection reset|Broken pipe|remote process exited",
        "another rank closed its connection",
        "look at that rank's own log: it ended first",
        1,
    ),
    _means(
        "no-connection",
        r"(connect|accept|socket)\S* .*(refused|timed out|no route|unreachable)|"
        r"(refused|timed out|no route to host|unreachable)",
        "a rank could not be reached",
        "open the ports between nodes, and name the interface they share in NCCL_SOCKET_IFNAME;"
        " if the address is right, that rank had ended already",
    ),
)
"""In the order they are tried."""


def explain_warning(message: str) -> WarningExplanation | None:
    """What a warning stands for; None where it is not known."""
    return next((one for one in WARNING_EXPLANATIONS if one.pattern.search(message)), None)
