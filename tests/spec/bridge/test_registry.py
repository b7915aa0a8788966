"""The table of targets."""

import subprocess
import sys

import pytest

from meshwright.errors import InputError
from meshwright.spec import bridge
from meshwright.spec.bridge import BRIDGES, find_bridge
from meshwright.spec.layout.layout import Layout


def test_every_target_is_found_by_its_name() -> None:
    assert list(BRIDGES) == ["megatron", "torchtitan", "deepspeed", "nemo", "fsdp2"]
    assert all(find_bridge(name).name == name for name in BRIDGES)


def test_an_unknown_target_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="did you mean megatron"):
        find_bridge("megatrom")


def test_exported_names_exist() -> None:
    assert all(hasattr(bridge, name) for name in bridge.__all__)


def test_listing_the_targets_loads_none_of_them() -> None:
    code = (
        "import sys, meshwright.spec.bridge as b; "
        "print([n for n in b.BRIDGES if f'{b.__name__}.{n}' in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("name", BRIDGES)
def test_an_empty_text_is_refused(name: str) -> None:
    with pytest.raises(InputError):
        BRIDGES[name].import_config("")


@pytest.mark.parametrize("name", BRIDGES)
def test_a_batch_of_the_workload_is_written_where_the_layout_has_none(name: str) -> None:
    layout = Layout(dp=4, zero=3, microbatch=2)
    text = BRIDGES[name].export_config(layout, global_batch=64).text
    assert BRIDGES[name].import_config(text, gpus=4).layout.global_batch == 64


@pytest.mark.parametrize("name", BRIDGES)
def test_the_layout_s_own_batch_goes_before_that_of_the_workload(name: str) -> None:
    layout = Layout(dp=4, zero=3, global_batch=16)
    exported = BRIDGES[name].export_config(layout, global_batch=64)
    assert exported == BRIDGES[name].export_config(layout)


@pytest.mark.parametrize("name", BRIDGES)
def test_a_batch_that_the_replicas_cannot_share_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="not a multiple of dp"):
        BRIDGES[name].export_config(Layout(dp=4), global_batch=63)


@pytest.mark.parametrize("name", BRIDGES)
def test_every_bridge_takes_a_vocabulary(name: str) -> None:
    layout = Layout(dp=4, zero=3)
    text = BRIDGES[name].export_config(layout).text
    assert BRIDGES[name].import_config(text, gpus=4, vocab=32000).model is None
