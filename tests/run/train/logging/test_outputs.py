"""Outputs together, and those that other programs read."""

import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meshwright.errors import InputError, MissingDependency
from meshwright.redaction import REDACTED, redact_secrets
from meshwright.run.train.logging import (
    LoggingConfig,
    MetricLoggers,
    PrometheusConfig,
    StepMetricValues,
    WandbConfig,
    open_loggers,
)
from meshwright.run.train.logging.jsonl import read_rows
from meshwright.run.train.logging.prometheus import PrometheusLogger, format_metric_name
from meshwright.run.train.logging.tensorboard import TensorBoardLogger
from meshwright.run.train.logging.wandb import WandbLogger
from meshwright.spec.serialization import decode


class Broken:
    """Takes two rows and fails from then on."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def write(self, step: int, _: StepMetricValues, /) -> None:
        if len(self.rows) == 2:
            raise OSError("no room")
        self.rows.append(step)

    def close(self) -> None:
        raise AssertionError("it was left out before")


class Sound:
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.closed = False

    def write(self, step: int, _: StepMetricValues, /) -> None:
        self.rows.append(step)

    def close(self) -> None:
        self.closed = True


def test_an_output_that_fails_is_left_out_and_the_others_go_on() -> None:
    broken, sound = Broken(), Sound()
    with MetricLoggers({"broken": broken, "sound": sound}) as outputs:
        outputs.write(1, {})
        outputs.write(2, {})
        with pytest.warns(UserWarning, match="the output broken failed and is left out.*no room"):
            outputs.write(3, {})
        outputs.write(4, {})
        assert outputs.logger_names == ("sound",)
    assert (sound.rows, sound.closed) == ([1, 2, 3, 4], True)


def test_settings_open_what_they_name(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    data = {"prometheus": {"port": 0}, "progress": "none"}
    with open_loggers(decode(LoggingConfig, data), tmp_path) as outputs:
        assert outputs.logger_names == ("jsonl", "prometheus")
        outputs.write(1, {"loss": 2.0})
    assert list(read_rows(tmp_path / "metrics.jsonl")) == [{"step": 1, "loss": 2.0}]


def test_outputs_opened_before_one_that_cannot_be_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    settings = LoggingConfig(wandb=WandbConfig(), progress="none")
    for _ in range(2):  # a second attempt finds the first one's file free and empty
        with pytest.raises(MissingDependency):
            open_loggers(settings, tmp_path)


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({"every_steps": 0}, "every_steps"),
        ({"progress": "loud"}, "progress"),
        ({"prometheus": {"port": 70_000}}, "prometheus.port"),
        ({"wandb": {"project": " "}}, "wandb.project"),
    ],
)
def test_settings_without_sense_are_refused(data: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as raised:
        decode(LoggingConfig, data)
    assert [problem.where for problem in raised.value.problems] == [where]


def test_tensorboard_reads_each_step_once_also_after_a_resume(tmp_path: Path) -> None:
    events: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resumed_at, steps in ((None, range(1, 9)), (5, range(6, 11))):
        output = TensorBoardLogger(tmp_path, resumed_at)
        for step in steps:
            output.write(step, {"loss": float(step), "eval/loss": 0.5})
        output.close()
    seen = events.EventAccumulator(str(tmp_path))
    seen.Reload()
    assert sorted(seen.Tags()["scalars"]) == ["eval/loss", "train/loss"]
    assert [(event.step, event.value) for event in seen.Scalars("train/loss")] == [
        (step, float(step)) for step in range(1, 11)
    ]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("torch.utils.tensorboard", TensorBoardLogger),
        ("prometheus_client", lambda _: PrometheusLogger(PrometheusConfig(port=0))),
        ("wandb", lambda path: WandbLogger(path, WandbConfig(), {})),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, make: Any
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependency) as raised:
        make(tmp_path)
    assert raised.value.hint.startswith("pip install ")


@pytest.fixture
def page() -> Iterator[PrometheusLogger]:
    pytest.importorskip("prometheus_client")
    page = PrometheusLogger(PrometheusConfig(port=0))
    yield page
    page.close()


def test_prometheus_reads_the_newest_figures_from_this_machine_only(page: PrometheusLogger) -> None:
    page.write(1, {"loss": 4.0})
    page.write(2, {"loss": 3.5, "tokens_per_s": 1e5, "data_wait_fraction": float("nan")})
    with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=10) as answer:
        rows = dict(line.split() for line in answer.read().decode().splitlines() if line[0] != "#")
    assert rows == {
        "mw_train_step": "2.0",
        "mw_train_loss": "3.5",
        "mw_train_tokens_per_second": "100000.0",
        "mw_train_data_wait_ratio": "NaN",
    }
    assert page._server.server_address[0] == "127.0.0.1"


def test_a_port_in_use_is_told(page: PrometheusLogger) -> None:
    with pytest.raises(InputError, match="cannot be listened on"):
        PrometheusLogger(PrometheusConfig(port=page.port))


def test_figures_have_prometheus_names() -> None:
    assert format_metric_name("step_s") == "mw_train_step_seconds"
    assert format_metric_name("eval/loss") == "mw_train_eval_loss"


class FakeRun:
    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int]] = []
        self.finished = False

    def log(self, figures: dict[str, float], step: int) -> None:
        self.rows.append((figures, step))

    def finish(self) -> None:
        self.finished = True


class FakeWandb(ModuleType):
    """Stands in for wandb: keeps what a run is started with."""

    class Settings(dict[str, Any]):
        model_fields = ("console", "disable_git", "disable_code", "x_disable_meta")

    def __init__(self) -> None:
        super().__init__("wandb")
        self.given: dict[str, Any] = {}
        self.run = FakeRun()

    def init(self, **given: Any) -> FakeRun:
        self.given = given
        return self.run


def test_wandb_stays_offline_and_is_told_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    output = WandbLogger(tmp_path / "run-7", WandbConfig(), {"lr": 1e-3, "hf_token": "hf_123"})
    output.write(3, {"loss": 2.0})
    output.close()
    assert fake.given["mode"] == "offline"
    assert fake.given["name"] == "run-7"
    assert fake.given["config"] == {"lr": 1e-3, "hf_token": REDACTED}
    assert fake.given["settings"] == {
        "console": "off",
        "disable_git": True,
        "disable_code": True,
        "x_disable_meta": True,
    }
    assert fake.run.rows == [({"loss": 2.0}, 3)]
    assert fake.run.finished
    first = fake.given["id"]
    WandbLogger(tmp_path / "run-7", WandbConfig(name="again"), {})
    assert (fake.given["id"], fake.given["name"]) == (first, "again")


def test_secrets_are_left_out_and_the_rest_is_not() -> None:
    assert redact_secrets(
        {
            "api_key": "a",
            "apiKey": "b",
            "AWS_SECRET_ACCESS_KEY": "c",
            "hf_token": "d",
            "nested": [{"password": "e"}, {"store": "s3://user:pw@host/data"}],
            "credentials": {"user": "f"},
            "tokens_per_step": 4096,
            "tokenizer": "bytes",
            "key_bias": True,
            "monkey": "business",
        }
    ) == {
        "api_key": REDACTED,
        "apiKey": REDACTED,
        "AWS_SECRET_ACCESS_KEY": REDACTED,
        "hf_token": REDACTED,
        "nested": [{"password": REDACTED}, {"store": "s3://host/data"}],
        "credentials": REDACTED,
        "tokens_per_step": 4096,
        "tokenizer": "bytes",
        "key_bias": True,
        "monkey": "business",
    }
