"""The process of a program: runs it, and does what its tests ask of its functions.

Each request names an operation on something of the program: call it, get or set an attribute, apply
a special method. What is not plain goes to the tests as a number that stands for it.
"""

import builtins
import inspect
import io
import socket
import sys
from typing import Any

from meshwright.run.posttrain.evaluation.verifiers.remote_values import decode_value, encode_value
from meshwright.run.posttrain.rollout.verifiers.frames import encode_frame, read_frame

_SHOWN = 400
"""Characters of an error: it is kept with every answer, and a program may say anything."""
_MOST_PRINTED = 1 << 16


def describe_error(error: BaseException, names: tuple[str, ...]) -> str:
    """Return an error with the line of the program or its tests; its class may tell nothing."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in names:
            line = trace.tb_lineno
        trace = trace.tb_next
    kind = type(error).__name__
    try:
        text = f"{kind}: {error}"
    except MemoryError:
        raise
    except BaseException:  # noqa: BLE001 - what the program wrote is at fault, and no judge
        text = kind
    return (f"{'' if line is None else f' line {line}'}: {text}")[:_SHOWN]


class ProgramServer:
    """A program's names, and what its tests hold of it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._names: dict[str, Any] = {"__name__": "answer", "__builtins__": builtins}
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._printed = io.StringIO()

    def run(self, program: str) -> None:
        """Run the program, say how that ended, and serve its tests until they end."""
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 3000))
        sys.set_int_max_str_digits(0)
        sys.stdout = self._printed
        fault: dict[str, Any] | None = None
        try:
            code = compile(program, "<program>", "exec")
            exec(code, self._names)  # noqa: S102 - the purpose of this isolated process
        except MemoryError:
            fault = {"memory": True}
        except BaseException as error:  # noqa: BLE001 - also SystemExit: nothing is left to test
            fault = {"text": f"program{describe_error(error, ('<program>',))}"[:_SHOWN]}
        self._connection.sendall(encode_frame({"fault": fault}))
        for request in iter(lambda: read_frame(self._connection), None):
            self._connection.sendall(self._answer(request))

    def _answer(self, request: dict[str, Any]) -> bytes:
        try:
            reply = {"value": self._encode(self._do(request))} | self._list_changes(request)
        except MemoryError:
            reply = {"memory": True}
        except BaseException as error:  # noqa: BLE001 - a test may expect it
            reply = {"error": self._encode_error(error)}
        if isinstance(sys.stdout, io.StringIO) and (printed := self._printed.getvalue()):
            reply["printed"] = printed[:_MOST_PRINTED]
            self._printed.seek(0)
            self._printed.truncate()
        return encode_frame(reply)

    def _do(self, request: dict[str, Any]) -> Any:
        does = request["do"]
        if "stdin" in request:
            sys.stdin = io.StringIO(request["stdin"])
        if does == "names":
            return {name: self._names[name] for name in request["names"] if name in self._names}
        target = self._objects[request["on"]]
        self._arguments = [self._decode(each) for each in request.get("args", ())]
        keywords = {name: self._decode(each) for name, each in request.get("kwargs", {}).items()}
        if does == "call":
            return target(*self._arguments, **keywords)
        if does == "get":
            return getattr(target, request["name"])
        if does == "set":
            setattr(target, request["name"], self._arguments[0])
            return None
        return _apply_special(request["name"], target, self._arguments)

    def _list_changes(self, request: dict[str, Any]) -> dict[str, Any]:
        """Say what became of lists, dicts and sets that a call was given."""
        if request["do"] != "call":
            return {}
        kinds = (list, dict, set, bytearray)
        changed = {
            place: encoded
            for place, value in enumerate(self._arguments)
            if type(value) in kinds and (encoded := self._encode(value)) != request["args"][place]
        }
        return {"changed": changed} if changed else {}

    def _encode_error(self, error: BaseException) -> dict[str, Any]:
        kind = type(error)
        arguments = [each if isinstance(each, int | str) else repr(each) for each in error.args]
        return {
            "class": self._encode(kind),
            "base": _name_builtin_base(kind),
            "own": kind.__module__ == "builtins",
            "args": [self._encode(each) for each in arguments],
            "text": describe_error(error, ("<program>",)),
        }

    def _encode(self, value: Any) -> Any:
        return encode_value(value, self._refer)

    def _refer(self, value: Any) -> dict[str, Any]:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        found: dict[str, Any] = {"ref": number, "base": "", "plain": None}
        if isinstance(value, type) and issubclass(value, BaseException):
            found["base"] = _name_builtin_base(value)
            found["own"] = value.__module__ == "builtins"
        found["awaits"] = inspect.iscoroutine(value)
        for base in (list, tuple, set, frozenset, dict):
            if isinstance(value, base):
                found["plain"] = self._encode(base(value))
        return found

    def _decode(self, sent: Any) -> Any:
        return decode_value(sent, self._resolve)

    def _resolve(self, sent: dict[str, Any]) -> Any:
        if "ref" in sent:
            return self._objects[sent["ref"]]
        if "iterator" in sent:
            return iter(self._decode(sent["iterator"]))
        if "builtin" in sent:
            return getattr(builtins, sent["builtin"])
        return _CallBack(self, sent["call_back"])

    def call_back(self, number: int, arguments: tuple[Any, ...]) -> Any:
        """Call a function of the tests, and do meanwhile what it asks."""
        sent = {"call_back": number, "args": [self._encode(each) for each in arguments]}
        self._connection.sendall(encode_frame(sent))
        while (request := read_frame(self._connection)) is not None:
            if "returned" in request:
                return self._decode(request["returned"])
            if "raised" in request:
                raise RuntimeError(request["raised"])
            self._connection.sendall(self._answer(request))
        raise SystemExit


class _CallBack:
    def __init__(self, server: ProgramServer, number: int) -> None:
        self._server, self._number = server, number

    def __call__(self, *arguments: Any) -> Any:
        return self._server.call_back(self._number, arguments)


def _name_builtin_base(kind: type[BaseException]) -> str:
    return next(each.__name__ for each in kind.__mro__ if each.__module__ == "builtins")


def _apply_special(name: str, target: Any, arguments: list[Any]) -> Any:
    if name == "__bool__":
        return bool(target)
    if name == "__await__":
        import asyncio

        return asyncio.run(target)
    if name in ("__iter__", "__next__"):
        return iter(target) if name == "__iter__" else next(target)
    if name == "__contains__":
        return arguments[0] in target
    if name == "__instancecheck__":
        return isinstance(arguments[0], target)
    if name == "__subclasscheck__":
        return issubclass(arguments[0], target)
    if not hasattr(type(target), name):
        raise TypeError(f"{type(target).__name__} has no {name}")
    return getattr(type(target), name)(target, *arguments)
