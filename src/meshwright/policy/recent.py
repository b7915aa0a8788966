"""`Recent`: beginnings of prompts that were used lately, as many as there is room to remember."""

from collections import deque
from collections.abc import Hashable, Sequence


class Recent(dict[Hashable, int]):
    """Keys, each of which tells all before it, with the turn in which each was used last.

    Those used longest ago are forgotten, of one prompt its end first. So where a key is remembered,
    all before it are.
    """

    __slots__ = ("_listed", "_lists", "_most", "_turn")

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._turn = most, 0
        self._lists: deque[tuple[int, list[Hashable]]] = deque()
        """What each turn used; some of it has been used again since."""
        self._listed = 0
        """Keys in all of these lists."""

    def use(self, keys: Sequence[Hashable]) -> None:
        """Remember the keys of a prompt as the latest."""
        self._turn = turn = self._turn + 1
        self.update(dict.fromkeys(keys, turn))
        self._lists.append((turn, list(keys)))
        self._listed += len(keys)
        while len(self) > self._most:
            self._forget()
        if self._listed > 2 * len(self):
            self._tidy()

    def _forget(self) -> None:
        """Forget from the oldest list what is too much, or the list."""
        turn, keys = self._lists[0]
        before, much = len(keys), len(self) - self._most
        while keys and much:
            key = keys.pop()
            if self[key] == turn:
                del self[key]
                much -= 1
        self._listed -= before - len(keys)
        if not keys:
            self._lists.popleft()

    def _tidy(self) -> None:
        """Leave each key in the list of its last use alone."""
        left = ((turn, [key for key in keys if self[key] == turn]) for turn, keys in self._lists)
        self._lists = deque(one for one in left if one[1])
        self._listed = len(self)
