import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.cluster import Fabric, Host, Nics, ScaleUpDomain, Storage, SwitchTier


@given(rate=st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf]))
def test_a_bandwidth_is_finite_and_above_zero(rate: float) -> None:
    with pytest.raises(InputError, match="gpu_bytes_per_s"):
        ScaleUpDomain(kind="nvlink", gpus=8, gpu_bytes_per_s=rate, latency_s=0)
    with pytest.raises(InputError, match="gpu_bytes_per_s"):
        Host(gpu_bytes_per_s=rate, latency_s=0)
    with pytest.raises(InputError, match="nic_bytes_per_s"):
        Nics(per_node=8, nic_bytes_per_s=rate, latency_s=0)
    with pytest.raises(InputError, match="read_bytes_per_s"):
        Storage(kind="nfs", read_bytes_per_s=rate, write_bytes_per_s=1)


def test_a_pair_gets_no_more_than_one_gpu_has() -> None:
    with pytest.raises(InputError, match="pair_bytes_per_s"):
        ScaleUpDomain(kind="xgmi", gpus=8, gpu_bytes_per_s=1e9, pair_bytes_per_s=2e9, latency_s=0)


def test_only_a_switch_can_reduce() -> None:
    with pytest.raises(InputError, match="needs a switch"):
        ScaleUpDomain(
            kind="nvlink", gpus=8, gpu_bytes_per_s=1e9, latency_s=0, in_network_reduction=True
        )


def test_an_unknown_kind_of_link_gets_a_suggestion() -> None:
    with pytest.raises(InputError, match="did you mean nvlink"):
        ScaleUpDomain(kind="nvlnk", gpus=8, gpu_bytes_per_s=1e9, latency_s=0)  # type: ignore[arg-type]


def test_rails_share_the_cards_evenly() -> None:
    with pytest.raises(InputError, match="3 rails do not share 8 NICs"):
        Nics(per_node=8, nic_bytes_per_s=1e9, latency_s=0, rails=3)


def test_a_card_is_a_rail_unless_told_otherwise() -> None:
    assert Nics(per_node=8, nic_bytes_per_s=1e9, latency_s=0).rail_count == 8
    assert Nics(per_node=8, nic_bytes_per_s=1e9, latency_s=0, rails=4).rail_count == 4


def test_oversubscription_is_at_least_one() -> None:
    with pytest.raises(InputError, match="below 1"):
        SwitchTier(name="spine", oversubscription=0.5)


def test_every_layer_holds_whole_groups_of_the_one_below() -> None:
    with pytest.raises(InputError, match=r"tiers\[1\].nodes"):
        Fabric(
            kind="roce",
            tiers=(SwitchTier(name="leaf", nodes=4), SwitchTier(name="spine", nodes=10)),
        )
    with pytest.raises(InputError, match=r"tiers\[1\].nodes"):
        Fabric(
            kind="roce", tiers=(SwitchTier(name="leaf", nodes=4), SwitchTier(name="spine", nodes=4))
        )


def test_only_the_top_layer_may_be_open() -> None:
    with pytest.raises(InputError, match="only the top layer"):
        Fabric(kind="roce", tiers=(SwitchTier(name="leaf"), SwitchTier(name="spine", nodes=8)))


def test_layers_have_different_names() -> None:
    with pytest.raises(InputError, match="share a name"):
        Fabric(kind="roce", tiers=(SwitchTier(name="leaf", nodes=4), SwitchTier(name="leaf")))


def test_a_fabric_has_layers_and_no_fabric_has_none() -> None:
    with pytest.raises(InputError, match="has no layer"):
        Fabric(kind="efa")
    with pytest.raises(InputError, match="no switches"):
        Fabric(kind="none", tiers=(SwitchTier(name="leaf"),))
