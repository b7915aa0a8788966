"""Files of tokens that were damaged after they were written stop training, by name."""

import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="trains")

from meshwright.errors import DamagedFile, Problem
from meshwright.run.train.data import open_corpus, write_megatron
from meshwright.run.train.data.corpus import corpus_verification
from meshwright.run.train.data.corpus.corpus_verification import (
    CorpusCheck,
    CorpusVerification,
    list_checks,
)
from meshwright.run.train.loop import train
from tests.run.train.tiny import saved_steps, tiny_job, write_corpus


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return write_corpus(folder)


def damage(file: Path, every: int = 2000) -> None:
    """Change one bit now and then; ids stay those of bytes."""
    content = bytearray(file.read_bytes())
    content[0::every] = bytes(byte ^ 1 for byte in content[0::every])
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["00000.tokens", "documents"])
def test_a_damaged_file_stops_a_run_before_its_first_step(
    shards: Path, tmp_path: Path, name: str
) -> None:
    damage(shards / name, every=10**9)
    with pytest.raises(DamagedFile, match=rf"{name}: its bytes have changed \(CRC-32\)"):
        train(tiny_job(shards), tmp_path / "run")
    assert saved_steps(tmp_path / "run") == []


def test_damage_that_is_found_beside_training_leaves_no_checkpoint(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_verification, "FOREGROUND_BYTES", 0)
    damage(shards / "00000.tokens")
    with pytest.raises(DamagedFile, match=r"00000\.tokens"):
        train(tiny_job(shards), tmp_path / "run")
    assert saved_steps(tmp_path / "run") == []


def test_a_run_that_went_well_does_not_go_on_with_damaged_files(
    shards: Path, tmp_path: Path
) -> None:
    train(tiny_job(shards), tmp_path / "run", stop_at_step=5)
    damage(shards / "00000.tokens")
    with pytest.raises(DamagedFile, match=r"00000\.tokens"):
        train(tiny_job(shards), tmp_path / "run")
    assert saved_steps(tmp_path / "run") == [5]


def test_checksums_are_left_alone_where_that_is_asked(shards: Path, tmp_path: Path) -> None:
    damage(shards / "00000.tokens")
    job = tiny_job(shards, {"data": {"verify_checksums": False}})
    assert train(job, tmp_path / "run", stop_at_step=2).steps == 2


def test_whole_files_are_read_once(shards: Path, tmp_path: Path) -> None:
    corpus = open_corpus(str(shards))
    read: list[Path] = []

    def watched(check: CorpusCheck) -> CorpusCheck:
        def find_problems() -> list[Problem]:
            read.append(check.file)
            return []

        return check._replace(find_problems=find_problems)

    checks = [watched(check) for check in corpus.checks]
    for _ in range(2):
        assert CorpusVerification(checks, cache_folder=tmp_path / "cache").is_done
    assert sorted(read) == sorted(check.file for check in checks)
    os.utime(shards / "00000.tokens", (1, 1))
    CorpusVerification(checks, cache_folder=tmp_path / "cache")
    assert read[len(checks) :] == [(shards / "00000.tokens").absolute()]


def test_ranks_share_large_files_and_each_reads_small_ones(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(shards / "00000.tokens")
    checks = open_corpus(str(shards)).checks
    for rank in range(2):
        with pytest.raises(DamagedFile):
            CorpusVerification(checks, rank=rank, world=2)
    monkeypatch.setattr(corpus_verification, "FOREGROUND_BYTES", 0)
    found = [CorpusVerification(checks, rank=rank, world=2) for rank in range(2)]
    damaged = 0
    for each in found:
        try:
            each.wait()
        except DamagedFile:
            damaged += 1
    assert damaged == 1


def test_a_folder_that_cannot_be_written_is_checked_every_time(shards: Path) -> None:
    file = shards / "file"
    file.touch()
    checks = open_corpus(str(shards)).checks
    assert CorpusVerification(checks, cache_folder=file / "below").is_done


def test_a_file_that_a_blend_names_twice_is_read_once(shards: Path) -> None:
    checks = open_corpus(str(shards)).checks
    assert list_checks([checks, checks]) == list(checks)


def test_megatron_files_out_of_order_stop_a_run(shards: Path, tmp_path: Path) -> None:
    pair = write_megatron(open_corpus(str(shards)), tmp_path / "data")
    content = bytearray(pair.documents.read_bytes())
    content[34:38], content[38:42] = content[38:42], content[34:38]
    content[34] ^= 3
    pair.documents.write_bytes(content)
    with pytest.raises(DamagedFile, match=r"data\.idx: has sequences that do not follow"):
        train(tiny_job(tmp_path / "data"), tmp_path / "run")


def test_a_copy_elsewhere_is_checked_by_itself(shards: Path, tmp_path: Path) -> None:
    train(tiny_job(shards), tmp_path / "run", stop_at_step=1)
    copy = tmp_path / "copy"
    shutil.copytree(shards, copy)
    damage(copy / "00000.tokens")
    with pytest.raises(DamagedFile, match="copy"):
        train(tiny_job(copy), tmp_path / "other")
