"""Whatever is decided, every sequence finds its own tokens in its blocks, and none is left over.

The batcher is driven as an engine drives it, with a device that writes down which token of which
beginning lies where. Answers fork, guess, use adapters, make room, are moved to host memory, come
from elsewhere, end early and are cancelled; prompts are embedded between steps.
"""

from collections import Counter
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshwright.policy.serving.scheduler import Scheduler, SchedulerOutput, Sequence, SequenceStatus
from meshwright.spec.scheduler_config import SchedulerConfig

BLOCK = 3
Beginning = tuple[Any, ...]
"""What made the keys and values of a token: an adapter, and all tokens up to it."""
Memory = dict[tuple[int, int], Beginning]
"""What lies in which place of which block."""


class Answer:
    """One choice of an ask: the device knows its tokens a step before the host does."""

    def __init__(self, prompt: list[int], salt: int, choice: int, most: int) -> None:
        self.ids, self.heard, self.salt, self.choice = list(prompt), list(prompt), salt, choice
        self.keys: list[Beginning] = []
        self.most, self.sequence = most, Sequence(len(prompt), most)
        self.guessed: list[int] = []
        self.arrives = self.over = False

    def beginning(self, place: int) -> Beginning:
        return (self.salt, *(*self.ids, *self.guessed)[: place + 1])

    def name(self) -> None:
        for block in range(len(self.keys), len(self.heard) // BLOCK):
            self.keys.append((self.salt, *self.heard[: (block + 1) * BLOCK]))

    def drawn(self) -> int:
        return hash((self.salt, self.choice, *self.ids)) % 3

    def guess(self, many: int, random: Random) -> None:
        """Guess tokens, some of which are right."""
        ids, self.guessed = list(self.ids), []
        for _ in range(many):
            right = self.drawn()
            self.ids.append(right if random.random() < 0.7 else (right + 1) % 3)
        self.ids, self.guessed = ids, self.ids[len(ids) :]

    def take(self) -> list[int]:
        """Draw behind each guess that is right, and once more."""
        guessed, self.guessed, before = self.guessed, [], len(self.ids)
        self.ids.append(self.drawn())
        for guess in guessed:
            if self.ids[-1] != guess:
                break
            self.ids.append(self.drawn())
        return self.ids[before:]


class Played:
    """A batcher with the device and the host around it."""

    def __init__(self, random: Random, *, guesses: bool, late: bool, swap: bool) -> None:
        self.random, self.guesses, self.late = random, guesses, late and not guesses
        limits = SchedulerConfig(
            max_num_batched_tokens=random.choice([10, 20, 60]), max_num_seqs=random.choice([2, 5,
            9]),
            long_prefill_token_threshold=random.choice([None, 5]), block_size=BLOCK,
            watermark=random.choice([0.0, 0.1]), enable_chunked_prefill=random.choice([True,
            False]),
            preemption_mode="swap" if swap else "recompute", num_cpu_blocks=12 if swap else 0,
        )  # fmt: skip
        self.batcher = Scheduler(limits, 24, speculative=guesses)
        self.device: Memory = {}
        self.host: Memory = {}
        self.asks: list[list[Answer]] = []
        self.decoding: dict[Answer, None] = {}
        self.joining: list[Answer] = []
        self.flying: list[tuple[Answer, list[int], bool]] = []
        self.reserved = self.version = 0

    def ask(self) -> None:
        random = self.random
        salt = (self.version << 1) + random.randrange(2)
        prompt = [int(random.random() < 0.1) for _ in range(random.randint(1, 24))]
        most, many = random.randint(1, 20), random.choice([1, 1, 2, 4])
        answers = [Answer(prompt, salt, choice, most) for choice in range(many)]
        priority, tenant = random.choice([0, 0, 0, 1, -1]), random.choice("ab")
        keyed = random.random() < 0.9
        forks: tuple[Sequence, ...] = ()
        for answer in reversed(answers):
            answer.name()
            answer.sequence = Sequence(
                len(prompt), most, state=answer, block_hashes=answer.keys if keyed else None,
                priority=priority, tenant=tenant, forks=() if answer.choice else forks,
            )  # fmt: skip
            forks = (answer.sequence, *forks)
        first = answers[0]
        if many == 1 and most > 1 and not self.guesses and random.random() < 0.2:
            # Another engine has computed the prompt and drawn a token.
            first.ids.append(first.drawn())
            first.heard.append(first.ids[-1])
            first.arrives, first.sequence.num_computed_tokens = True, len(prompt)
        self.asks.append(answers)
        self.batcher.add(first.sequence)

    def end(self, answer: Answer) -> None:
        answer.over = True
        self.decoding.pop(answer, None)
        self.batcher.finish(answer.sequence)

    def embed(self) -> None:
        """Use blocks between two steps, once there are as many."""
        while self.reserved < 5 and self.batcher.reserve_blocks(1):
            self.reserved += 1
        if self.reserved == 5:
            blocks = self.batcher.block_pool.allocate(5)
            self.device.update({(b, s): ("embedded",) for b in blocks for s in range(BLOCK)})
            self.batcher.block_pool.free_blocks(blocks)
            self.batcher.release_reserved_blocks(0)
            self.reserved = 0

    def give_back(self) -> None:
        self.batcher.release_reserved_blocks(self.reserved)
        self.reserved = 0

    def turn(self) -> bool:
        """Decide a step and carry it out; hear of the one before, by then or after it."""
        before, self.flying = self.flying, []
        if not self.late:
            self.land(before)
            before = []
        if self.guesses:
            for sequence in self.batcher._speculating:
                self.batcher.set_draft_token_count(sequence, self.random.randrange(5))
        batch = self.batcher.schedule()
        if batch is not None:
            self.batcher.allocate_blocks(batch)
            self.move(batch)
            self.compute(batch)
        self.land(before)
        return batch is not None

    def land(self, flying: list[tuple[Answer, list[int], bool]]) -> None:
        for answer, tokens, checked in flying:
            if answer.over:
                continue
            room = answer.sequence.max_total_tokens - len(answer.heard)
            answer.heard += tokens[:room]
            if (
                len(answer.heard) >= answer.sequence.max_total_tokens
                or hash(tuple(answer.heard)) % 13 == 0
            ):
                self.end(answer)
                continue
            answer.name()
            if checked:
                self.batcher.accept_draft_tokens(answer.sequence, len(tokens) - 1)

    def move(self, batch: SchedulerOutput) -> None:
        """Do what comes before anything is computed, in the order of `Orders`."""
        _copy(self.device, self.device, batch.block_copies)
        for out in batch.swap_out:
            _copy(
                self.device, self.host, list(zip(out.device_blocks, out.host_blocks, strict=True))
            )
        for back in batch.swap_in:
            _copy(
                self.host, self.device, list(zip(back.host_blocks, back.device_blocks, strict=True))
            )
        for sequence in batch.admitted:
            if sequence.state.arrives and sequence.num_computed_tokens:
                self.write(sequence.state, range(sequence.num_prompt_tokens))
            sequence.state.arrives = False

    def write(self, answer: Answer, places: range) -> None:
        for place in places:
            block = answer.sequence.blocks[place // BLOCK]
            self.device[block, place % BLOCK] = answer.beginning(place)

    def read(self, answer: Answer, stop: int) -> None:
        for place in range(stop):
            block = answer.sequence.blocks[place // BLOCK]
            assert self.device[block, place % BLOCK] == answer.beginning(place)

    def follow(self, batch: SchedulerOutput) -> None:
        """Let those decode that joined with the last step."""
        for sequence in batch.preempted:
            self.decoding.pop(sequence.state, None)
        for answer in self.joining:
            if not answer.over and answer.sequence not in batch.preempted:
                self.decoding[answer] = None

    def compute(self, batch: SchedulerOutput) -> None:
        self.follow(batch)
        decoding = list(self.decoding) if batch.num_decodes else []
        assert len(decoding) == batch.num_decodes
        forks: dict[Sequence, list[Answer]] = {}
        for parent, child in batch.forked:
            forks.setdefault(parent, []).append(child.state)
        work = [(each, range(len(each.ids) - 1, len(each.ids)), True, False) for each in decoding]
        for sequence, start, stop, samples in batch.chunks:
            answer = sequence.state
            checks = (
                sequence.status is SequenceStatus.SPECULATING
                and sequence not in batch.started_decoding
            )
            if checks:
                answer.guess(stop - len(answer.ids), self.random)
            assert stop <= len(answer.ids) + len(answer.guessed)
            assert not samples or checks or stop == len(answer.ids)
            work.append((answer, range(start, stop), samples, checks))
        for answer, places, _, _ in work:  # what one writes, another reads in the same step
            self.write(answer, places)
        for answer, places, _, _ in work:
            self.read(answer, places.stop)
        for answer, _, samples, checks in work:
            if samples:
                for each in (answer, *forks.get(answer.sequence, ())):
                    self.flying.append((each, each.take(), checks))
        self.joining = [
            each.state
            for each in (*batch.started_decoding, *(child for _, child in batch.forked))
            if each.status is SequenceStatus.DECODING
        ]
        for sequence in batch.finished:
            self.decoding.pop(sequence.state, None)

    def check(self) -> None:
        """Look whether blocks add up, and whether in each lies what its holders and name say."""
        pool, places = self.batcher.block_pool, self.batcher.running_set
        held = Counter(block for sequence in places for block in sequence.blocks)
        idle, seen = 0, list(pool._left)
        for first, run in pool._runs.items():
            assert run.blocks[0] == first
            assert {held[block] for block in run.blocks} == {run.ref_count}
            assert (run in pool._idle) == (not run.ref_count)
            if run.block_hashes:
                assert len(run.block_hashes) == len(run.blocks)
                assert pool._named[run.block_hashes[0]] is run
            idle += 0 if run.ref_count else len(run.blocks)
            seen += run.blocks
            for block, key in zip(run.blocks, run.block_hashes, strict=False):
                assert self.device[block, BLOCK - 1] == key
        assert sorted(seen) == list(range(pool.size - pool._never)), "each is in one place"
        keys = [key for run in pool._named.values() for key in run.block_hashes]
        assert len(set(keys)) == len(keys), "what is alike is named once"
        assert sum(map(len, (run.block_hashes for run in pool._runs.values()))) == len(keys)
        free = len(pool._left) + pool._never
        assert pool.free_block_count == free + idle - pool.reserved_block_count
        assert 0 <= pool.reserved_block_count <= free
        host = self.batcher.host_block_pool
        there = [each.sequence for ask in self.asks for each in ask if not each.over]
        away = [block for sequence in there for block in sequence.host_blocks]
        kept = [block for run in host._runs.values() for block in run.blocks]
        assert sorted([*away, *host.pending_free]) == sorted(kept)


def _copy(source: Memory, target: Memory, blocks: list[tuple[int, int]]) -> None:
    slots = [(old, new, slot) for old, new in blocks for slot in range(BLOCK)]
    read = {(new, slot): source.get((old, slot), ()) for old, new, slot in slots}
    target.update(read)


@given(st.integers(0, 1 << 32), st.booleans(), st.booleans(), st.booleans())
def test_each_finds_its_own_tokens_and_no_block_is_lost(
    seed: int, guesses: bool, late: bool, swap: bool
) -> None:
    random = Random(seed)
    played = Played(random, guesses=guesses, late=late, swap=swap)
    for _ in range(random.randint(20, 120)):
        act = random.random()
        if act < 0.3:
            played.ask()
        elif act < 0.36 and played.asks:
            for answer in random.choice(played.asks):
                if not answer.over:
                    played.end(answer)
        elif act < 0.42:
            played.embed()
        if not played.turn() and not played.flying and not played.reserved and act > 0.8:
            played.batcher.block_pool.reset_prefix_cache()
            played.version += 1
        played.check()
    steps = 0
    while played.turn() or played.flying:
        played.check()
        steps += 1
        if played.reserved and steps > 20:
            played.give_back()
        assert steps < 5000
    if played.reserved:
        played.give_back()
        while played.turn() or played.flying:
            played.check()
    batcher = played.batcher
    assert all(answer.over for ask in played.asks for answer in ask)
    assert (
        batcher.block_pool.used_block_count
        == batcher.host_block_pool.used_block_count
        == batcher.num_running
        == len(batcher.waiting_queue)
        == 0
    )
    batcher.block_pool.reset_prefix_cache()
    assert not batcher.block_pool._runs
