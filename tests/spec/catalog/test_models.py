"""Every model of the catalog, against what its makers and transformers say."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.spec.catalog import get_model, list_models
from meshwright.spec.catalog.architectures import CatalogModel, get_catalog_model
from meshwright.spec.file_formats import FORMATS, dump, load
from meshwright.spec.model import Model, count_parameters
from meshwright.spec.model.huggingface import list_model_types

# Parameters of the classes of transformers 5.22, built on the meta device from the published
# configs (GPT-3, Megatron, MPT's benchmark models: from GPT2Config of the same sizes), tied
# tables once. transformers holds the routers' balancing biases as buffers, which do not count.
COUNTS: dict[str, int] = json.loads(
    (Path(__file__).parent / "transformers_counts.json").read_text(encoding="utf-8")
)
FOLDER = Path(sys.modules[CatalogModel.__module__].__file__ or "").parent / "models"

WANTED = [
    "bloom-176b", "deepseek-r1", "deepseek-v2", "deepseek-v3", "gemma-7b", "gemma2-27b",
    "gemma3-27b", "gpt-neox-20b", "gpt-oss-120b", "gpt-oss-20b", "gpt3-125m", "gpt3-175b",
    "kimi-k2", "llama2-70b", "llama2-7b", "llama3-8b", "llama3.1-405b", "llama3.2-1b",
    "llama3.2-3b", "llama4-maverick", "llama4-scout", "llava-1.5-7b", "megatron-175b",
    "megatron-1t", "megatron-22b", "megatron-530b", "mistral-7b", "mixtral-8x22b",
    "mixtral-8x7b", "mpt-30b", "mpt-7b", "nemotron-h-56b", "nemotron4-340b", "olmo2-7b",
    "opt-175b", "phi-4", "qwen2-vl-7b", "qwen2.5-72b", "qwen2.5-7b", "qwen3-235b-a22b",
    "qwen3-8b", "qwen3-next-80b-a3b",
]  # fmt: skip


def test_catalog_is_as_large_as_promised() -> None:
    assert len(list_models()) >= 130
    assert set(WANTED) <= set(list_models())


@pytest.mark.parametrize("name", list_models())
def test_count_agrees_with_the_published_figure(name: str) -> None:
    real = list_models()[name]
    off = abs(real.count_comparable_parameters() - real.published_parameters)
    assert off <= real.tolerance()


@pytest.mark.parametrize("name", list_models())
def test_count_equals_that_of_transformers(name: str) -> None:
    described = get_model(name)
    balance = sum(
        layers * block.mlp.count_vector_parameters()
        for block, layers in described.count_layers_by_block()
        if block.mlp is not None
    )
    assert count_parameters(described).total - balance == COUNTS[name]


def test_exact_figures_are_the_rule_and_their_tolerance_is_a_thousandth() -> None:
    exact = [real for real in list_models().values() if real.published_exact]
    assert len(exact) > 0.7 * len(list_models())
    assert all(real.tolerance() == 1e-3 * real.published_parameters for real in exact)


@pytest.mark.parametrize("name", list_models())
def test_short_figure_agrees_with_the_long_one(name: str) -> None:
    real = list_models()[name]
    number, unit = float(real.published_text[:-1]), real.published_text[-1]
    digits = len(real.published_text.partition(".")[2]) - 1 if "." in real.published_text else 0
    factor = {"M": 1e6, "B": 1e9, "T": 1e12}[unit]
    # A printed figure may be cut off rather than rounded, so a whole unit is allowed.
    assert abs(number * factor - real.published_parameters) <= factor * 0.1**digits * 1.0001


@pytest.mark.parametrize(
    ("name", "text", "half_unit"),
    [("gpt3-175b", "174.6B", 0.05e9), ("opt-66b", "66B", 0.5e9), ("gpt3-760m", "760M", 0.76e6)],
)
def test_rounded_figure_is_as_coarse_as_it_is_printed(
    name: str, text: str, half_unit: float
) -> None:
    real = get_catalog_model(name)
    assert real.published_text == text
    assert real.tolerance() == pytest.approx(max(half_unit, 1e-3 * real.published_parameters))


def test_check_can_fail() -> None:
    wrong = get_catalog_model("llama3.1-8b")
    other = CatalogModel(
        model=get_model("llama3.2-3b"), title="x", published_parameters=wrong.published_parameters,
        published_text="8.03B", source="x", released="2024-07",
    )  # fmt: skip
    assert abs(other.count_comparable_parameters() - other.published_parameters) > other.tolerance()


@pytest.mark.parametrize("name", ["qwen3-0.6b", "falcon-7b", "glm-4.5", "nemotron4-15b"])
def test_figure_that_counts_otherwise_says_why(name: str) -> None:
    real = list_models()[name]
    assert real.published_with or real.published_without
    assert real.note


@pytest.mark.parametrize("name", list_models())
def test_entry_says_where_its_figure_comes_from_and_when(name: str) -> None:
    real = list_models()[name]
    assert real.title
    assert real.source
    year, month = real.released.split("-")
    assert 2018 < int(year) < 2030
    assert 1 <= int(month) <= 12
    assert real.model.family in list_model_types()


@pytest.mark.parametrize("name", [n for n, real in list_models().items() if real.published_active])
def test_active_parameters_are_near_the_published_ones(name: str) -> None:
    # Makers differ on whether the embedding and the output head count.
    real = list_models()[name]
    counted = count_parameters(real.model)
    published = str(real.published_active)
    half = 0.5 * 10 ** (len(published) - len(published.rstrip("0")))
    least = counted.active - counted.embedding - counted.head - counted.vision
    assert least - half <= int(published) <= counted.active + half


@pytest.mark.parametrize("ending", FORMATS)
def test_every_model_comes_back_from_a_file(ending: str, tmp_path: Path) -> None:
    for name in list_models():
        path = tmp_path / f"model{ending}"
        path.write_text(dump(get_model(name), ending), encoding="utf-8")
        assert load(Model, path) == get_model(name)


@pytest.mark.parametrize(
    "text",
    ["llama3.1-405b", "LLAMA3.1-405B", " llama3.1-405b ", "llama3-405b", "Llama-3.1-405B",
     "meta-llama/Llama-3.1-405B"],
)  # fmt: skip
def test_name_alias_and_repository_find_the_model(text: str) -> None:
    assert get_model(text).name == "llama3.1-405b"


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no model named 'llama3\.1-406b'.*llama3\.1-405b"):
        get_model("llama3.1-406b")


def test_names_and_aliases_are_lower_case_and_belong_to_one_model() -> None:
    names = list(list_models())
    names += [alias for real in list_models().values() for alias in real.aliases]
    assert all(name == name.lower() for name in names)
    assert len(names) == len(set(names))


def test_same_architecture_is_described_once() -> None:
    assert get_model("deepseek-r1").blocks == get_model("deepseek-v3").blocks
    assert get_model("llama3.3-70b").name == "llama3.3-70b"
    text = (FOLDER / "deepseek.toml").read_text(encoding="utf-8")
    assert 'same_as = "deepseek-v3"' in text


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_file_opens_by_saying_what_it_holds(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert tomllib.loads(text)["models"]


def test_asking_for_one_model_reads_no_other() -> None:
    code = (
        "import meshwright.spec.catalog.architectures as a; a.get_model('gpt2'); "
        "assert a._read.cache_info().currsize == 1; "
        "assert not a.list_models.cache_info().currsize"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
