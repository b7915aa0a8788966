"""`ModelRunner`: carries out orders on one device. It decides nothing, and waits for nothing.

A step with no parts of prompts is one replay of a graph, and so is one with few tokens where such
steps are captured; any other is put together from the rows that decode and the parts, in one flat
batch. Tokens are drawn on the device, where the next step
finds them; the host gets a copy, and reads it when it is there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.serve.engine.logprobs import compute_prompt_logprobs
from meshwright.run.serve.engine.model_input import (
    BlockTableUpdate,
    ModelInput,
    PromptLogprobsRange,
    RowChunk,
)
from meshwright.run.serve.engine.model_runner.decode_graphs import DecodeGraphs
from meshwright.run.serve.engine.model_runner.device_rows import DecodeStep, DeviceRows
from meshwright.run.serve.engine.model_runner.mixed_graphs import MixedStepGraphs, flatten_chunks
from meshwright.run.serve.engine.model_runner.persistent_gemm import (
    PersistentGemmSelection,
    enable_persistent_gemm,
)
from meshwright.run.serve.model.forward_batch import ForwardBatch
from meshwright.run.serve.model.lora import LoRAManager
from meshwright.run.serve.model.served_model import ServedModel
from meshwright.run.serve.sampling.rejection_sampler import verify_draft_tokens
from meshwright.run.serve.sampling.sampled_logprobs import SampledLogprobs
from meshwright.run.serve.sampling.sampler import TokenSampler
from meshwright.run.serve.sampling.sampling_metadata import SamplingMetadata


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits that wait to be drawn from."""

    logits: Tensor
    sampling_metadata: SamplingMetadata
    input_ids: Tensor | None
    """The tokens that were computed at these lines; None where no guess is checked."""
    draft_probs: Tensor | None = None
    """What the guesses among them were drawn from, where that matters."""


