"""A recorded rollout is read again bit by bit, and a killed run goes on without loss or doubles."""

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.run.posttrain.rollout import (
    ReplaySource,
    RewardComponent,
    Rollout,
    RolloutConfig,
    RolloutKey,
    RolloutLog,
    RolloutTurn,
    read_rollouts,
    write_rollouts,
)
from meshwright.run.posttrain.rollout.rollout_log import RecordedRollouts, RolloutOrigin
from tests.run.posttrain.rollout.killed import draw

ROOT = Path(__file__).resolve().parents[4]
ORIGIN = RolloutOrigin(
    environment="test",
    rollout_config=RolloutConfig(stop_token_ids=(1,)),
    fingerprints={"a:b": "00ff"},
)
# Numbers whose last bits a careless writer loses: float32 halves, the least number, minus zero.
HARD = (-0.1, -1 / 3, -5e-324, -0.0, -struct.unpack("f", struct.pack("f", 0.3))[0], -1e300)


def rollout(sample: int = 0, **changed: Any) -> Rollout:
    turns = (
        RolloutTurn(
            tokens=(3, 200_000, 1, 0, 5, 9),
            logprobs=HARD,
            finish="stop",
            version=4,
            seed=2**62 - 1,
            observation=(7, 7),
            start_s=0.1 + 0.2,
        ),
        RolloutTurn(tokens=(2,), logprobs=(-2.5,), finish="length", version=5, seed=1),
    )
    parts = (
        RewardComponent(
            name="exact", value=1.0, reason="“ja”\n", verifier="a:b", fingerprint="00ff"
        ),
        RewardComponent(name="tool", value=0.1, weight=-0.3, outcome="timeout", duration_s=1e-9),
    )
    given: dict[str, Any] = {
        "key": RolloutKey(1, 2, sample), "prompt": (1, 2), "turns": turns, "rewards": parts,
        "ending": "finished",
    }  # fmt: skip
    return Rollout(**given | changed)


def bits(recorded: RecordedRollouts) -> list[bytes]:
    return [
        struct.pack(f"<{len(turn.logprobs) + 2}d", *turn.logprobs, turn.start_s, each.reward)
        for each in recorded.rollouts
        for turn in each.turns
    ]


@pytest.mark.parametrize("name", ["rollouts.jsonl", "rollouts.parquet"])
def test_what_was_recorded_is_read_again_bit_by_bit(name: str, tmp_path: Path) -> None:
    bare = rollout(1, turns=(), rewards=(), ending="error", error="no number for any token")
    wanted = RecordedRollouts(ORIGIN, (rollout(0), bare, rollout(2)))
    write_rollouts(tmp_path / name, wanted)
    found = read_rollouts(tmp_path / name)
    assert found == wanted
    assert bits(found) == bits(wanted)
    write_rollouts(tmp_path / f"again-{name}", found)
    assert (tmp_path / f"again-{name}").read_bytes() == (tmp_path / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"again-{name}", name]


def test_a_rollout_adds_up() -> None:
    made = rollout()
    assert made.tokens == (1, 2, 3, 200_000, 1, 0, 5, 9, 7, 7, 2)
    assert made.loss_mask == (False,) * 2 + (True,) * 6 + (False,) * 2 + (True,)
    assert made.logprobs == (0.0, 0.0, *HARD, 0.0, 0.0, -2.5)
    assert made.sampled_token_count == 7
    assert made.versions == (4, 5)
    assert made.reward == pytest.approx(1 - 0.03)
    assert not made.has_reward, "a verifier was too late"
    assert rollout(rewards=made.rewards[:1]).has_reward


def turn_of(**changed: Any) -> RolloutTurn:
    given: dict[str, Any] = {
        "tokens": (1,), "logprobs": (-1.0,), "finish": "stop", "version": 0, "seed": 0,
    }  # fmt: skip
    return RolloutTurn(**given | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"turns": (turn_of(tokens=(1, 2)),)}, "1 log-probabilities for 2 tokens"),
        ({"turns": (turn_of(logprobs=(float("nan"),)),)}, "no finite numbers up to 0"),
        ({"turns": (turn_of(logprobs=(0.5,)),)}, "no finite numbers up to 0"),
        ({"prompt": ()}, "holds no token"),
        (
            {"rewards": (RewardComponent(name="r", value=float("inf")),)},
            "reward r: inf × 1.0 is no",
        ),
        ({"rewards": (RewardComponent(name="r", value=1e39),)}, r"reward r: 1e\+39 × 1.0 is no"),
        (
            {"rewards": (RewardComponent(name="r", value=3e38),) * 2},
            r"parts add up to 6e\+38, which",
        ),
    ],
)
def test_what_would_spoil_training_is_not_recorded(changed: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rollout(**changed)


def test_a_log_goes_on_after_any_torn_end(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    with RolloutLog(whole, ORIGIN) as log:
        for sample in range(2):
            log.add(rollout(sample))
    data = whole.read_bytes()
    torn = tmp_path / "torn.jsonl"
    ends = [
        place for place in range(len(data)) if place % 97 == 0 or data[place : place + 1] == b"\n"
    ]
    for end in ends:
        torn.write_bytes(data[:end])
        with RolloutLog(torn, ORIGIN) as log:
            for sample in range(2):
                if RolloutKey(1, 2, sample) not in log.keys:
                    log.add(rollout(sample))
            assert [log.read(RolloutKey(1, 2, sample)) for sample in range(2)] == [
                rollout(),
                rollout(1),
            ]
        assert torn.read_bytes() == data


def test_a_file_that_breaks_off_is_told_with_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, RecordedRollouts(ORIGIN, (rollout(0), rollout(1))))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedFile, match="breaks off after 1 rollouts") as caught:
        read_rollouts(path)
    assert caught.value.readable == RecordedRollouts(ORIGIN, (rollout(0),))


