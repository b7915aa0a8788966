import re
import tomllib
from pathlib import Path

from meshwright.spec.catalog import read_cluster

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "clusters.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_guides_examples_give_what_their_remarks_say() -> None:
    names: dict[str, object] = {}
    checked = 0
    for block in _blocks("python"):
        exec(block, names)
        for line in block.splitlines():
            code, remark, said = line.partition("  # ")
            if remark:
                assert eval(code, names) == eval(said), line
                checked += 1
    assert checked == 6


def test_the_guides_file_is_a_cluster() -> None:
    (block,) = _blocks("toml")
    lab = read_cluster(tomllib.loads(block))
    assert lab.gpus == 32
    assert lab.bandwidth_between(0, 31) == 12.5e9 / 2
