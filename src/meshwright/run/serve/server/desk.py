"""`Desk`: what every endpoint works with."""

import time
from collections.abc import Sequence

from meshwright.errors import InputError
from meshwright.run.serve.asked import Ask
from meshwright.run.serve.interface import Serves, Sleeps
from meshwright.run.serve.server.bodies import StreamOptions
from meshwright.run.serve.server.faults import Fault, impossible
from meshwright.run.serve.server.keys import Keys, read_keys
from meshwright.run.serve.server.metrics import Figures
from meshwright.run.serve.server.readers import Readers
from meshwright.run.serve.server.settings import ServerSettings
from meshwright.run.serve.server.spans import Spans
from meshwright.run.serve.server.streams import Lines, TellUsage
from meshwright.run.serve.server.traffic import Call, Traffic
from meshwright.run.serve.server.under_way import Replies, Reply
from meshwright.run.serve.server.words import Words

Answer = bytes | Lines
"""A body of JSON, or events as they come."""


class Desk:
    """The engine, its words, the settings, and what is counted."""

    def __init__(
        self, engine: Serves, words: Words, settings: ServerSettings, spans: Spans | None
    ) -> None:
        self.engine = engine
        self.words = words
        self.settings = settings
        self.spans = spans
        self.keys: Keys = read_keys(settings.keys_file, "MESHWRIGHT_API_KEYS")
        self.admin_keys: Keys = read_keys(settings.admin_keys_file, "MESHWRIGHT_ADMIN_KEYS")
        self.readers = Readers(words, settings.tool_format, reasoning=settings.reasoning)
        self.figures = Figures(engine, settings.model, settings.adapters)
        self.traffic = Traffic(settings.waiting)
        self.begun = self.now()

    def now(self) -> int:
        """Return the second that answers carry."""
        return int(time.time())

    def check_awake(self) -> None:
        """Raise where the engine can answer nothing at the moment."""
        if isinstance(self.engine, Sleeps) and self.engine.asleep():
            raise Fault(503, "The engine sleeps: wake it with POST /wake_up", code="asleep")
        if reason := self.engine.ill():
            raise Fault(503, f"The engine makes no progress: {reason}", code="ill", retry_s=10)

    def ask(self, asks: Sequence[Ask], call: Call) -> Replies:
        """Put asks to the engine, if there is room for them."""
        self.check_awake()
        self.traffic.check()
        replies = Replies([], asks[0].sampling.n)
        call.open.append(replies)
        for ask in asks:
            try:
                reply = Reply(self.engine, ask, self.figures, self.traffic, call)
            except InputError as error:
                raise impossible(error, fields=call.fields) from None
            replies.each.append(reply)
        return replies

    def tell_usage(self, options: StreamOptions | None) -> TellUsage:
        """Return when a stream tells the counts of tokens."""
        if options is None or not (options.include_usage or options.continuous_usage_stats):
            return "never"
        return "always" if options.continuous_usage_stats else "last"
