"""`DraftModelProposer`: draft tokens of a second, smaller model.

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
from meshwright.run.serve.engine.engine_config import DEFAULT_SPECULATIVE_TOKENS
from meshwright.run.serve.engine.input_batch import SampledRow
from meshwright.run.serve.engine.model_input import BlockTableUpdate, ModelInput, RowChunk
from meshwright.run.serve.engine.model_runner.model_runner import ModelRunner
from meshwright.run.serve.engine.sequence_state import SequenceState
from meshwright.run.serve.engine.spec_decode.draft_length import AdaptiveDraftLength
from meshwright.run.serve.sampling.rejection_sampler import propose_with_model


class _DraftState:
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
        self.worth = AdaptiveDraftLength(most, most)


class DraftModelProposer:
    """Guesses what a smaller model writes."""

    def __init__(
        self,
        draft_runner: ModelRunner,
        vocab: int,
        most: int = DEFAULT_SPECULATIVE_TOKENS,
        *,
        max_num_batched_tokens: int = 8192,
    ) -> None:
        """Let the draft write `most` tokens ahead, of the `vocab` tokens that the model has.

        The draft's runner has the sampler of the model's. It computes at most
        `max_num_batched_tokens` of prompts at a time; without its prompt a sequence gets no draft.
        """
        if draft_runner.model.has_recurrent_state:
            what = "recurrent states cannot be rolled back when a draft token is rejected"
            raise InputError([Problem("speculative_model", what, "use a draft that only attends")])
        self.draft_runner, self._vocab, self._most, self._room = (
            draft_runner,
            vocab,
            most,
            max_num_batched_tokens,
        )
        self._words = draft_runner.model.decoder.model.vocab
        self._block_tokens = draft_runner.kv_cache.block_size
        self._answers: dict[SequenceState, _DraftState] = {}
        self._held: dict[int, Hashable] = {}
        """Names of what the draft has computed into full blocks."""
        self._places: dict[SequenceState, int] = {}
        self._chances: Tensor | None = None
        """What the last guesses were drawn from, by the places of answers."""

    def propose_lengths(self, states: Sequence[SequenceState]) -> list[int]:
        """Compute what the draft lacks of answers; return how much it is to write of each."""
        room, found = self._room, []
        parts: list[RowChunk] = []
        for answer in states:
            state = self._judged(answer)
            last = len(answer.token_ids) - 1
            count = min(state.worth.length, self.draft_runner.model.max_model_len - last)
            if count > 0 and state.done < last:
                self._match(answer, state, last)
                stop = min(last, state.done + room)
                if stop > state.done:
                    tokens = self._known(answer.token_ids[state.done : stop])
                    parts.append(RowChunk(answer.row, state.done, tokens, ()))
                    room -= stop - state.done
                    self._reach(answer, state, stop)
            found.append(max(count, 0) if state.done == last else 0)
        self._write(states)
        self._compute(parts)
        return found

    @torch.no_grad()
    def propose(
        self, states: Sequence[SequenceState], most: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Let the draft write ahead, one token of all answers at a time."""
        self._places, self._chances = {}, None
        writing = [(each, count) for each, count in zip(states, most, strict=True) if count > 0]
        if writing:
            self._write([answer for answer, _ in writing])
            self._guess(writing)
        return [self._answers[each].proposed if each in self._places else () for each in states]

    def draft_probs(self, drawing: Sequence[SampledRow], ends: Sequence[int], /) -> Tensor | None:
        """Return what the guesses of a step's lines were drawn from; None where nobody asks."""
        if self._chances is None:
            return None
        most, begin, lines = self._chances.shape[1], 0, []
        for (answer, _), end in zip(drawing, ends, strict=True):
            first = self._places.get(answer, 0) * most
            # No guess follows a row's last line, and what stands there is not read.
            lines += [min(first + line, first + most - 1) for line in range(end - begin)]
            begin = end
        return self._chances.flatten(0, 1).index_select(
            0, self.draft_runner.device_rows.to_device(lines)
        )

    def remove(self, state: SequenceState) -> None:
        """Forget an answer that is over, or that has made room for others."""
        self._answers.pop(state, None)

    def reset(self) -> None:
        """Forget what lies in the blocks."""
        self._held.clear()
        self._answers.clear()

    # What the draft has of an answer.

    def _judged(self, answer: SequenceState) -> _DraftState:
        """Return what there is of an answer, now that it is known what came."""
        state = self._answers.setdefault(answer, _DraftState(self._most))
        came = answer.token_ids[state.asked_at :] if state.asked_at else []
        right = state.worth.update(state.proposed, came)
        if state.proposed and came:
            # The last token that it wrote was never fed to it.
            self._reach(answer, state, state.asked_at + min(right, len(state.proposed) - 1))
            state.proposed = ()
        state.asked_at = len(answer.token_ids)
        return state

    def _match(self, answer: SequenceState, state: _DraftState, last: int) -> None:
        """Find full blocks that hold what they should already."""
        place = state.done // self._block_tokens
        whole = min(last // self._block_tokens, len(answer.block_hashes))
        while (
            place < whole
            and self._held.get(answer.sequence.blocks[place]) == answer.block_hashes[place]
        ):
            place += 1
        state.done = max(state.done, place * self._block_tokens)

    def _reach(self, answer: SequenceState, state: _DraftState, done: int) -> None:
        """Take note that an answer is computed up to `done`."""
        self._unname(answer, state.done, done)
        full = min(done // self._block_tokens, len(answer.block_hashes))
        for place in range(state.done // self._block_tokens, full):
            self._held[answer.sequence.blocks[place]] = answer.block_hashes[place]
        state.done = done

    def _unname(self, state: SequenceState, begin: int, end: int) -> None:
        """Take note that the blocks of some tokens are written."""
        size = self._block_tokens
        for block in state.sequence.blocks[begin // size : -(-end // size)]:
            self._held.pop(block, None)

    # On the device.

    def _write(self, states: Sequence[SequenceState]) -> None:
        """Bring the tables of blocks up to date."""
        written, width = [], self.draft_runner.device_rows.block_tables.shape[1]
        for answer in states:
            state, blocks = self._answers[answer], answer.sequence.blocks[:width]
            if state.blocks < len(blocks):
                new = tuple(blocks[state.blocks :])
                written.append(BlockTableUpdate(answer.row, state.blocks, new))
                state.blocks = len(blocks)
        if written:
            self.draft_runner.update_block_tables(written)

    def _compute(self, parts: list[RowChunk]) -> None:
        """Compute tokens that are known, of which nobody wants the successor."""
        if not parts:
            return
        if max(len(part.token_ids) for part in parts) > 1:
            self.draft_runner.execute_model(ModelInput(decode_rows=(), chunks=tuple(parts)))
            return
        rows = [part.row for part in parts]
        self._stand(
            rows, [part.start_position for part in parts], [part.token_ids[0] for part in parts]
        )
        self.draft_runner.decode_graphs.replay(len(rows))

    def _stand(self, rows: Sequence[int], positions: Sequence[int], tokens: Sequence[int]) -> None:
        device = self.draft_runner.device_rows
        device.set_positions(rows, positions)
        device.set_last_tokens(rows, tokens)
        device.set_decode_rows(rows)

    def _guess(self, writing: Sequence[tuple[SequenceState, int]]) -> None:
        """Write ahead; rows that have enough become padding, so that the others stay in place."""
        draft, device, sampler = (
            self.draft_runner,
            self.draft_runner.device_rows,
            self.draft_runner.sampler,
        )
        rows = [answer.row for answer, _ in writing]
        counts = [count for _, count in writing]
        last = self._known([answer.token_ids[-1] for answer, _ in writing])
        self._stand(rows, [len(answer.token_ids) - 1 for answer, _ in writing], last)
        lines = sampler.build_metadata(rows)
        now = rows

        def next_logits(token_R: Tensor, ahead: int) -> Tensor:
            nonlocal now
            left = [
                row if count > ahead else device.padding_row
                for row, count in zip(rows, counts, strict=True)
            ]
            if left != now:
                device.set_decode_rows(left)
                now = left
            if ahead:
                fed_R = token_R.clamp(max=self._words - 1)
                device.last_token_ids.index_copy_(0, lines.logit_rows.rows, fed_R)
            return self._fitted(draft.decode_graphs.replay(len(rows)))

        by_chance = any(answer.uses_rejection_sampling for answer, _ in writing)
        last_R = device.last_token_ids.index_select(0, lines.logit_rows.rows)
        found = propose_with_model(
            next_logits, sampler, lines, last_R, max(counts), chances=by_chance
        )
        self._chances = found.draft_probs
        for (answer, count), tokens in zip(writing, found.token_ids.tolist(), strict=True):
            state, length = self._answers[answer], len(answer.token_ids)
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
