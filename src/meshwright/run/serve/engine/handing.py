"""`Handing`: keys and values of prompts that go to another engine, or come from one."""

from collections.abc import Iterable, Sequence

import msgspec

from meshwright.policy.batching import Batch
from meshwright.run.serve.asked import Piece, TokenLogprob
from meshwright.run.serve.engine.answer import Answer
from meshwright.run.serve.engine.orders import Arrived
from meshwright.run.serve.model.cache import PagedCache
from meshwright.run.serve.parcels import Post, post_of


class Handing:
    """Moves blocks of one engine's cache."""

    def __init__(self, cache: PagedCache, post: Post | None) -> None:
        self._cache, self._post = cache, post or post_of("shm")

    def pack(self, answers: Iterable[Answer]) -> None:
        """Begin to take keys and values out of the blocks of those that others go on with.

        The step that computes the last of a prompt has been started, and no later one.
        """
        for answer in answers:
            if answer.ask.hands_over:
                rows = self._cache.gather(answer.sequence.blocks[: self._held(answer)])
                answer.taken = rows.to("cpu", non_blocking=True)

    def send(
        self, answer: Answer, first: int, weights: str, told: Sequence[TokenLogprob] = ()
    ) -> Piece:
        """Post keys and values that `weights` made, with the first token; the answer ends here."""
        rows, answer.taken = answer.taken, None
        assert rows is not None, "they were packed with the step"
        if first < 0:
            return answer.fail("the model gave no number for any token")
        parcel = self._post.send(rows.flatten().numpy().data, blocks=len(rows), first=first)
        parcel = msgspec.structs.replace(
            parcel,
            likely=(told[0].logprob, told[0].top) if told else None,
            weights=weights,
            cached_tokens=answer.sequence.cached,
            queued_s=answer.queued_s,
        )
        return answer.hand_over(parcel)

    def arrived(self, batch: Batch) -> tuple[Arrived, ...]:
        """Return what came with answers, and the blocks that they were given for it.

        Others may have to be moved out of these blocks before.
        """
        found = []
        for sequence in batch.placed:
            answer: Answer = sequence.request
            if answer.brought is not None and sequence.done:
                blocks = sequence.blocks[: self._held(answer)]
                found.append(Arrived(tuple(blocks), bytearray(answer.brought)))
            answer.brought = None
        return tuple(found)

    def close(self) -> None:
        """Drop what nobody collected."""
        self._post.close()

    def _held(self, answer: Answer) -> int:
        """Count the blocks that a prompt fills."""
        return -(-len(answer.ask.prompt) // self._cache.block_tokens)
