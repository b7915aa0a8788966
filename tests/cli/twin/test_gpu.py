"""`mw twin` on a GPU, as far as it goes without one: what it runs, and what it says of it."""

import argparse

import pytest

from meshwright.cli import main
from meshwright.cli.flags.calibration import CalibrationChoice
from meshwright.cli.twin.gpu import _answer, _configs
from meshwright.errors import InputError
from meshwright.observe.twin.default_configs import build_default_gpu_configs
from meshwright.observe.twin.device_twin import DeviceTwin, TwinConfig, TwinStep
from meshwright.observe.twin.step_breakdown import SHOWN_KINDS
from meshwright.spec.layout import Layout
from meshwright.spec.model import build_decoder_model
from meshwright.timeline import Timeline

TINY = build_decoder_model("tiny", layers=2, hidden=128, heads=4, kv_heads=2, ffn=256, vocab=512)


def asked(**given: object) -> argparse.Namespace:
    none = dict.fromkeys(("model", "precision", "seq_len", "num_sequences"))
    return argparse.Namespace(**{**none, "layouts": [], **given})


def test_nothing_asked_for_is_the_standard_set() -> None:
    assert _configs(asked()) == list(build_default_gpu_configs())


def test_words_say_what_runs() -> None:
    (one,) = _configs(
        asked(
            model="llama3.2-1b", layouts=["microbatch=2"], precision="fp8-rowwise", num_sequences=4
        )
    )
    assert (one.layout.microbatch, one.layout.precision) == (2, "fp8-rowwise")
    assert (one.num_sequences, one.seq_len) == (4, 4096)


def test_a_step_that_does_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match="no multiple of the microbatch"):
        _configs(asked(model="llama3.2-1b", layouts=["microbatch=2"], num_sequences=3))


def test_a_gpu_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="torch says whether there is a GPU")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["twin", "--device", "gpu"]) == 2
    assert "no CUDA device is available" in capsys.readouterr().err


@pytest.mark.parametrize(("predicted_s", "code"), [(1.05, 0), (1.2, 1)])
def test_answers_say_how_far_off_steps_are(predicted_s: float, code: int) -> None:
    def side(step_s: float) -> TwinStep:
        return TwinStep(step_s, 1 << 30, {**dict.fromkeys(SHOWN_KINDS, 0.0), "gemm": 0.8 * step_s})

    config = TwinConfig(TINY, Layout(microbatch=2), 128, 4)
    twin = DeviceTwin(config, side(predicted_s), side(1.0), (1.0,), Timeline.empty())
    answer = _answer("a GPU", CalibrationChoice(None, "built-in"), [twin], ["a remark"], check=True)
    assert answer.exit_code == code
    assert answer.data["worst_error"] == pytest.approx(predicted_s - 1)
    assert answer.data["configurations"][0]["measured"]["step_breakdown_s"]["gemm"] == 0.8
    assert answer.data["worst_memory_error"] == 0
