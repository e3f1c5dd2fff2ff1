"""What speculation should give, on paper.

Chapter 16. Leviathan et al. 2023 (arXiv:2211.17192), sections 3.1 to 3.4, in its symbols but for k (there gamma):

    a   acceptance: the probability that a draft token is kept, given that all before it were; sum min(p, q)
    k   draft tokens a round
    c   cost of one draft step in target steps
    v   what each draft token adds to the verifying forward, in target steps; 0 in the paper, where reading the
        weights is all that a step costs
"""

from __future__ import annotations

from minillm.errors import ParamsError, illegal


def check(a: float, k: int) -> None:
    if not 0 <= a <= 1:
        raise ParamsError(illegal("a", a, "must be from 0 to 1"))
    if k < 0 or int(k) != k:
        raise ParamsError(illegal("k", k, "must be a whole number of at least 0"))


def expected_tokens(a: float, k: int) -> float:
    """Tokens a call of the target: 1 + a + a^2 + ... + a^k = (1 - a^(k+1)) / (1 - a)."""
    check(a, k)
    return float(k + 1) if a == 1 else (1 - a ** (k + 1)) / (1 - a)


def round_cost(k: int, c: float, v: float = 0.0) -> float:
    """A round in target steps: k draft steps, and a forward over k + 1 tokens."""
    return 1 + k * (c + v)


def speedup(a: float, k: int, c: float, v: float = 0.0) -> float:
    """Tokens a target step of time, over plain decoding's one."""
    return expected_tokens(a, k) / round_cost(k, c, v)


def best_k(a: float, c: float, v: float = 0.0, most: int = 64) -> int:
    """The k of the largest speed-up; 0: speculation loses. It wins for some k if and only if it wins for k = 1,
    that is where a > c + v: the first draft token is the likeliest to be kept."""
    return max(range(most + 1), key=lambda k: (speedup(a, k, c, v), -k))


def acceptance(p, q) -> float:
    """a of two distributions: sum min(p, q) = 1 - their total variation distance."""
    return float(sum(min(float(x), float(y)) for x, y in zip(p, q, strict=True)))


def acceptance_of(accepted: int, refused: int) -> float:
    """The estimate of `a` from rounds. accepted: tokens. refused: rounds that were left before their draft's end, one
    refusal each; tokens behind it were not looked at."""
    return accepted / (accepted + refused) if accepted + refused else 0.0
