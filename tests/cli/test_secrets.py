"""Secrets that are given in a wrong place are not repeated."""

from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.redaction import REDACTED, is_secret, redact_logins, redact_secrets

Captured = pytest.CaptureFixture[str]
SECRET = "hunter2secret"
LOGIN = f"me:{SECRET}@127.0.0.1:1"
TINY = Path(__file__).parents[2] / "examples/train-tiny.toml"

LINES = [
    f"serve x --api-key {SECRET}",
    f"serve x --api-key={SECRET}",
    f"generate x --hf-token {SECRET}",
    f"bench serve ftp://{LOGIN}",
    f"bench serve http://{LOGIN}",
    f"bench serve http://{LOGIN} --api-key {SECRET}",
    f"fleet ingest http://{LOGIN} --cluster c --store s",
    f"fleet ingest https://{LOGIN}/x --cluster c --store s --token {SECRET}",
    pytest.param(
        f"fleet ingest slurm+http://{LOGIN} --cluster c --store s", marks=pytest.mark.slow
    ),
    pytest.param(
        f"fleet ingest http://127.0.0.1:1/?token={SECRET} --cluster c --store s",
        marks=pytest.mark.slow,
    ),
    f"fleet ingest prometheus+http://{LOGIN} --cluster c --store s",
    f"fleet ingest k8s+https://{LOGIN} --cluster c --store s",
    f"fleet ingest http://127.0.0.1:1 --cluster c --store s --option password={SECRET}",
    f"fleet serve --store s --token {SECRET}",
    f"train job.toml logging.wandb.api_key={SECRET}",
    f"train job.toml logging.wandb={{api_key='{SECRET}'}}",
    f"launch slurm job.toml --env HF_TOKEN={SECRET}",
    f"launch slurm job.toml --env A-TOKEN={SECRET}",
    f"launch ray job.toml --env 1TOKEN={SECRET}",
    f"launch k8s job.toml --image i:1 --env DATABASE=postgres://{LOGIN}/x",
    f"launch slurm job.toml --plain-secrets --env A-B={SECRET}",
    f"analyze https://{LOGIN}/x.json",
    f"models show https://{LOGIN}/x",
    f"simulate https://{LOGIN}/x",
    f"hang https://{LOGIN}/x",
    f"data tokenize https://{LOGIN}/x --out y",
]


@pytest.mark.parametrize("line", LINES)
def test_a_secret_in_a_wrong_place_is_not_repeated(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "job.toml").write_text(TINY.read_text())
    monkeypatch.chdir(tmp_path)
    for flags in ([], ["--json"]):
        assert main([*line.split(), *flags]) != 0
        printed = capsys.readouterr()
        assert printed.err
        assert SECRET not in printed.out + printed.err
    kept = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert SECRET not in "".join(kept)


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "OPENAI_API_KEY",
        "PGPASSWORD",
        "MYSQL_PWD",
        "GITHUB_PAT",
        "hfToken",
        "api-key",
        "PASSPHRASE",
        "DB_PASSWD",
        "AUTHORIZATION",
        "MY_CREDENTIALS",
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret(name, "x")
    assert redact_secrets({name: "x"}) == {name: REDACTED}


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "PWD",
        "OLDPWD",
        "PAT",
        "TOKENIZERS_PARALLELISM",
        "MAX_TOKENS",
        "KEYS",
        "key_bias",
        "tokens",
        "NCCL_DEBUG",
        "AUTHOR",
        "SECRETARY",
        "MONKEY",
        "PATTERN",
        "HOME",
    ],
)
def test_names_of_other_things_are_no_secrets(name: str) -> None:
    assert not is_secret(name, "x")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pw@host/x", "http://host/x"),
        ("at https:/me:pw@host: gone", "at https:/host: gone"),
        ("postgres://pw@host", "postgres://host"),
        ("http://host/a@b", "http://host/a@b"),
        ("me@host", "me@host"),
    ],
)
def test_logins_are_left_out_of_addresses(text: str, shown: str) -> None:
    assert redact_logins(text) == shown
