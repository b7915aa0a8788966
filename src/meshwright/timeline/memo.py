"""Answers about a timeline that are worked out once, and forgotten together with it.

Analyses ask the same things of a rank over and over: its device spans, its launches, its steps.
Answers are shared, so their arrays cannot be written to.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

Subject = TypeVar("Subject")
Params = ParamSpec("Params")
Result = TypeVar("Result")
_ANSWERS: WeakKeyDictionary[Any, dict[Any, tuple[Any, Any]]] = WeakKeyDictionary()


def memoize(
    function: Callable[Concatenate[Subject, Params], Result],
) -> Callable[Concatenate[Subject, Params], Result]:
    """Let a function work out each answer about a subject once; further arguments may be arrays.

    Those that cannot be looked up by value, and tuples, count as the same where they are the same
    object. The answer is kept as long as the subject lives, so it must not hold it.
    """

    @wraps(function)
    def remembering(subject: Subject, /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        known = _ANSWERS.setdefault(subject, {})
        key = (function, *map(_key, args), *((name, _key(v)) for name, v in kwargs.items()))
        if key not in known:
            # The arguments stay too: else another object could take their place in memory.
            known[key] = ((args, kwargs), _shared(function(subject, *args, **kwargs)))
        answer: Result = known[key][1]
        return answer

    return remembering


def _key(value: Any) -> Any:
    return id(value) if isinstance(value, tuple | np.ndarray) else value


def _shared(answer: Any) -> Any:
    for item in answer if isinstance(answer, tuple) else (answer,):
        if isinstance(item, np.ndarray):
            item.setflags(write=False)
    return answer
