"""Distillation from a teacher's log-probabilities of its K likeliest words at every token.

What a teacher leaves out is one more word, "any other": student and teacher both have a probability
for it. So nothing is made up: the divergence is 0 just where both agree on all K + 1, it never
exceeds that over the whole vocabulary (merging words cannot add any), and equals it where K is the
vocabulary.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.spec.bounds import require, word

Direction = Literal["forward", "reverse"]
"""forward   KL(teacher ‖ student): the student shall cover what the teacher does
reverse   KL(student ‖ teacher): the student shall keep to what the teacher does"""

_LEAST_REST = 1e-7
"""Probability of "any other" below which rounding decides: it is taken to be this."""


def distillation(
    student_NK: Tensor, teacher_NK: Tensor, direction: Direction = "forward"
) -> Tensor:
    """Return each token's divergence in nats, over the teacher's words and "any other".

    Both are log-probabilities of the same K different words, normalised over the whole vocabulary;
    `chosen.word_logprobs` has those of the student. A teacher's -inf fills up shorter lists.
    """
    require(word("direction", direction, get_args(Direction)))
    if student_NK.shape != teacher_NK.shape or student_NK.dim() < 2:
        what = f"student {tuple(student_NK.shape)}, teacher {tuple(teacher_NK.shape)}"
        raise InputError([Problem("distillation", what, "give [tokens, words] of both")])
    teacher_NK = teacher_NK.detach().to(student_NK.dtype)
    there = torch.isfinite(teacher_NK)
    hidden = -math.inf
    student = torch.cat([student_NK, _rest(student_NK.masked_fill(~there, hidden))], -1)
    teacher = torch.cat([teacher_NK, _rest(teacher_NK)], -1)
    there = torch.cat([there, torch.ones_like(there[..., :1])], -1)
    # Where a list is shorter both sides say the same, so that neither value nor gradient remains.
    student, teacher = student.masked_fill(~there, 0), teacher.masked_fill(~there, 0)
    if direction == "forward":
        parts = teacher.exp() * (teacher - student)
    else:
        parts = student.exp() * (student - teacher)
    return parts.sum(-1)


def _rest(logprob_NK: Tensor) -> Tensor:
    """Return the log-probability of all words that are not there, [N, 1]."""
    mass = logprob_NK.exp().sum(-1, keepdim=True)
    return torch.log((1 - mass).clamp(min=_LEAST_REST))