class PendingOutput:
    """Tokens on their way to the host."""

    def __init__(
        self,
        sampling_metadata: SamplingMetadata,
        tokens_L: Tensor,
        told: SampledLogprobs | None,
        kept_L: Tensor | None = None,
    ) -> None:
        self.sampling_metadata = sampling_metadata
        self._event: torch.cuda.Event | None = None
        self._tokens, self._kept, self._told = tokens_L, kept_L, told
        if tokens_L.is_cuda:
            self._tokens = tokens_L.to("cpu", non_blocking=True)
            if kept_L is not None:
                self._kept = kept_L.to("cpu", non_blocking=True)
            if told is not None:
                self._told = SampledLogprobs(*(part.to("cpu", non_blocking=True) for part in told))
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def computed_on_host(self) -> bool:
        """Whether the host computed them itself, so that nothing goes on while it waits."""
        return self._event is None

    @property
    def is_ready(self) -> bool:
        """Whether nobody would have to wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[list[tuple[int, ...]], SampledLogprobs | None]:
        """Return the tokens of each row that drew, and how likely they were where it was asked."""
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._tokens.tolist()
        if self._kept is None:
            return [(token,) for token in tokens], self._told
        kept, begin, found = self._kept.tolist(), 0, []
        for end in self.sampling_metadata.row_ends:
            count = sum(kept[begin:end])
            found.append(tuple(tokens[begin : begin + count]))
            begin = end
        return found, self._told


class ModelRunner:
    """One device with its model, cache and rows."""

    def __init__(
        self,
        model: ServedModel,
        sampler: TokenSampler,
        device_rows: int,
        lora_manager: LoRAManager | None = None,
        *,
        graph_tokens: int = 0,
    ) -> None:
        """Serve at most `device_rows` answers at a time.

        Steps of at most `graph_tokens` tokens are captured with parts of prompts in them, too.
        """
        cache = model.kv_cache
        self.lora_manager, self.tensor_parallel_size = lora_manager, 1
        longest = -(-model.max_model_len // cache.block_size)
        self.model, self.sampler, self.kv_cache = model, sampler, cache
        self.device_rows = DeviceRows(device_rows, longest, cache.block_size, cache.device)
        self.decode_graphs = DecodeGraphs(
            DecodeStep(model, self.device_rows), device_rows, table_blocks=longest,
            adapters=lora_manager is not None,
        )  # fmt: skip
        self.mixed_graphs: MixedStepGraphs | None = None
        if graph_tokens and model.has_recurrent_state:
            what = "states of recurrent layers are computed row by row, by what the host knows"
            raise InputError(
                [Problem("max_cudagraph_capture_size", what, "serve this model without")]
            )
        if graph_tokens:
            self.mixed_graphs = MixedStepGraphs(
                model, self.device_rows, graph_tokens, uses_lora=lora_manager is not None
            )
        self.persistent_gemm: PersistentGemmSelection | None = None
        """Who computes which products of decoding steps, once that was measured."""
        self._decoding: tuple[int, ...] = ()
        self.draft_runner: ModelRunner | None = None
        """A smaller model that guesses ahead, with the same sampler and as many blocks."""
        self.weight_shards: dict[str, ShardSpec] | None = None
        """Which part of each weight lies here, where ranks share them."""
        self.prompt_logprobs: list[SampledLogprobs] = []
        """How likely tokens of prompts were in the last step, part by part that was to tell."""

    def capture(self) -> None:
        """Capture the graphs of steps; does nothing without a GPU."""
        self.device_rows.set_decode_rows(())
        if self.persistent_gemm is None:
            self.persistent_gemm = enable_persistent_gemm(
                self.model.decoder, self.decode_graphs.max_rows
            )
        self.decode_graphs.capture()
        if self.mixed_graphs is not None:
            self.mixed_graphs.capture()
        self._decoding = ()
        if self.kv_cache.device.type == "cuda":
            weight = self.model.decoder.embedding.weight
            self.sampler.warm_up(weight.new_zeros(1, self.model.decoder.model.vocab))
        if self.draft_runner is not None:
            self.draft_runner.capture()

    def drop_graphs(self) -> None:
        """Drop the captured steps: needed when weights or the cache move."""
        self.decode_graphs.drop()
        if self.mixed_graphs is not None:
            self.mixed_graphs.drop()

    @torch.no_grad()
    def execute_model(self, orders: ModelInput) -> StepLogits | None:
        """Carry out everything but the drawing; None where nobody draws."""
        self._prepare(orders)
        self.prompt_logprobs = []
        if orders.decode_rows is not None:
            self._decoding = orders.decode_rows
            self.device_rows.set_decode_rows(orders.decode_rows)
        drawing, widths = self._drawing(orders.chunks)
        # What rows need is sent before the device is busy with this step.
        lines = self.sampler.build_metadata(drawing, widths) if drawing else None
        inputs = None
        if orders.chunks:
            logits, inputs = self._mixed(orders.chunks)
        elif self._decoding:
            logits = self.decode_graphs.replay(len(self._decoding))
        if lines is None:
            return None
        return StepLogits(
            logits, lines, inputs if any(p.verifies_drafts for p in orders.chunks) else None
        )

    @torch.no_grad()
    def sample_tokens(self, computed: StepLogits, mask_LW: Tensor | None = None) -> PendingOutput:
        """Draw a token for each line of what was computed."""
        logits_LV, lines = computed.logits, computed.sampling_metadata
        if computed.input_ids is not None:
            checked = verify_draft_tokens(
                self.sampler, logits_LV, lines, computed.input_ids,
                chances_LV=computed.draft_probs, mask_LW=mask_LW,
            )  # fmt: skip
            return PendingOutput(lines, checked.token_ids, checked.logprobs, checked.is_accepted)
        drawn = self.sampler.sample(logits_LV, lines, mask_RW=mask_LW)
        self.device_rows.last_token_ids.index_copy_(
            0, lines.logit_rows.rows, drawn.token_ids.clamp(min=0)
        )
        return PendingOutput(lines, drawn.token_ids, drawn.logprobs)

    def _drawing(self, parts: Sequence[RowChunk]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the rows that draw, and how many lines each has; None is one for all."""
        rows = self._decoding + tuple(row for part in parts for row in part.sampling_rows)
        if not any(part.verifies_drafts for part in parts):
            return rows, None
        widths = [1] * len(self._decoding)
        for part in parts:
            widths += [len(part.token_ids) if part.verifies_drafts else 1] * len(part.sampling_rows)
        return rows, tuple(widths)

    def _prepare(self, orders: ModelInput) -> None:
        """Move blocks, and write down what changed of the rows."""
        # Copies were decided with the step before: they come first, who has one may make room now.
        if orders.block_copies:
            sources, targets = zip(*orders.block_copies, strict=True)
            self.kv_cache.copy_blocks(sources, targets)
        for out in orders.swap_out:
            self.kv_cache.swap_out(out.device_blocks, out.host_blocks)
        for back in orders.swap_in:
            self.kv_cache.swap_in(back.host_blocks, back.device_blocks)
        for came in orders.received_blocks:
            self.kv_cache.import_blocks(came.blocks, came.kv_data)
        if self.lora_manager is not None and orders.new_rows:
            chosen = [each.lora_slot for each in orders.new_rows]
            self.device_rows.set_lora([each.row for each in orders.new_rows], chosen)
        for entry in orders.new_rows:
            self.sampler.add_row(
                entry.row, entry.sampling_params, entry.prompt_token_ids, entry.output_token_ids,
                choice=entry.choice_index, seeded=entry.has_seed,
            )  # fmt: skip
        if orders.block_table_updates:
            self.update_block_tables(orders.block_table_updates)
        if orders.decode_starts:
            self.device_rows.set_positions([each.row for each in orders.decode_starts],
                            [each.position for each in orders.decode_starts])  # fmt: skip
            given = [
                (each.row, each.token_id)
                for each in orders.decode_starts
                if each.token_id is not None
            ]
            if given:
                self.device_rows.set_last_tokens(
                    [row for row, _ in given], [token for _, token in given]
                )

    def update_block_tables(self, written: Sequence[BlockTableUpdate]) -> None:
        """Add blocks to the tables of rows."""
        rows: list[int] = []
        places: list[int] = []
        blocks: list[int] = []
        for each in written:
            rows += [each.row] * len(each.blocks)
            places += range(each.column, each.column + len(each.blocks))
            blocks += each.blocks
        self.device_rows.set_blocks(rows, places, blocks)

    def _mixed(self, parts: Sequence[RowChunk]) -> tuple[Tensor, Tensor | None]:
        """Compute parts behind the rows that decode; return logits, and the tokens before them.

        Nobody reads these where no guess is checked.
        """
        rows, decodes = self.device_rows, len(self._decoding)
        if self.mixed_graphs is not None and self.mixed_graphs.can_replay(decodes, parts):
            return self.model.compute_logits(self.mixed_graphs.run(self._decoding, parts)), None
        rows_R = rows.to_device([*self._decoding, *(part.row for part in parts)])
        tokens_N, positions_N, slots_N = self._prompts(parts)
        lengths_R = rows.to_device(
            [part.start_position + len(part.token_ids) for part in parts], torch.int32
        )
        if decodes:
            ahead = self._decodes(decodes)
            tokens_N = torch.cat((ahead.tokens_N, tokens_N))
            positions_N = torch.cat((ahead.positions_N, positions_N))
            slots_N = torch.cat((ahead.slot_mapping_N, slots_N))
            lengths_R = torch.cat((ahead.seq_lens_R, lengths_R))
        counts = (*(1,) * decodes, *(len(part.token_ids) for part in parts))
        adapters_N = None
        if self.lora_manager is not None:
            each_R = rows.lora_slots.index_select(0, rows_R)
            adapters_N = each_R.repeat_interleave(rows.to_device(counts), output_size=sum(counts))
        starts = list(accumulate(counts, initial=0))
        wanted = [*range(decodes)]
        for end, part in zip(starts[decodes + 1 :], parts, strict=True):
            if part.verifies_drafts:
                wanted += range(end - len(part.token_ids), end)
            else:
                wanted += [end - 1] * len(part.sampling_rows)
        draws = len(wanted)
        tellings = [
            (starts[decodes + number] + part.prompt_logprobs.offset, part.prompt_logprobs)
            for number, part in enumerate(parts)
            if part.prompt_logprobs is not None
        ]
        for begin, telling in tellings:
            wanted += range(begin, begin + len(telling.target_token_ids))
        wanted_W = rows.to_device(wanted)
        hidden_WD = self.model.compute_hidden_states(
            ForwardBatch(
                tokens_N=tokens_N,
                positions_N=positions_N,
                slot_mapping_N=slots_N,
                block_tables_RB=rows.block_tables.index_select(0, rows_R),
                seq_lens_R=lengths_R,
                query_start_loc_R1=rows.to_device(starts, torch.int32),
                max_query_len=max(counts),
                logits_positions_W=wanted_W,
                has_no_cached_prefix=not decodes
                and all(part.start_position == 0 for part in parts),
                query_lens=counts,
                state_rows_R=rows_R,
                lora_slots_N=adapters_N,
            )
        )
        self._tell([telling for _, telling in tellings], hidden_WD[draws:])
        logits = self.model.compute_logits(hidden_WD[:draws])
        return logits, tokens_N.index_select(0, wanted_W[:draws])

    def _tell(self, tellings: Sequence[PromptLogprobsRange], hidden_TD: Tensor) -> None:
        """Begin to tell how likely tokens of prompts were."""
        begin = 0
        for telling in tellings:
            end = begin + len(telling.target_token_ids)
            targets_T = self.device_rows.to_device(telling.target_token_ids)
            told = compute_prompt_logprobs(
                hidden_TD[begin:end], targets_T, telling.num_top_logprobs, self.model.compute_logits
            )
            self.prompt_logprobs.append(told)
            begin = end

    def _decodes(self, count: int) -> ForwardBatch:
        """Return what the rows that decode read, in tensors of their own, and move them on."""
        device, blocks = self.kv_cache.device, self.device_rows.block_tables.shape[1]
        whole, short = torch.int64, torch.int32
        step = ForwardBatch(
            tokens_N=torch.empty(count, dtype=whole, device=device),
            positions_N=torch.empty(count, dtype=whole, device=device),
            slot_mapping_N=torch.empty(count, dtype=whole, device=device),
            block_tables_RB=torch.empty(count, blocks, dtype=short, device=device),
            seq_lens_R=torch.empty(count, dtype=short, device=device),
            query_start_loc_R1=torch.empty(0, dtype=short, device=device),
            max_query_len=1,
        )
        self.device_rows.prepare_decode(self.device_rows.decode_rows[:count], step)
        return step

    def _prompts(self, parts: Sequence[RowChunk]) -> tuple[Tensor, ...]:
        """Return tokens, positions and slots of parts of prompts."""
        sent = self.device_rows.to_device(flatten_chunks(parts))
        block = self.device_rows.block_size
        blocks_N = self.device_rows.block_tables[sent[2], sent[1] // block].to(torch.int64)
        return sent[0], sent[1], blocks_N * block + sent[1] % block
