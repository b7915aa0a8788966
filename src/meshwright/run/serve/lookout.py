"""`Lookout`: takes requests away from engines that live but make no progress, for a router.

It looks only while requests are under way, and knows neither where they go next nor what an engine
is stuck in: it lets the engine end them as its death would, and whoever reads them goes on.
"""

import asyncio
from collections.abc import Sequence

from meshwright.run.serve.interface import LetsGo, Serves

LOOK_S = 1.0
"""How often it looks."""


class Lookout:
    """Looks at the engines of a router while they have requests."""

    def __init__(self, engines: Sequence[Serves], under_way: Sequence[int]) -> None:
        """Look at engines; `under_way` says at each moment how many requests each of them has."""
        self._engines, self._under_way = engines, under_way
        self._looking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Look until nothing is under way; nothing happens where somebody looks already."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())

    def end(self) -> None:
        """Look no further."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look(self) -> None:
        seen: set[int] = set()
        while any(self._under_way):
            await asyncio.sleep(LOOK_S)
            ill = {
                number: why
                for number, engine in enumerate(self._engines)
                if self._under_way[number] and (why := engine.ill())
            }
            # Seen twice: where this process itself stood still, an engine may have spoken meanwhile
            # and only not been heard yet.
            for number in seen & ill.keys():
                engine = self._engines[number]
                if isinstance(engine, LetsGo):
                    engine.let_go(ill[number])
            seen = set(ill)
