"""Verifiers for the tests: good ones, and each way in which one can be bad."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Job = Mapping[str, Any]


def double(job: Job) -> tuple[float, str]:
    return 2.0 * job["number"], f"twice {job['number']}"


def slow(job: Job) -> float:
    time.sleep(job["seconds"])
    return float(job["number"])


def who(job: Job) -> tuple[float, str]:
    return 1.0, str(os.getpid())


def hangs(job: Job) -> float:
    if job.get("hang", True):
        while True:
            time.sleep(60)
    return 1.0


def raises(job: Job) -> float:
    raise RuntimeError("no such answer")


def serves(job: Job) -> float:
    if Path(job["down"]).exists():
        raise RuntimeError("service down")
    return 2.0 * float(job["number"])


def leaves(job: Job) -> float:
    sys.exit(3)


def dies(job: Job) -> float:
    os._exit(7)


def dies_once(job: Job) -> float:
    mark = Path(job["mark"])
    if not mark.exists():
        mark.touch()
        os._exit(7)
    return 1.0


def eats(job: Job) -> float:
    return float(len(bytearray(8 << 30)))


def floods(job: Job) -> tuple[float, str]:
    print("x" * 1000)
    return 1.0, "x" * job["bytes"]


def writes(job: Job) -> float:
    Path("much").write_bytes(bytes(job["bytes"]))
    return 1.0


def not_a_number(job: Job) -> float:
    return float("nan")


def a_text(_: object) -> str:
    return "1.0"


def huge(job: Job) -> float:
    return 1e39


def surroundings(job: Job) -> tuple[float, str]:
    return 1.0, repr(
        (dict(os.environ), [str(each) for each in Path("/proc/self/fd").iterdir()], str(Path.cwd()))
    )


def starts_another(job: Job) -> float:
    subprocess.Popen(["/bin/sleep", "60"])
    while True:
        time.sleep(60)


def touches(job: Job) -> float:
    Path(job["path"]).touch()
    return 1.0


def connects(job: Job) -> float:
    socket.create_connection(("127.0.0.1", job["port"]), 5).close()
    return 1.0


def evaluates(job: Job) -> tuple[float, str]:
    names: dict[str, object] = {}
    try:
        exec(job["code"], names)
    except OSError as error:
        return 0.0, type(error).__name__
    return 1.0, str(names.get("got", ""))
