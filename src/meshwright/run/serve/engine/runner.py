"""`Runner`: carries out orders on one device. It decides nothing, and waits for nothing.

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
from meshwright.run.nn.holding import Holding
from meshwright.run.serve.engine.device_rows import DecodeForward, DeviceRows
from meshwright.run.serve.engine.mixed_steps import MixedSteps, lay_out
from meshwright.run.serve.engine.orders import Orders, Part, Telling, Written
from meshwright.run.serve.engine.prompt_telling import tell_prompt
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.model.graphs import Graphs
from meshwright.run.serve.model.lora import Adapters
from meshwright.run.serve.model.step import Step
from meshwright.run.serve.model.streaming import Streaming, stream
from meshwright.run.serve.sampling.lines import Lines
from meshwright.run.serve.sampling.sampler import Sampler
from meshwright.run.serve.sampling.speculation import check
from meshwright.run.serve.sampling.telling import Told


@dataclass(frozen=True, slots=True)
class Computed:
    """Logits that wait to be drawn from."""

    logits: Tensor
    lines: Lines
    inputs: Tensor | None
    """The tokens that were computed at these lines; None where no guess is checked."""
    chances: Tensor | None = None
    """What the guesses among them were drawn from, where that matters."""


class Landing:
    """Tokens on their way to the host."""

    def __init__(
        self, lines: Lines, tokens_L: Tensor, told: Told | None, kept_L: Tensor | None = None
    ) -> None:
        self.lines = lines
        self._event: torch.cuda.Event | None = None
        self._tokens, self._kept, self._told = tokens_L, kept_L, told
        if tokens_L.is_cuda:
            self._tokens = tokens_L.to("cpu", non_blocking=True)
            if kept_L is not None:
                self._kept = kept_L.to("cpu", non_blocking=True)
            if told is not None:
                self._told = Told(*(part.to("cpu", non_blocking=True) for part in told))
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def by_host(self) -> bool:
        """Whether the host computed them itself, so that nothing goes on while it waits."""
        return self._event is None

    @property
    def is_there(self) -> bool:
        """Whether nobody would have to wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[list[tuple[int, ...]], Told | None]:
        """Return the tokens of each row that drew, and how likely they were where it was asked."""
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._tokens.tolist()
        if self._kept is None:
            return [(token,) for token in tokens], self._told
        kept, begin, found = self._kept.tolist(), 0, []
        for end in self.lines.ends:
            count = sum(kept[begin:end])
            found.append(tuple(tokens[begin : begin + count]))
            begin = end
        return found, self._told


