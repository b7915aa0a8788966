import pytest

from meshwright.fleet.sources.prometheus.labels import (
    NodeNaming,
    parse_gpu,
    parse_job,
    parse_mig_fraction,
    parse_node,
    parse_uuid,
)


@pytest.mark.parametrize(
    ("labels", "node"),
    [
        ({"Hostname": "n1", "instance": "10.0.0.1:9400"}, "n1"),
        ({"hostname": "n1"}, "n1"),
        ({"instance": "n1:9400"}, "n1"),
        ({"instance": "[fe80::1]:9400"}, "fe80::1"),
        ({"Hostname": "dcgm-exporter-x2x", "node": "k1"}, "k1"),
        ({"Hostname": "dcgm-exporter-x2x", "instance": "10.0.0.1:9400"}, "n7"),
        ({"Hostname": "n1.example.org"}, "n1"),
        ({"Hostname": "n1-old"}, "n1"),
        ({"Hostname": "", "instance": ""}, ""),
    ],
)
def test_the_node_of_a_series(labels: dict[str, str], node: str) -> None:
    naming = NodeNaming("", "example.org", {"n1-old": "n1"}, {"10.0.0.1": "n7"})
    assert parse_node(labels, naming) == node


def test_a_label_that_is_named_names_the_node() -> None:
    assert parse_node({"Hostname": "x", "rack_node": "n1"}, NodeNaming("rack_node")) == "n1"


@pytest.mark.parametrize(
    ("labels", "job"),
    [
        ({"hpc_job": "71"}, "71"),
        ({"pod": "a", "namespace": "ml"}, "ml/a"),
        ({"pod_name": "a", "pod_namespace": "ml"}, "ml/a"),
        ({"exported_pod": "a", "exported_namespace": "ml", "pod": "e", "namespace": "g"}, "ml/a"),
        ({"exported_pod": "", "pod": "nvidia-exporter-1", "namespace": "g"}, ""),
        ({"pod": "dcgm-exporter-x2x", "namespace": "gpu-operator"}, ""),
        ({"hpc_job": "", "pod": ""}, ""),
    ],
)
def test_the_job_of_a_series(labels: dict[str, str], job: str) -> None:
    assert parse_job(labels) == job


def test_instances_are_parts_of_their_gpu() -> None:
    assert parse_mig_fraction({"GPU_I_ID": "1", "GPU_I_PROFILE": "3g.20gb"}) == 3 / 7
    assert parse_mig_fraction({"GPU_I_ID": "1", "GPU_I_PROFILE": "1c.2g.20gb"}) == pytest.approx(
        2 / 7
    )
    assert (
        parse_mig_fraction({"GPU_I_ID": "1", "GPU_I_PROFILE": "2g.12gb", "modelName": "NVIDIA A30"})
        == 0.5
    )
    assert parse_mig_fraction({"GPU_I_ID": ""}) == 1


def test_links_name_their_device_in_other_words() -> None:
    assert parse_uuid({"gpu_uuid": "GPU-a"}) == "GPU-a"
    assert parse_gpu({"minor_number": "3"}) == 3
    assert parse_gpu({"gpu": "nvidia3"}) is None
