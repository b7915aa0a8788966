"""What tests hold of a program in another process: `RemoteObject`, and the link to it.

Nothing of the program runs here. So an object that claims to equal everything equals no plain
value, and is no number; a test of such a value fails, as it does of a value that is wrong.
"""

import builtins
import io
import socket
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from meshwright.run.posttrain.evaluation.verifiers.remote_values import decode_value, encode_value
from meshwright.run.posttrain.rollout.verifiers.frames import encode_frame, read_frame

_MOST_BYTES = 64 << 20
_MOST_ITEMS = 1_000_000
_LEFT = ("__add__", "__sub__", "__mul__", "__matmul__", "__truediv__", "__floordiv__", "__mod__",
         "__pow__", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__")  # fmt: skip
_ORDER = ("__lt__", "__le__", "__gt__", "__ge__")
_OTHERS = ("__len__", "__bool__", "__iter__", "__next__", "__getitem__", "__setitem__",
           "__delitem__", "__contains__", "__str__", "__repr__", "__enter__", "__exit__",
           "__neg__", "__pos__", "__invert__", "__instancecheck__",
           "__subclasscheck__")  # fmt: skip


class ProgramEndedError(Exception):
    """The process of the program ended, or what it says cannot be read."""


class ProgramLink:
    """The connection to the process of a program."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._exceptions: dict[int, type[BaseException]] = {}
        self._functions: list[Callable[..., Any]] = []
        self._proxies: dict[int, RemoteObject] = {}

    def wait_until_run(self) -> str:
        """Return what was wrong with the program; nothing where it ran to its end."""
        message = self._read()
        fault = message.get("fault")
        if fault is None:
            return ""
        if fault.get("memory"):
            raise MemoryError
        return str(fault["text"])

    def get_names(self, names: list[str]) -> dict[str, Any]:
        """Return those names that the program defines, with their values."""
        found: dict[str, Any] = self.ask({"do": "names", "names": names})
        return found

    def call(self, number: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call something of the program."""
        sent = [self.encode(each) for each in arguments]
        named = {name: self.encode(each) for name, each in keywords.items()}
        request = {"do": "call", "on": number, "args": sent, "kwargs": named}
        if isinstance(sys.stdin, io.StringIO) and (text := sys.stdin.read()):
            request["stdin"] = text  # tests put there what a program is to read
        return self.ask(request, arguments)

    def ask(
        self, request: dict[str, Any], arguments: tuple[Any, ...] = (), *, special: str = ""
    ) -> Any:
        """Send a request, and return its answer or raise its error."""
        self._send(request)
        while "call_back" in (reply := self._read()):
            self._call_back(reply)
        if printed := reply.get("printed"):
            sys.stdout.write(str(printed))
        if reply.get("memory"):
            raise MemoryError
        if "error" in reply:
            raise self._make_error(reply["error"], special)
        value = self.decode(reply.get("value"))
        for place, sent in reply.get("changed", {}).items():
            _replace(arguments[int(place)], self.decode(sent))
        return value

    def encode(self, value: Any) -> Any:
        """Return a value of the tests as the program's process understands it."""
        return encode_value(value, self._refer)

    def decode(self, sent: Any) -> Any:
        """Return a value of the program as tests hold it."""
        return decode_value(sent, self._resolve)

    def _refer(self, value: Any) -> Any:
        if type(value) is RemoteObject:
            return {"ref": object.__getattribute__(value, "_number")}
        for number, kind in self._exceptions.items():
            if value is kind:
                return {"ref": number}
        if isinstance(value, Iterator):
            items = [item for item, _ in zip(value, range(_MOST_ITEMS), strict=False)]
            return {"iterator": self.encode(items)}
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return {"builtin": name}
        if isinstance(value, list | tuple | set | dict):
            base = next(kind for kind in (list, tuple, set, dict) if isinstance(value, kind))
            return self.encode(base(value))
        if callable(value):
            self._functions.append(value)
            return {"call_back": len(self._functions) - 1}
        raise TypeError(f"a {type(value).__name__} of the tests cannot be given to the program")

    def _resolve(self, sent: dict[str, Any]) -> Any:
        number = int(sent["ref"])
        if sent["base"]:
            if sent.get("own"):
                return _find_exception(sent["base"])
            return self._get_exception(number, sent["base"])
        if sent.get("awaits"):
            return self._await(number)
        if number not in self._proxies:
            self._proxies[number] = RemoteObject(self, number)
        proxy = self._proxies[number]
        object.__setattr__(proxy, "_plain", self.decode(sent["plain"]))
        return proxy

    async def _await(self, number: int) -> Any:
        """Return what a coroutine of the program comes to; it runs there, without a pause."""
        return self.ask({"do": "special", "on": number, "name": "__await__", "args": []})

    def _get_exception(self, number: int, base: str) -> type[BaseException]:
        if number not in self._exceptions:
            kind = _find_exception(base)
            self._exceptions[number] = type("ProgramError", (kind,), {})
        return self._exceptions[number]

    def _make_error(self, sent: dict[str, Any], special: str) -> BaseException:
        kind = self.decode(sent["class"]) if sent["class"].get("base") else Exception
        name = str(sent["base"])
        if issubclass(kind, StopIteration | StopAsyncIteration | GeneratorExit):
            if special == "__next__" and name == "StopIteration":
                return StopIteration()
            return RuntimeError(f"the program raised {name}")
        try:
            return kind(*self.decode(sent["args"]))
        except Exception:  # noqa: BLE001 - some take other arguments
            return RuntimeError(str(sent["text"]))

    def _call_back(self, message: dict[str, Any]) -> None:
        try:
            function = self._functions[message["call_back"]]
            answer = {"returned": self.encode(function(*self.decode(message["args"])))}
        except ProgramEndedError:
            raise
        except Exception as error:  # noqa: BLE001 - goes to the program that called it
            answer = {"raised": f"{type(error).__name__}: {error}"}
        self._send(answer)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._connection.sendall(encode_frame(message))
        except OSError as error:
            raise ProgramEndedError from error

    def _read(self) -> dict[str, Any]:
        try:
            message = read_frame(self._connection, most_bytes=_MOST_BYTES)
        except MemoryError:
            raise
        except Exception as error:
            raise ProgramEndedError from error
        if not isinstance(message, dict):
            raise ProgramEndedError
        return message


class RemoteObject:
    """Something of a program that is no plain value."""

    def __init__(self, link: ProgramLink, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_plain", None)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call it in the program."""
        return self._link.call(self._number, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        return self._link.ask({"do": "get", "on": self._number, "name": name})

    def __setattr__(self, name: str, value: Any) -> None:
        sent = self._link.encode(value)
        self._link.ask({"do": "set", "on": self._number, "name": name, "args": [sent]})

    def __eq__(self, other: object) -> bool:
        if type(other) is RemoteObject:
            if other._number == self._number:
                return True
            return _apply(self, "__eq__", other) is True
        return self._plain is not None and bool(self._plain == other)

    def __hash__(self) -> int:
        return hash(self._number)


def _apply(proxy: RemoteObject, name: str, *arguments: Any) -> Any:
    link, sent = proxy._link, [proxy._link.encode(each) for each in arguments]  # noqa: SLF001
    request = {"do": "special", "on": proxy._number, "name": name, "args": sent}  # noqa: SLF001
    return link.ask(request, special=name)


def _define_specials() -> None:
    """Let special methods reach the program, where their result cannot pass for a plain one."""

    def make(name: str) -> Callable[..., Any]:
        def special(proxy: RemoteObject, *arguments: Any) -> Any:
            if name in _ORDER and type(arguments[0]) is not RemoteObject:
                return NotImplemented
            found = _apply(proxy, name, *arguments)
            if name in arithmetic and type(found) is not RemoteObject:
                return NotImplemented
            return found

        return special

    reflected = tuple(f"__r{name[2:]}" for name in _LEFT)
    arithmetic = {*_LEFT, *reflected, "__neg__", "__pos__", "__invert__"}
    for name in (*_LEFT, *reflected, *_ORDER, *_OTHERS):
        setattr(RemoteObject, name, make(name))
    setattr(RemoteObject, "__doc__", property(lambda proxy: proxy.__getattr__("__doc__")))  # noqa: B010


def _find_exception(name: str) -> type[BaseException]:
    kind = getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else Exception


def _replace(value: Any, content: Any) -> None:
    """Give a list, dict, set or bytearray of the tests the content that the program gave it."""
    if isinstance(value, list | bytearray) and isinstance(content, list | bytearray):
        value[:] = content
    elif type(value) is type(content) and isinstance(value, dict | set):
        value.clear()
        value.update(content)


def find_names(code: types.CodeType) -> set[str]:
    """Return the global names that code uses."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= find_names(constant)
    return names


_define_specials()