class Runner:
    """One device with its model, cache and rows."""

    def __init__(
        self,
        forward: Forward,
        sampler: Sampler,
        rows: int,
        adapters: Adapters | None = None,
        *,
        graph_tokens: int = 0,
    ) -> None:
        """Serve at most `rows` answers at a time.

        Steps of at most `graph_tokens` tokens are captured with parts of prompts in them, too.
        """
        cache = forward.cache
        self.adapters, self.ranks = adapters, 1
        longest = -(-forward.max_length // cache.block_tokens)
        self.forward, self.sampler, self.cache = forward, sampler, cache
        self.rows = DeviceRows(rows, longest, cache.block_tokens, cache.device)
        self.graphs = Graphs(
            DecodeForward(forward, self.rows), rows, table_blocks=longest,
            adapters=adapters is not None,
        )  # fmt: skip
        self.mixed: MixedSteps | None = None
        if graph_tokens and forward.recurrent:
            what = "states of recurrent layers are computed row by row, by what the host knows"
            raise InputError([Problem("graph_tokens", what, "serve this model without")])
        if graph_tokens:
            self.mixed = MixedSteps(forward, self.rows, graph_tokens, adapters=adapters is not None)
        self.streaming: Streaming | None = None
        """Who computes which products of decoding steps, once that was measured."""
        self._decoding: tuple[int, ...] = ()
        self.draft: Runner | None = None
        """A smaller model that guesses ahead, with the same sampler and as many blocks."""
        self.holdings: dict[str, Holding] | None = None
        """Which part of each weight lies here, where ranks share them."""
        self.told: list[Told] = []
        """How likely tokens of prompts were in the last step, part by part that was to tell."""

    def capture(self) -> None:
        """Capture the graphs of steps; does nothing without a GPU."""
        self.rows.decode(())
        if self.streaming is None:
            self.streaming = stream(self.forward.decoder, self.graphs.rows)
        self.graphs.capture()
        if self.mixed is not None:
            self.mixed.capture()
        self._decoding = ()
        if self.cache.device.type == "cuda":
            weight = self.forward.decoder.embedding.weight
            self.sampler.warm_up(weight.new_zeros(1, self.forward.decoder.model.vocab))
        if self.draft is not None:
            self.draft.capture()

    def forget(self) -> None:
        """Drop the captured steps: needed when weights or the cache move."""
        self.graphs.forget()
        if self.mixed is not None:
            self.mixed.forget()

    @torch.no_grad()
    def compute(self, orders: Orders) -> Computed | None:
        """Carry out everything but the drawing; None where nobody draws."""
        self._prepare(orders)
        self.told = []
        if orders.rows is not None:
            self._decoding = orders.rows
            self.rows.decode(orders.rows)
        drawing, widths = self._drawing(orders.parts)
        # What rows need is sent before the device is busy with this step.
        lines = self.sampler.plan(drawing, widths) if drawing else None
        inputs = None
        if orders.parts:
            logits, inputs = self._mixed(orders.parts)
        elif self._decoding:
            logits = self.graphs.replay(len(self._decoding))
        if lines is None:
            return None
        return Computed(logits, lines, inputs if any(p.checks for p in orders.parts) else None)

    @torch.no_grad()
    def draw(self, computed: Computed, mask_LW: Tensor | None = None) -> Landing:
        """Draw a token for each line of what was computed."""
        logits_LV, lines = computed.logits, computed.lines
        if computed.inputs is not None:
            checked = check(
                self.sampler, logits_LV, lines, computed.inputs,
                chances_LV=computed.chances, mask_LW=mask_LW,
            )  # fmt: skip
            return Landing(lines, checked.tokens, checked.told, checked.kept)
        drawn = self.sampler.sample(logits_LV, lines, mask_RW=mask_LW)
        self.rows.last.index_copy_(0, lines.places.rows, drawn.tokens.clamp(min=0))
        return Landing(lines, drawn.tokens, drawn.told)

    def _drawing(self, parts: Sequence[Part]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the rows that draw, and how many lines each has; None is one for all."""
        rows = self._decoding + tuple(row for part in parts for row in part.draws)
        if not any(part.checks for part in parts):
            return rows, None
        widths = [1] * len(self._decoding)
        for part in parts:
            widths += [len(part.tokens) if part.checks else 1] * len(part.draws)
        return rows, tuple(widths)

    def _prepare(self, orders: Orders) -> None:
        """Move blocks, and write down what changed of the rows."""
        # Copies were decided with the step before: they come first, who has one may make room now.
        if orders.copies:
            sources, targets = zip(*orders.copies, strict=True)
            self.cache.copy(sources, targets)
        for out in orders.moved_out:
            self.cache.swap_out(out.device, out.host)
        for back in orders.moved_in:
            self.cache.swap_in(back.host, back.device)
        for came in orders.arrived:
            self.cache.take_in(came.blocks, came.data)
        if self.adapters is not None and orders.entries:
            chosen = [each.adapter for each in orders.entries]
            self.rows.choose([each.row for each in orders.entries], chosen)
        for entry in orders.entries:
            self.sampler.set(
                entry.row, entry.sampling, entry.prompt, entry.output,
                choice=entry.choice, seeded=entry.seeded,
            )  # fmt: skip
        if orders.written:
            self.write(orders.written)
        if orders.going:
            self.rows.start([each.row for each in orders.going],
                            [each.position for each in orders.going])  # fmt: skip
            given = [(each.row, each.token) for each in orders.going if each.token is not None]
            if given:
                self.rows.give([row for row, _ in given], [token for _, token in given])

    def write(self, written: Sequence[Written]) -> None:
        """Add blocks to the tables of rows."""
        rows: list[int] = []
        places: list[int] = []
        blocks: list[int] = []
        for each in written:
            rows += [each.row] * len(each.blocks)
            places += range(each.place, each.place + len(each.blocks))
            blocks += each.blocks
        self.rows.write(rows, places, blocks)

    def _mixed(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor | None]:
        """Compute parts behind the rows that decode; return logits, and the tokens before them.

        Nobody reads these where no guess is checked.
        """
        rows, decodes = self.rows, len(self._decoding)
        if self.mixed is not None and self.mixed.covers(decodes, parts):
            return self.forward.logits(self.mixed.run(self._decoding, parts)), None
        rows_R = rows.sent([*self._decoding, *(part.row for part in parts)])
        tokens_N, positions_N, slots_N = self._prompts(parts)
        lengths_R = rows.sent([part.begin + len(part.tokens) for part in parts], torch.int32)
        if decodes:
            ahead = self._decodes(decodes)
            tokens_N = torch.cat((ahead.tokens_N, tokens_N))
            positions_N = torch.cat((ahead.positions_N, positions_N))
            slots_N = torch.cat((ahead.slots_N, slots_N))
            lengths_R = torch.cat((ahead.lengths_R, lengths_R))
        counts = (*(1,) * decodes, *(len(part.tokens) for part in parts))
        adapters_N = None
        if self.adapters is not None:
            each_R = rows.adapter.index_select(0, rows_R)
            adapters_N = each_R.repeat_interleave(rows.sent(counts), output_size=sum(counts))
        starts = list(accumulate(counts, initial=0))
        wanted = [*range(decodes)]
        for end, part in zip(starts[decodes + 1 :], parts, strict=True):
            if part.checks:
                wanted += range(end - len(part.tokens), end)
            else:
                wanted += [end - 1] * len(part.draws)
        draws = len(wanted)
        tellings = [
            (starts[decodes + number] + part.telling.offset, part.telling)
            for number, part in enumerate(parts)
            if part.telling is not None
        ]
        for begin, telling in tellings:
            wanted += range(begin, begin + len(telling.targets))
        wanted_W = rows.sent(wanted)
        hidden_WD = self.forward.hidden(
            Step(
                tokens_N=tokens_N,
                positions_N=positions_N,
                slots_N=slots_N,
                tables_RB=rows.tables.index_select(0, rows_R),
                lengths_R=lengths_R,
                starts_R1=rows.sent(starts, torch.int32),
                most_queries=max(counts),
                wanted_W=wanted_W,
                fresh=not decodes and all(part.begin == 0 for part in parts),
                queries=counts,
                states_R=rows_R,
                adapters_N=adapters_N,
            )
        )
        self._tell([telling for _, telling in tellings], hidden_WD[draws:])
        logits = self.forward.logits(hidden_WD[:draws])
        return logits, tokens_N.index_select(0, wanted_W[:draws])

    def _tell(self, tellings: Sequence[Telling], hidden_TD: Tensor) -> None:
        """Begin to tell how likely tokens of prompts were."""
        begin = 0
        for telling in tellings:
            end = begin + len(telling.targets)
            targets_T = self.rows.sent(telling.targets)
            told = tell_prompt(hidden_TD[begin:end], targets_T, telling.top, self.forward.logits)
            self.told.append(told)
            begin = end

    def _decodes(self, count: int) -> Step:
        """Return what the rows that decode read, in tensors of their own, and move them on."""
        device, blocks = self.cache.device, self.rows.tables.shape[1]
        whole, short = torch.int64, torch.int32
        step = Step(
            tokens_N=torch.empty(count, dtype=whole, device=device),
            positions_N=torch.empty(count, dtype=whole, device=device),
            slots_N=torch.empty(count, dtype=whole, device=device),
            tables_RB=torch.empty(count, blocks, dtype=short, device=device),
            lengths_R=torch.empty(count, dtype=short, device=device),
            starts_R1=torch.empty(0, dtype=short, device=device),
            most_queries=1,
        )
        self.rows.read(self.rows.decoding[:count], step)
        return step

    def _prompts(self, parts: Sequence[Part]) -> tuple[Tensor, ...]:
        """Return tokens, positions and slots of parts of prompts."""
        sent = self.rows.sent(lay_out(parts))
        block = self.rows.block_tokens
        blocks_N = self.rows.tables[sent[2], sent[1] // block].to(torch.int64)
        return sent[0], sent[1], blocks_N * block + sent[1] % block
