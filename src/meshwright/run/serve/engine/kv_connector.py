"""`KVConnector`: keys and values of prompts that go to another engine, or come from one."""

from collections.abc import Iterable, Sequence

import msgspec

from meshwright.policy.serving.scheduler import SchedulerOutput
from meshwright.run.serve.engine.model_input import ReceivedBlocks
from meshwright.run.serve.engine.sequence_state import SequenceState
from meshwright.run.serve.kv_transfer.handle import KVSender
from meshwright.run.serve.kv_transfer.transport import create_kv_sender
from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.request import RequestOutput, TokenLogprob


class KVConnector:
    """Moves blocks of one engine's cache."""

    def __init__(self, cache: PagedKVCache, kv_sender: KVSender | None) -> None:
        self._cache, self._post = cache, kv_sender or create_kv_sender("shm")

    def gather_blocks(self, states: Iterable[SequenceState]) -> None:
        """Begin to take keys and values out of the blocks of those that others go on with.

        The step that computes the last of a prompt has been started, and no later one.
        """
        for answer in states:
            if answer.request.do_remote_decode:
                rows = self._cache.gather(answer.sequence.blocks[: self._held(answer)])
                answer.packed_kv = rows.to("cpu", non_blocking=True)

    def send_kv(
        self, state: SequenceState, first: int, weights: str, told: Sequence[TokenLogprob] = ()
    ) -> RequestOutput:
        """Post keys and values that `weights` made, with the first token; the answer ends here."""
        rows, state.packed_kv = state.packed_kv, None
        assert rows is not None, "they were packed with the step"
        if first < 0:
            return state.finish_with_error("the model gave no number for any token")
        parcel = self._post.send(rows.flatten().numpy().data, blocks=len(rows), first=first)
        parcel = msgspec.structs.replace(
            parcel,
            first_token_logprob=(told[0].logprob, told[0].top_logprobs) if told else None,
            weights_id=weights,
            cached_tokens=state.sequence.num_cached_tokens,
            queue_s=state.queue_s,
        )
        return state.finish_with_kv(parcel)

    def take_received(self, batch: SchedulerOutput) -> tuple[ReceivedBlocks, ...]:
        """Return what came with answers, and the blocks that they were given for it.

        Others may have to be moved out of these blocks before.
        """
        found = []
        for sequence in batch.admitted:
            answer: SequenceState = sequence.state
            if answer.received_kv is not None and sequence.num_computed_tokens:
                blocks = sequence.blocks[: self._held(answer)]
                found.append(ReceivedBlocks(tuple(blocks), bytearray(answer.received_kv)))
            answer.received_kv = None
        return tuple(found)

    def close(self) -> None:
        """Drop what nobody collected."""
        self._post.close()

    def _held(self, state: SequenceState) -> int:
        """Count the blocks that a prompt fills."""
        return -(-len(state.request.prompt_token_ids) // self._cache.block_size)
