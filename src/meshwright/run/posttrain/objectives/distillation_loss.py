"""Distillation from a teacher's log-probabilities of its K likeliest words at every token.

What a teacher leaves out is one more word, "any other": student and teacher both have a probability
for it. So nothing is made up: the divergence is 0 just where both agree on all K + 1, it never
exceeds that over the whole vocabulary (merging words cannot add any), and equals it where K is the
vocabulary.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.spec.field_checks import check_choice, raise_problems

KLDirection = Literal["forward", "reverse"]
"""forward   KL(teacher ‖ student): the student shall cover what the teacher does
reverse   KL(student ‖ teacher): the student shall keep to what the teacher does"""

_LEAST_REST = 1e-7
"""Probability that a teacher leaves to "any other" below which the rounding of what it told
decides: it is taken to be this."""


def top_k_divergence(
    student_NK: Tensor, rest_N: Tensor, teacher_NK: Tensor, direction: KLDirection = "forward"
) -> Tensor:
    """Return each token's divergence in nats, over the teacher's words and "any other".

    Both have log-probabilities of the same K different words, normalised over the whole vocabulary,
    and the student that of all others together, `rest_N`: `compute_token_logprobs` returns both. A
    teacher's -inf fills up shorter lists; what stands there is none of the words.
    """
    raise_problems(check_choice("direction", direction, get_args(KLDirection)))
    shape = student_NK.shape
    if shape != teacher_NK.shape or len(shape) < 2 or rest_N.shape != shape[:-1]:
        shapes = (f"{tuple(each.shape)}" for each in (student_NK, rest_N, teacher_NK))
        what = "student {}, its rest {}, teacher {}".format(*shapes)
        fix = "give [tokens, token ids] of both, and [tokens] of the rest"
        raise InputError([Problem("distillation", what, fix)])
    teacher_NK = teacher_NK.detach()
    student = torch.cat([student_NK, rest_N[..., None]], -1)
    teacher = torch.cat([teacher_NK, _rest(teacher_NK).to(teacher_NK.dtype)], -1).to(student.dtype)
    there = torch.cat([torch.isfinite(teacher_NK), ~torch.isneginf(rest_N)[..., None]], -1)
    # Where a list is shorter, or holds all words that there are, both sides say the same, so that
    # neither value nor gradient remains.
    student, teacher = student.masked_fill(~there, 0), teacher.masked_fill(~there, 0)
    if direction == "forward":
        parts = teacher.exp() * (teacher - student)
    else:
        parts = student.exp() * (student - teacher)
    return parts.sum(-1)


def _rest(teacher_NK: Tensor) -> Tensor:
    """Return the log-probability of all words that a teacher did not tell of, float64 [N, 1]."""
    mass = teacher_NK.double().exp().sum(-1, keepdim=True)
    return torch.log((1 - mass).clamp(min=_LEAST_REST))