def test_a_log_takes_neither_doubles_nor_another_origin(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    with RolloutLog(path, ORIGIN) as log:
        log.add(rollout())
        with pytest.raises(InputError, match=r'has {"step":1,"prompt":2,"sample":0} already'):
            log.add(rollout())
        with pytest.raises(InputError, match="another process writes"):
            RolloutLog(path, ORIGIN)
    other = msgspec.structs.replace(ORIGIN, rollout_config=RolloutConfig(seed=1))
    with pytest.raises(InputError, match=r"another origin \(rollout_config\)"):
        RolloutLog(path, other)
    data = path.read_bytes()
    path.write_bytes(data + data.split(b"\n")[1] + b"\n")
    with pytest.raises(InputError, match=r'has {"step":1,"prompt":2,"sample":0} twice'):
        read_rollouts(path)


def test_what_changes_no_token_is_no_other_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, model = tmp_path / "rollouts.jsonl", tmp_path / "model"
    RolloutLog(path, msgspec.structs.replace(ORIGIN, model="model")).close()
    later = RolloutConfig(stop_token_ids=(1,), environment_timeout_s=9.0, threads=1)
    with RolloutLog(
        path, msgspec.structs.replace(ORIGIN, model=str(model), rollout_config=later)
    ) as log:
        log.add(rollout())
    with pytest.raises(InputError, match=r"another origin \(model\)"):
        RolloutLog(path, msgspec.structs.replace(ORIGIN, model="other"))


def test_verifiers_may_change_where_that_is_said_and_are_named_once(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    with RolloutLog(path, ORIGIN) as log:
        log.add(rollout())
    other = msgspec.structs.replace(ORIGIN, fingerprints={"a:b": "1234", "a:c": "5678"})
    with pytest.raises(InputError, match=r"another origin \(fingerprints\)"):
        RolloutLog(path, other)
    for changed in (("a:b", "a:c"), ()):
        with RolloutLog(path, other, other_verifiers=True) as log:
            assert log.changed_verifiers == changed
            assert log.read(rollout().key) == rollout()
    assert read_rollouts(path) == RecordedRollouts(other, (rollout(),))


def test_rollouts_are_put_in_the_places_of_others_all_at_once(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    longer = rollout(1, prompt=(1, 2, 3, 4))
    with RolloutLog(path, ORIGIN) as log:
        for sample in range(3):
            log.add(rollout(sample))
        with pytest.raises(InputError, match=r'has no {"step":1,"prompt":2,"sample":7}'):
            log.replace([longer, rollout(7)])
        assert log.read(longer.key) == rollout(1)
        log.replace([longer])
        log.add(rollout(3))
        assert log.newest_version == 5
    assert read_rollouts(path).rollouts == (rollout(), longer, rollout(2), rollout(3))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["no.jsonl", "no.parquet"])
def test_files_that_are_none_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=name):
        read_rollouts(tmp_path / name)
    (tmp_path / name).write_bytes(b'{"a": 1}\n')
    with pytest.raises(InputError, match=name):
        read_rollouts(tmp_path / name)


def drawn(path: Path) -> dict[RolloutKey, tuple[Any, ...]]:
    """Return all of a file but its times."""
    return {
        each.key: (each.tokens, each.logprobs, each.reward, each.rewards[0].reason, each.ending)
        for each in read_rollouts(path).rollouts
    }


def test_a_run_that_is_killed_goes_on_without_loss_or_doubles(tmp_path: Path) -> None:
    wanted, path = tmp_path / "wanted.jsonl", tmp_path / "killed.jsonl"
    assert draw(str(wanted), 40) == 160
    command = [sys.executable, "-m", "tests.run.posttrain.rollout.killed", str(path), "40"]
    running = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "src"})
    while running.poll() is None and not (path.exists() and path.stat().st_size > 4000):
        time.sleep(0.002)
    running.send_signal(signal.SIGKILL)
    running.wait()
    before = path.read_bytes().count(b"\n") - 1
    assert 0 < before < 160
    assert draw(str(path), 40) == 160 - before
    assert drawn(path) == drawn(wanted)
    assert draw(str(path), 40) == 0


def test_what_was_recorded_is_played_again_in_groups(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    draw(str(path), 3)
    recorded = read_rollouts(path)
    replay = ReplaySource(recorded)
    assert replay.prompts_by_step == {3: [0, 1, 2]}
    groups = replay.get_groups(3, [2, 0], 0)
    assert [[each.key for each in group] for group in groups] == [
        [RolloutKey(3, prompt, sample) for sample in range(4)] for prompt in (2, 0)
    ]
    assert {each for group in groups for each in group} < set(recorded.rollouts)
    with pytest.raises(
        InputError, match=r'lacks 4 of 8 rollouts, the first is {"step":3,"prompt":7,'
    ):
        replay.get_groups(3, [0, 7], 0)


def test_a_step_is_not_gone_on_with_by_other_weights(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    draw(str(path), 1)
    with pytest.raises(InputError, match=r"\"sample\":0} by weights 1, asked for 2"):
        draw(str(path), 2, version=2)
