"""`JsonCallParser`: one tool call written as a JSON object, read as it comes.

Arguments are passed on letter by letter as the model wrote them: nothing is parsed and written
again, so nothing can change on the way. Braces, quotes and markers inside strings mean nothing.
"""

import json

_ARGUMENTS = ("arguments", "parameters")
_CLOSES = {"}": "{", "]": "["}


class JsonCallParser:
    """Reads `{"name": …, "arguments": {…}}`; keys may come in any order, others are passed over."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_started = False
        """The arguments have begun."""
        self.is_done = False
        self.is_malformed = False
        """What came is no such object."""
        self._raw: list[str] = []
        self._arguments: list[str] = []
        self._open: list[str] = []
        self._expects = "object"
        self._key = ""
        self._word: list[str] = []
        self._quoted = self._escaped = self._passed_on = False

    @property
    def is_complete(self) -> bool:
        """Whether the arguments came to their end."""
        return self.has_started and not self._passed_on and len(self._open) == 1

    @property
    def raw_text(self) -> str:
        """Everything that was taken."""
        return "".join(self._raw)

    def feed(self, text: str) -> str:
        """Take what belongs to the object and return the rest."""
        for at, letter in enumerate(text):
            if self.is_done or self.is_malformed:
                return text[at:]
            if self._takes(letter):
                self._raw.append(letter)
            else:
                self.is_malformed = True
                return text[at:]
        return ""

    def take_arguments(self) -> str:
        """Return the arguments that came since this was last asked."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _takes(self, letter: str) -> bool:
        depth, passed_on = len(self._open), self._passed_on
        if self._quoted:
            taken = self._takes_quoted(letter, depth)
        elif depth > 1:
            taken = self._takes_nested(letter)
        else:
            taken = letter in " \t\r\n" or self._takes_outer(letter)
        if taken and passed_on:
            self._arguments.append(letter)
        return taken

    def _takes_quoted(self, letter: str, depth: int) -> bool:
        if depth == 1:
            self._word.append(letter)
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = True
        elif letter == '"':
            self._quoted = False
            return depth > 1 or self._word_ended()
        return True

    def _takes_nested(self, letter: str) -> bool:
        if letter in "{[":
            self._open.append(letter)
        elif letter in "}]":
            if self._open.pop() != _CLOSES[letter]:
                return False
            if len(self._open) == 1:
                self._expects, self._passed_on = "comma", False
        elif letter == '"':
            self._quoted = True
        return True

    def _takes_outer(self, letter: str) -> bool:
        """Take a letter that is in no value of the object, or begins one."""
        expects = self._expects
        if expects == "object":
            self._open.append(letter)
            self._expects = "first key"
            return letter == "{"
        if letter == "}" and expects in ("first key", "comma", "number"):
            self._open.pop()
            self.is_done = True
        elif letter == "," and expects in ("comma", "number"):
            self._expects = "key"
        elif letter == ":" and expects == "colon":
            self._expects = "value"
        elif letter == '"' and expects in ("first key", "key", "value"):
            self._quoted, self._word = True, [letter]
        elif letter in "{[" and expects == "value":
            self._begin_value(letter)
        elif expects in ("value", "number"):
            # Also true, false and null.
            self._expects = "number"
            return letter.isalnum() or letter in "+-."
        else:
            return False
        return True

    def _begin_value(self, letter: str) -> None:
        self._open.append(letter)
        if self._key in _ARGUMENTS and not self.has_started:
            self.has_started = self._passed_on = True
            self._arguments.append(letter)

    def _word_ended(self) -> bool:
        try:
            word = json.loads("".join(self._word), strict=False)
        except ValueError:
            return False
        if self._expects in ("first key", "key"):
            self._key, self._expects = word, "colon"
            return True
        self._expects = "comma"
        if self._key == "name" and self.name is None:
            self.name = word
        elif self._key in _ARGUMENTS and not self.has_started:
            # Some models write the arguments as a text that holds JSON.
            self.has_started = True
            self._arguments.append(word)
        return True
