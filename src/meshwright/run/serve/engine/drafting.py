"""`Drafted`: guesses of a second, smaller model, which writes a few tokens ahead of the first.

The draft keeps its keys and values in a cache of its own, of as many blocks, by the very tables of
blocks that the model's answers have: who has blocks for the model has them for the draft. What lies
in them is another matter. A block that the model found in its prefix cache may never have been
computed by the draft, so the draft remembers by name what its blocks hold, and computes of each
answer what it lacks: its prompt when the model is done with it, later the token or two that came
since. None of this changes an answer; a wrong guess costs time.

The draft draws with the noise of the tokens to come. So where the two models agree an answer with a
seed takes its guesses, and it gets the same tokens in any case. For answers whose seed nobody named
the draft's distributions are kept, and guesses are taken by rejection, which takes more.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from meshwright.errors import InputError, Problem
from meshwright.run.serve.engine.answer import Answer
from meshwright.run.serve.engine.orders import Orders, Part, Written
from meshwright.run.serve.engine.placing import Drawing
from meshwright.run.serve.engine.runner import Runner
from meshwright.run.serve.engine.settings import GUESSES
from meshwright.run.serve.sampling.speculation import by_model
from meshwright.run.serve.sampling.worth import Worth


class _Drafting:
    """What the draft has of one answer."""

    __slots__ = ("asked_at", "blocks", "done", "proposed", "worth")

    def __init__(self, most: int) -> None:
        self.done = 0
        """Tokens whose keys and values it has computed, and that stand in the answer."""
        self.blocks = 0
        """Blocks of the answer that are in its table."""
        self.proposed: tuple[int, ...] = ()
        self.asked_at = 0
        """Tokens that the answer had when these were proposed."""
        self.worth = Worth(most, most)


class Drafted:
    """Guesses what a smaller model writes."""

    def __init__(
        self, draft: Runner, vocab: int, most: int = GUESSES, *, batch_tokens: int = 8192
    ) -> None:
        """Let the draft write `most` tokens ahead, of the `vocab` tokens that the model has.

        The draft's runner has the sampler of the model's. It computes at most `batch_tokens` of
        prompts at a time; whose prompt is not computed yet guesses nothing.
        """
        if draft.forward.recurrent:
            what = "states of recurrent layers cannot be taken back when a guess was wrong"
            raise InputError([Problem("draft", what, "use a draft that only attends")])
        self.draft, self._vocab, self._most, self._room = draft, vocab, most, batch_tokens
        self._words = draft.forward.decoder.model.vocab
        self._block_tokens = draft.cache.block_tokens
        self._answers: dict[Answer, _Drafting] = {}
        self._held: dict[int, Hashable] = {}
        """Names of what the draft has computed into full blocks."""
        self._places: dict[Answer, int] = {}
        self._chances: Tensor | None = None
        """What the last guesses were drawn from, by the places of answers."""

    def wanted(self, answers: Sequence[Answer]) -> list[int]:
        """Compute what the draft lacks of answers; return how much it is to write of each."""
        room, found = self._room, []
        parts: list[Part] = []
        for answer in answers:
            state = self._judged(answer)
            last = len(answer.ids) - 1
            count = min(state.worth.count, self.draft.forward.max_length - last)
            if count > 0 and state.done < last:
                self._match(answer, state, last)
                stop = min(last, state.done + room)
                if stop > state.done:
                    tokens = self._known(answer.ids[state.done : stop])
                    parts.append(Part(answer.row, state.done, tokens, ()))
                    room -= stop - state.done
                    self._reach(answer, state, stop)
            found.append(max(count, 0) if state.done == last else 0)
        self._write(answers)
        self._compute(parts)
        return found

    @torch.no_grad()
    def propose(self, answers: Sequence[Answer], most: Sequence[int]) -> list[tuple[int, ...]]:
        """Let the draft write ahead, one token of all answers at a time."""
        self._places, self._chances = {}, None
        writing = [(each, count) for each, count in zip(answers, most, strict=True) if count > 0]
        if writing:
            self._write([answer for answer, _ in writing])
            self._guess(writing)
        return [self._answers[each].proposed if each in self._places else () for each in answers]

    def chances(self, drawing: Sequence[Drawing], ends: Sequence[int], /) -> Tensor | None:
        """Return what the guesses of a step's lines were drawn from; None where nobody asks."""
        if self._chances is None:
            return None
        most, begin, lines = self._chances.shape[1], 0, []
        for (answer, _), end in zip(drawing, ends, strict=True):
            first = self._places.get(answer, 0) * most
            # No guess follows a row's last line, and what stands there is not read.
            lines += [min(first + line, first + most - 1) for line in range(end - begin)]
            begin = end
        return self._chances.flatten(0, 1).index_select(0, self.draft.rows.sent(lines))

    def drop(self, answer: Answer) -> None:
        """Forget an answer that is over, or that has made room for others."""
        self._answers.pop(answer, None)

    def forget(self) -> None:
        """Forget what lies in the blocks."""
        self._held.clear()
        self._answers.clear()

    # What the draft has of an answer.

    def _judged(self, answer: Answer) -> _Drafting:
        """Return what there is of an answer, now that it is known what came."""
        state = self._answers.setdefault(answer, _Drafting(self._most))
        came = answer.ids[state.asked_at :] if state.asked_at else []
        right = state.worth.judge(state.proposed, came)
        if state.proposed and came:
            # The last token that it wrote was never fed to it.
            self._reach(answer, state, state.asked_at + min(right, len(state.proposed) - 1))
            state.proposed = ()
        state.asked_at = len(answer.ids)
        return state

    def _match(self, answer: Answer, state: _Drafting, last: int) -> None:
        """Find full blocks that hold what they should already."""
        place = state.done // self._block_tokens
        whole = min(last // self._block_tokens, len(answer.keys))
        while place < whole and self._held.get(answer.sequence.blocks[place]) == answer.keys[place]:
            place += 1
        state.done = max(state.done, place * self._block_tokens)

    def _reach(self, answer: Answer, state: _Drafting, done: int) -> None:
        """Take note that an answer is computed up to `done`."""
        self._unname(answer, state.done, done)
        full = min(done // self._block_tokens, len(answer.keys))
        for place in range(state.done // self._block_tokens, full):
            self._held[answer.sequence.blocks[place]] = answer.keys[place]
        state.done = done

    def _unname(self, answer: Answer, begin: int, end: int) -> None:
        """Take note that the blocks of some tokens are written."""
        size = self._block_tokens
        for block in answer.sequence.blocks[begin // size : -(-end // size)]:
            self._held.pop(block, None)

    # On the device.

    def _write(self, answers: Sequence[Answer]) -> None:
        """Bring the tables of blocks up to date."""
        written, width = [], self.draft.rows.tables.shape[1]
        for answer in answers:
            state, blocks = self._answers[answer], answer.sequence.blocks[:width]
            if state.blocks < len(blocks):
                new = tuple(blocks[state.blocks :])
                written.append(Written(answer.row, state.blocks, new))
                state.blocks = len(blocks)
        if written:
            self.draft.write(written)

    def _compute(self, parts: list[Part]) -> None:
        """Compute tokens that are known, of which nobody wants the successor."""
        if not parts:
            return
        if max(len(part.tokens) for part in parts) > 1:
            self.draft.compute(Orders(rows=(), parts=tuple(parts)))
            return
        rows = [part.row for part in parts]
        self._stand(rows, [part.begin for part in parts], [part.tokens[0] for part in parts])
        self.draft.graphs.replay(len(rows))

    def _stand(self, rows: Sequence[int], positions: Sequence[int], tokens: Sequence[int]) -> None:
        device = self.draft.rows
        device.start(rows, positions)
        device.give(rows, tokens)
        device.decode(rows)

    def _guess(self, writing: Sequence[tuple[Answer, int]]) -> None:
        """Write ahead; rows that have enough become padding, so that the others stay in place."""
        draft, device, sampler = self.draft, self.draft.rows, self.draft.sampler
        rows = [answer.row for answer, _ in writing]
        counts = [count for _, count in writing]
        last = self._known([answer.ids[-1] for answer, _ in writing])
        self._stand(rows, [len(answer.ids) - 1 for answer, _ in writing], last)
        lines = sampler.plan(rows)
        now = rows

        def next_logits(token_R: Tensor, ahead: int) -> Tensor:
            nonlocal now
            left = [
                row if count > ahead else device.padding
                for row, count in zip(rows, counts, strict=True)
            ]
            if left != now:
                device.decode(left)
                now = left
            if ahead:
                fed_R = token_R.clamp(max=self._words - 1)
                device.last.index_copy_(0, lines.places.rows, fed_R)
            return self._fitted(draft.graphs.replay(len(rows)))

        by_chance = any(answer.by_chance for answer, _ in writing)
        last_R = device.last.index_select(0, lines.places.rows)
        found = by_model(next_logits, sampler, lines, last_R, max(counts), chances=by_chance)
        self._chances = found.chances
        for (answer, count), tokens in zip(writing, found.tokens.tolist(), strict=True):
            state, length = self._answers[answer], len(answer.ids)
            self._places[answer] = len(self._places)
            state.proposed, state.asked_at = tuple(tokens[:count]), length
            self._unname(answer, length - 1, length - 1 + count)

    def _known(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return tokens as the draft knows them: tables of words are filled up to many sizes."""
        return tuple(min(token, self._words - 1) for token in tokens)

    def _fitted(self, logits_RV: Tensor) -> Tensor:
        """Return logits of the tokens that the model has."""
        more = self._vocab - self._words
        if more <= 0:
            return logits_RV[:, : self._vocab]
        return pad(logits_RV, (0, more), value=-torch.inf)
