"""Whom to preempt: when a running request finds no block, and when a more urgent one waits.

Chapter 06. vLLM preempts whole requests, the latest first (Kwon et al. 2023, arXiv:2309.06180, section 4.5). A victim
for an urgent request must be less urgent twice over: by its declared level, so that equals never push each other out,
and by its aged key (`Request.order`), so that who has waited long enough is left alone. Keys never change, and a
victim's is larger than that of the request it made way for: nobody is pushed out by the one it pushed out, and since
only finitely many requests can ever have a smaller key, everybody ends.
"""

from __future__ import annotations

from collections import Counter

from minillm.cache.block_pool import BlockPool
from minillm.engine.request import Request


def victim(running: list[Request], choice: str) -> Request:
    """The least urgent, or whoever loses the fewest computed tokens; never the most urgent, which comes first."""
    if choice == "fewest_tokens":
        return min(reversed(running[1:]), key=lambda r: r.computed)
    return running[-1]


def less_urgent(running: list[Request], head: Request, choice: str) -> list[Request]:
    """Those who may be preempted for `head`, in the order in which they go."""
    lesser = [r for r in reversed(running) if r.priority > head.priority and r.order > head.order]
    return sorted(lesser, key=lambda r: r.computed) if choice == "fewest_tokens" else lesser


def enough(lesser: list[Request], running: int, slots: int, need: int, headroom: int, pool: BlockPool) -> int:
    """How many of `lesser` must go until there is a slot, and `need` blocks and headroom for each who runs.

    0: none, or all of them would not do, and then none should lose its work.
    """
    held, free = Counter(), pool.free_count
    for going in range(len(lesser) + 1):
        stay = running - going
        if stay < slots and need + headroom * stay <= free:
            return going
        for block in lesser[going].table.blocks if going < len(lesser) else ():
            held[block] += 1
            free += held[block] == pool.count(block)  # nobody else holds it
    return 0
