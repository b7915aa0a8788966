import re
from pathlib import Path

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "nccl.md"


def test_the_guides_examples_give_what_their_remarks_say() -> None:
    names: dict[str, object] = {}
    checked = 0
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
        for line in block.splitlines():
            code, remark, said = line.partition("  # ")
            if remark and not re.match(r"\w+ = ", code):
                assert eval(code, names) == eval(said), line
                checked += 1
    assert checked == 15
