"""Ranks that cannot train together are refused before any group forms, all with one message."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="ranks meet at a store of torch's")

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from meshwright.errors import InputError
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.nn.weight_init import materialize
from meshwright.run.parallel.launch import config_consensus, store_client
from meshwright.run.parallel.launch.store_server import open_store_server
from meshwright.run.train.distributed_init import init_mesh, reject_job_on_all_ranks
from meshwright.run.train.job.job_file import read_job
from meshwright.run.train.job.train_job import TrainJob
from meshwright.run.train.loop import train
from meshwright.spec.model import build_decoder_model
from tests.run.train.tiny import job_data, tiny_job

TWO = {"layout": {"dp": 2}}
FOUR = {"layout": {"dp": 4, "microbatch": 1}}


@pytest.fixture(autouse=True)
def no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the forming of a group fail a test, and nobody wait for long."""

    def form(*_: object, **__: object) -> None:
        raise AssertionError("a group was formed")

    monkeypatch.setattr(dist, "init_process_group", form)
    monkeypatch.setattr(store_client, "_ANSWER_S", 8.0)


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what torchrun and its like set."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {name: str(value) for name, value in numbers.items()} | there


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def refusals(jobs: list[Any], folder: Path, port: int | None = None) -> list[str]:
    """Let ranks meet, each in a thread with a job of its own; return how each is refused."""
    port = port or free_port()

    def meet(rank: int) -> str:
        place = environment(rank, len(jobs), port)
        try:
            job = jobs[rank] if isinstance(jobs[rank], TrainJob) else read_job(jobs[rank])
        except InputError as refusal:
            with pytest.raises(InputError) as caught:
                reject_job_on_all_ranks(refusal, place)
            return str(caught.value)
        with pytest.raises(InputError) as caught, init_mesh(job, folder, place, job.check()):
            pass
        return str(caught.value)

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(meet, range(len(jobs))))


def test_a_layout_that_does_not_divide_the_model(tokens: Path, tmp_path: Path) -> None:
    job = job_data(tokens, {"layout": {"tp": 3}})
    said = refusals([job] * 3, tmp_path)
    assert len(set(said)) == 1
    assert "layout.tp: 3 does not divide" in said[0]
    assert "rank" not in said[0]


def test_ranks_with_different_jobs(tokens: Path, tmp_path: Path) -> None:
    job, other = tiny_job(tokens, TWO), tiny_job(tokens, {**TWO, "seed": 7})
    said = refusals([job, other], tmp_path)
    assert set(said) == {
        "job: rank 1 has another job than rank 0: seed is 7 there and 1 on rank 0 "
        "(fix: give every rank the same file and flags)"
    }


def test_a_rank_whose_job_cannot_be_read(tokens: Path, tmp_path: Path) -> None:
    job = tiny_job(tokens, TWO)
    said = refusals([job, job_data(tokens, {"layout": {"dp": 2, "microbatch": 3}})], tmp_path)
    assert len(set(said)) == 1
    assert said[0].startswith("rank 1: layout.microbatch: 3 does not divide")
    assert "another job" not in said[0]


def test_a_rank_whose_layout_has_another_number_of_ranks(tokens: Path, tmp_path: Path) -> None:
    said = refusals([tiny_job(tokens, TWO), tiny_job(tokens, FOUR)], tmp_path)
    assert len(set(said)) == 1
    assert "rank 1 has another job than rank 0: layout.dp is 4 there and 2 on rank 0" in said[0]
    assert "rank 1: layout: has 4 ranks, and 2 processes were started" in said[0]


def test_who_is_refused_alone_does_not_wait_for_the_others(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_consensus, "REJECT_WAIT_S", 0.2)
    job = tiny_job(tokens, FOUR)
    with (
        pytest.raises(InputError, match="has 4 ranks, and 2 processes were started"),
        init_mesh(job, tmp_path, environment(0, 2, free_port())),
    ):
        pass


def test_a_checkpoint_of_another_model(tokens: Path, tmp_path: Path) -> None:
    train(tiny_job(tokens), tmp_path / "run", stop_at_step=1, environment={})
    other = tiny_job(tokens, {**TWO, "model": {"pattern": "4*dense"}})
    said = refusals([other, other], tmp_path / "run")
    assert len(set(said)) == 1
    assert "model.pattern: is '4*dense', and the run began with '2*dense'" in said[0]


def test_weights_of_another_model_to_begin_with(tokens: Path, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"layers": 2, "heads": 2, "ffn": 32, "vocab": 260, "family": "llama"}
    made = build_decoder(build_decoder_model("narrow", hidden=16, **shape), dtype=torch.float32)
    materialize(made, "cpu", seed=1)
    save_hf_checkpoint(made, tmp_path / "weights")
    wide = build_decoder_model("wide", hidden=32, **shape)
    job = tiny_job(tokens, {**TWO, "initial_load_path": str(tmp_path / "weights")})
    other = TrainJob(
        **{name: getattr(job, name) for name in job.__struct_fields__} | {"model": wide}
    )
    said = refusals([other, other], tmp_path / "run")
    assert len(set(said)) == 1
    assert "embed_tokens.weight: has shape [260, 16], not [260, 32]" in said[0]


@contextmanager
def listener(manner: str) -> Iterator[int]:
    """Keep a port as a program does that is no store: silent, closing, or talking."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                if manner == "talks":
                    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                if manner == "closes":
                    connection.close()
                held.append(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for each in held:
            each.close()


@pytest.mark.parametrize("manner", ["silent", "closes", "talks"])
def test_a_port_in_use(
    tokens: Path, tmp_path: Path, manner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_client, "_ANSWER_S", 1.0)
    job = tiny_job(tokens, TWO)
    with listener(manner) as port:
        said = refusals([job, job], tmp_path, port)
    assert set(said) == {
        f"MASTER_PORT: {port} of 127.0.0.1 is in use by another program "
        "(fix: use another, the same for all ranks)"
    }


def test_a_port_where_another_job_has_met(tokens: Path, tmp_path: Path) -> None:
    store = open_store_server()
    for rank in (1, 0):
        PrefixStore("meshwright", store).set(f"job/{rank}", "")
        PrefixStore("meshwright", store).add(f"came/{rank}", 1)
    job = tiny_job(tokens, TWO)
    first, other = refusals([job, job], tmp_path, store.port)
    assert first.startswith(f"MASTER_PORT: {store.port} of 127.0.0.1 is in use")
    assert other.startswith("RANK: there is another rank 1 where these meet")
