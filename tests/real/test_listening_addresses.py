"""Commands on a host with two addresses: they listen on loopback, unless they are told otherwise.

Each command runs in a network namespace of its own, whose host name leads to an address that other
machines would reach, and `ss` lists all along who listens there.
"""

import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="ranks load torch")
pytest.importorskip("tokenizers", reason="the served model has one")

from tests.run.serve.served_folders import folder as served_folder

pytestmark = [pytest.mark.real, pytest.mark.slow]

MW = (sys.executable, "-m", "meshwright")
OUTSIDE = "10.77.0.1"
EXAMPLES = Path(__file__).parents[2] / "examples"
API_KEY = "sk-neverprinted0123456789"
PATIENCE_S = 240.0
_SETUP = f"""
set -e
ip link set lo up
ip link add veth0 type veth peer name veth1
ip addr add {OUTSIDE}/24 dev veth0
ip link set veth0 up
ip link set veth1 up
ip route add default via 10.77.0.2
printf '127.0.0.1 localhost\\n{OUTSIDE} %s\\n' "$(hostname)" > "$1/hosts"
mount --bind "$1/hosts" /etc/hosts
while :; do
  ss -Hltnp >> "$1/listening"
  cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' >> "$1/words"
  sleep 0.2
done &
shift
exec "$@"
"""
_NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def _can_make_namespaces() -> bool:
    if any(shutil.which(name) is None for name in ("unshare", "ip", "ss")):
        return False
    words = [*_NAMESPACES, "bash", "-c", "ip link add veth0 type veth peer name veth1"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    if not _can_make_namespaces():
        pytest.skip("needs root, and unshare, ip and ss (apt install util-linux iproute2)")


class Run:
    """A command in a namespace of its own."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self._folder, self._process = folder, process

    @property
    def output(self) -> str:
        """Everything that it has printed."""
        return (self._folder / "output").read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Wait until it prints a text."""
        self._wait(lambda: text in self.output)

    def wait_for_port(self, port: int) -> None:
        """Wait until it listens at a port."""
        self._wait(lambda: any(place.endswith(f":{port}") for place in self.listening()))

    def wait_for_end(self) -> int:
        """Wait until it ends; return its exit code."""
        return self._process.wait(PATIENCE_S)

    def settle(self) -> None:
        """Let the list of those that listen be written several times more."""
        time.sleep(1.0)

    def listening(self) -> dict[str, str]:
        """Return each address and port at which somebody listened, with the program."""
        path = self._folder / "listening"
        lines = path.read_text().splitlines() if path.exists() else []
        return {
            words[3]: words[5] if len(words) > 5 else ""
            for words in map(str.split, lines)
            if len(words) > 3 and words[0] == "LISTEN"
        }

    def words(self) -> str:
        """Return the words of every process that there was."""
        return (self._folder / "words").read_text(errors="replace")

    def _wait(self, done: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not done():
            assert self._process.poll() is None, self.output
            assert time.monotonic() < until, self.output
            time.sleep(0.05)


@contextmanager
def running(folder: Path, command: Sequence[str], **environment: str) -> Iterator[Run]:
    """Run a command between two addresses; end everything that it has started."""
    place = folder / "namespace"
    place.mkdir()
    kept = {name: value for name, value in os.environ.items() if "SOCKET_IFNAME" not in name}
    with (place / "output").open("wb") as output:
        process = subprocess.Popen(
            [*_NAMESPACES, "bash", "-c", _SETUP, "bash", str(place), *command],
            cwd=folder, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**kept, "MESHWRIGHT_NO_PROGRESS": "1", **environment}, start_new_session=True,
        )  # fmt: skip
    try:
        yield Run(place, process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def outside(found: dict[str, str]) -> dict[str, str]:
    """Return the places that other machines reach."""
    return {place: who for place, who in found.items() if not _is_loopback(place)}


def _is_loopback(place: str) -> bool:
    host = place.rpartition(":")[0].strip("[]").partition("%")[0]
    if host in ("*", ""):
        return False
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def test_the_harness_sees_a_store_at_every_address(tmp_path: Path) -> None:
    """PyTorch's own store listens at every address, whatever it is told: the others must not."""
    program = (
        "from torch._C._distributed_c10d import TCPStore; import time\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); time.sleep(2)"
    )
    with running(tmp_path, [sys.executable, "-c", program]) as run:
        assert run.wait_for_end() == 0
        assert outside(run.listening())


def _train(folder: Path, *words: str) -> list[str]:
    job = (EXAMPLES / "train-tiny.toml").read_text().replace("microbatch = 2", "dp = 2")
    (folder / "job.toml").write_text(job)
    return [*MW, "train", "job.toml", "--output-dir", "run", "--stop-at-step", "2", *words]


def _loop(folder: Path, *words: str) -> list[str]:
    text = """
steps = 2
prompts_per_step = 4
group_size = 4
threads = 1
[recipe]
kind = "grpo"
[task]
digits = 3
reward = "share"
[network]
layers = 2
hidden = 16
heads = 2
ffn = 32
"""
    (folder / "loop.toml").write_text(text)
    return [*MW, "train", "loop.toml", "--output-dir", "run", *words]


def _finite(folder: Path, name: str) -> list[str]:
    match name:
        case "train on two ranks":
            return _train(folder, "--nproc-per-node", "2")
        case "watch a job of two ranks":
            return [*MW, "watch", "--out", "watch", "--", *_train(folder, "--nproc-per-node", "2")]
        case "reinforcement learning on two ranks":
            return _loop(folder, "layout.dp=2", "--nproc-per-node", "2")
        case "reinforcement learning with workers":
            return _loop(folder, "placement=async", "max_staleness=1", "workers.num_workers=2")
        case "collective bench":
            return [*MW, "collective", "bench", "ring", "--ranks", "2", "--maxbytes", "64KiB"]
        case "bench of collectives":
            return [*MW, "bench", "--families", "collectives", "--quick", "--device", "cpu"]
        case "parity of layouts":
            return [*MW, "parity", "examples/train-tiny.toml", "--layout", "tp=2"]
        case "twin of layouts":
            return [
                *MW,
                "twin",
                "--layout",
                "dp=2",
                "--device",
                "cpu",
                "--steps",
                "3",
                "--seq-len",
                "16",
            ]
        case "a data loader that tokenizes":
            (folder / "text.txt").write_text("some words to learn\n" * 2000)
            return [*MW, "data", "tokenize", "text.txt", "--out", "tokens", "--tokenizer", "bytes"]
        case "queue":
            rows = [f"c,{at},0,{at * 9},{at * 9},{at * 9 + 600},1,completed" for at in range(20)]
            head = "cluster,job,attempt,submit_s,start_s,end_s,gpus,state"
            (folder / "jobs.csv").write_text("\n".join([head, *rows]))
            return [*MW, "queue", "compare", "jobs.csv", "--gpus", "4"]
    raise AssertionError(name)


MEETING = (
    "train on two ranks",
    "watch a job of two ranks",
    "reinforcement learning on two ranks",
    "collective bench",
    "bench of collectives",
    "parity of layouts",
    "twin of layouts",
)
"""Commands whose ranks meet at a store."""
ALONE = ("reinforcement learning with workers", "a data loader that tokenizes", "queue")


@pytest.mark.parametrize("name", [*MEETING, *ALONE])
def test_what_runs_to_its_end_listens_on_loopback_only(name: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    secrets = {"WANDB_API_KEY": API_KEY, "HF_TOKEN": API_KEY, "MESHWRIGHT_API_KEY": API_KEY}
    with running(tmp_path, _finite(tmp_path, name), **secrets) as run:
        code = run.wait_for_end()
        assert code in (0, 1), run.output
        assert outside(run.listening()) == {}
        assert run.listening() or name in ALONE
        assert API_KEY not in run.output
    assert not _files_with(tmp_path, API_KEY)


def _files_with(folder: Path, text: str) -> list[Path]:
    raw = text.encode()
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in files if raw in path.read_bytes()]


SMALL = ("--max-model-len", "64", "--max-num-batched-tokens", "64", "--max-num-seqs", "4",
         "--device", "cpu", "--port", "8100")  # fmt: skip
SERVERS = {
    "one engine": (),
    "two ranks": ("--tensor-parallel-size", "2"),
    "two replicas": ("--replicas", "2"),
    "prefill and decode": ("--prefill-replicas", "1", "--decode-replicas", "1"),
    "prefill and decode over TCP": (
        "--prefill-replicas", "1", "--decode-replicas", "1", "--kv-transfer-backend", "tcp",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_and_its_engines_listen_on_loopback_only(name: str, tmp_path: Path) -> None:
    command = [*MW, "serve", str(served_folder("")), *SMALL, *SERVERS[name]]
    secrets = {"MESHWRIGHT_API_KEY": API_KEY, "MESHWRIGHT_ADMIN_API_KEY": f"{API_KEY}x"}
    with running(tmp_path, command, **secrets) as run:
        run.wait_for_port(8100)
        run.settle()
        assert outside(run.listening()) == {}
        assert API_KEY not in run.output
        assert API_KEY not in run.words()


def test_a_server_that_is_told_to_listens_for_other_machines(tmp_path: Path) -> None:
    command = [*MW, "serve", str(served_folder("")), *SMALL, "--host", "0.0.0.0"]
    command += ["--tensor-parallel-size", "2"]
    with running(tmp_path, command) as run:
        run.wait_for_port(8100)
        run.settle()
        assert {place.rpartition(":")[2] for place in outside(run.listening())} == {"8100"}


def _store(folder: Path) -> str:
    (folder / "jobs.csv").write_text(
        "job,attempt,submit_s,start_s,end_s,gpus,num_nodes,user,state\n1,0,0,0,7200,8,1,a,completed"
    )
    store = str(folder / "store")
    words = ["fleet", "ingest", "jobs.csv", "--cluster", "c", "--store", store, "-q"]
    subprocess.run([*MW, *words], cwd=folder, check=True)
    return store


def test_pages_of_a_fleet_listen_on_loopback_only(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    command = [*MW, "fleet", "serve", "--store", _store(tmp_path), "--port", "8101"]
    with running(tmp_path, command) as run:
        run.wait_for_port(8101)
        run.settle()
        assert outside(run.listening()) == {}


def test_the_exporter_listens_on_loopback_only(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    (tmp_path / "run" / "config.toml").write_text("steps = 1\n")
    command = [*MW, "fleet", "exporter", "--run", "run=1", "--port", "8102"]
    with running(tmp_path, command) as run:
        run.wait_for_port(8102)
        run.settle()
        assert outside(run.listening()) == {}


def test_metrics_of_a_trainer_listen_on_loopback_only(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    command = _train(tmp_path, "--nproc-per-node", "2", "logging.prometheus.port=8103")
    with running(tmp_path, command) as run:
        assert run.wait_for_end() == 0, run.output
        assert any(place.endswith(":8103") for place in run.listening())
        assert outside(run.listening()) == {}


def test_a_ray_cluster_that_is_started_here_listens_on_loopback_only(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    program = (
        "import ray\n"
        "from meshwright.local_ray import start_local_ray\n"
        "start_local_ray(ray, log_to_driver=False, logging_level='error')\n"
        "print('answer', ray.get(ray.remote(lambda: 6 * 7).remote()), flush=True)\n"
        "import time; time.sleep(1)\n"
        "ray.shutdown()\n"
    )
    with running(tmp_path, [sys.executable, "-c", program]) as run:
        assert run.wait_for_end() == 0, run.output
        assert "answer 42" in run.output
        assert run.listening()
        assert outside(run.listening()) == {}


def test_ranks_of_two_nodes_meet_at_the_first_ones_address_only(tmp_path: Path) -> None:
    """The store of several nodes leaves loopback, and listens at the named address alone."""
    program = (
        "import os, subprocess, sys\n"
        "code = '''import meshwright.run.parallel.launch.world as launch\n"
        "import torch, torch.distributed as dist, time\n"
        "launch.init_process_group(launch.read_world())\n"
        "dist.all_reduce(torch.ones(2)); time.sleep(1)\n"
        "dist.destroy_process_group()'''\n"
        "ranks = [subprocess.Popen([sys.executable, '-c', code], env={**os.environ,\n"
        "    'RANK': str(rank), 'WORLD_SIZE': '2', 'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1',\n"
        f"    'MASTER_ADDR': '{OUTSIDE}', 'MASTER_PORT': '29400'}}) for rank in range(2)]\n"
        "sys.exit(max(rank.wait() for rank in ranks))\n"
    )
    with running(tmp_path, [sys.executable, "-c", program]) as run:
        assert run.wait_for_end() == 0, run.output
        places = set(run.listening())
    assert f"{OUTSIDE}:29400" in places
    assert not any(re.match(r"(\*|0\.0\.0\.0|\[::\]):", place) for place in places)
