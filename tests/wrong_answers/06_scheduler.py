"""Plausible wrong answers to exercise 06, each with text that its message must contain."""

GOOD = {
    "whole_gap_ms": "216.4",
    "steps": "9",
    "chunk_gap_ms": "35.6",
    "ttft_ms": "309.2",
    "swap_ms": "85.9",
    "recompute_ms": "182.95",
    "even_gb_s": "11.74",
}


def figures(**changed: str) -> str:
    body = ", ".join(f"{key!r}: {value}" for key, value in {**GOOD, **changed}.items())
    return "def figures():\n    return {" + body + "}"


KEY = "def queue_key(priority, arrival, ageing): return "
REFUSE = "            if -(-(prompt + new - 1) // block_size) > num_blocks:"
LOOP = (
    '        while waiting and -(-waiting[0]["tokens"] // block_size) <= free:\n'
    "            running.append(waiting.pop(0))"
)
SKIP = (
    '        while any(-(-w["tokens"] // block_size) <= free for w in waiting):\n'
    '            running.append(next(w for w in waiting if -(-w["tokens"] // block_size) <= free))\n'
    "            waiting.remove(running[-1])"
)

WRONG = {
    "06.admit": {
        "32 requests at most": (
            "right = admit\n"
            "def admit(waiting, slots, free, block_size, spare):\n"
            "    return right(waiting[:32], slots, free, block_size, spare)",
            "expected",
        ),
        "rounded down": (("blocks = -(-tokens // block_size)", "blocks = tokens // block_size"), "rounded up"),
        "overtaking": (
            ("            break\n        free -= blocks", "            continue\n        free -= blocks"),
            "overtakes",
        ),
        "nothing taken": (("        free -= blocks\n", ""), "subtract"),
        "one block too many kept": (("if free - blocks < spare:", "if free - blocks <= spare:"), "are enough"),
        "spare for each": (("        free -= blocks\n", "        free -= blocks + spare\n"), "not one for each"),
        "a float": (("return admitted", "return float(admitted)"), "expected ints"),
        "no spare": (("if free - blocks < spare:", "if free - blocks < 0:"), "must stay free"),
        "slots ignored": (("waiting[:slots]", "waiting"), "slots"),
        "tokens for blocks": (("blocks = -(-tokens // block_size)", "blocks = tokens"), "blocks with blocks"),
        "one block each": (("blocks = -(-tokens // block_size)", "blocks = 1"), "expected"),
        "the list": (("return admitted", "return waiting[:admitted]"), "expected a number"),
        "eats the queue": (
            (
                "for tokens in waiting[:slots]:",
                "while waiting and admitted < slots:\n        tokens = waiting.pop(0)",
            ),
            "in place",
        ),
        "the example": ("def admit(waiting, slots, free, block_size, spare): return 1", "expected"),
    },
    "06.plan_step": {
        "a budget of 256 at most": (
            "right = plan_step\ndef plan_step(requests, budget): return right(requests, min(budget, 256))",
            "expected",
        ),
        "budget for each": (
            ("            budget -= given[i]\n".replace("            ", "                "), ""),
            "not for each",
        ),
        "prompts first": (("for decoding in (True, False):", "for decoding in (False, True):"), "prompts went first"),
        "in the order of the list": (
            ("            if (tokens - computed == 1 and computed > 0) is decoding:", "            if decoding:"),
            "order of the list",
        ),
        "every chunk samples": (("n == tokens - computed)", "n > 0)"), "only the last chunk"),
        "only decodes sample": (
            ("n == tokens - computed)", "n == 1 == tokens - computed and computed > 0)"),
            "first new token",
        ),
        "all sample": (("n == tokens - computed)", "True)"), "no logits"),
        "computed again": (
            ("given[i] = min(tokens - computed, budget)", "given[i] = min(tokens, budget)"),
            "not computed again",
        ),
        "whole prompts only": (
            (
                "given[i] = min(tokens - computed, budget)",
                "given[i] = (tokens - computed) * (tokens - computed <= budget)",
            ),
            "may be cut",
        ),
        "a one-token prompt is a decode": (
            ("(tokens - computed == 1 and computed > 0)", "(tokens - computed == 1)"),
            "not a decode",
        ),
        "those that get something": (
            ("in zip(given, requests)]", "in zip(given, requests) if n]"),
            "expected",
        ),
        "equal requests taken for one": (
            "def plan_step(requests, budget):\n"
            "    given = [0] * len(requests)\n"
            "    for r in sorted(requests, key=lambda r: not (r[0] - r[1] == 1 and r[1] > 0)):\n"
            "        given[requests.index(r)] = min(r[0] - r[1], budget)\n"
            "        budget -= min(r[0] - r[1], budget)\n"
            "    return [(n, n == t - c) for n, (t, c) in zip(given, requests)]",
            "expected",
        ),
        "in the order of planning": (
            (
                "return [(n, n == tokens - computed)",
                "return [(n, n == 1) for n in sorted(given)] and [(n, n == computed)",
            ),
            "expected",
        ),
        "floats": (("return [(n, n ==", "return [(float(n), n =="), "expected ints"),
        "no samples": (("return [(n, n == tokens - computed)", "return [n"), "expected"),
        "the example": ("def plan_step(requests, budget): return [(5, False), (1, True)]", "expected"),
    },
    "06.make_room": {
        "8 running requests looked at": (
            "right = make_room\n"
            "def make_room(needed, running, waiting, free):\n"
            "    late = sorted(running, key=lambda s: s.arrival)[-9:]\n"
            "    rest = [s for s in running if s not in late]\n"
            "    victims = right(needed, late, waiting, free)\n"
            "    running[:] = rest + late\n"
            "    return victims",
            "expected",
        ),
        "words lost": (
            (
                "        victim.computed = 0\n",
                "        victim.computed = 0\n        victim.tokens = victim.tokens[: victim.prompt_length]\n",
            ),
            "words it has said",
        ),
        "words lost in place": (
            (
                "        victim.computed = 0\n",
                "        victim.computed = 0\n        del victim.tokens[victim.prompt_length :]\n",
            ),
            "words it has said",
        ),
        "computed stays": (("        victim.computed = 0\n", ""), "computed = 0"),
        "computed is the prompt": (
            ("        victim.computed = 0\n", "        victim.computed = victim.prompt_length\n"),
            "prompt's KV",
        ),
        "still names its blocks": (("        victim.blocks = []\n", ""), "still names"),
        "blocks shared with the free list": (
            (
                "        free += victim.blocks\n        victim.blocks = []",
                "        free += victim.blocks\n        victim.blocks = free",
            ),
            "blocks",
        ),
        "a leak": (("        free += victim.blocks\n", ""), "leak"),
        "cleared before they are freed": (
            (
                "        free += victim.blocks\n        victim.blocks = []",
                "        victim.blocks = []\n        free += victim.blocks",
            ),
            "leak",
        ),
        "the first to arrive": (("victim = max(running", "victim = min(running"), "first to arrive"),
        "the end of the list": (("max(running, key=lambda s: s.arrival)", "running[-1]"), "no order"),
        "everybody": (("and len(running) > 1", "and running"), "never a victim"),
        "the first of all is spared": (
            "right = make_room\n"
            "def make_room(needed, running, waiting, free):\n"
            "    first = min(s.arrival for s in running + waiting)\n"
            "    victims = []\n"
            "    while len(free) < needed and any(s.arrival != first for s in running):\n"
            "        victim = max(running, key=lambda s: s.arrival)\n"
            "        running.remove(victim)\n"
            "        free += victim.blocks\n"
            "        victim.blocks, victim.computed = [], 0\n"
            "        waiting.append(victim)\n"
            "        waiting.sort(key=lambda s: s.arrival)\n"
            "        victims.append(victim.name)\n"
            "    return victims",
            "not the first of all",
        ),
        "arrival 0 is spared": (
            ("and len(running) > 1", "and any(s.arrival for s in running)"),
            "need not be 0",
        ),
        "all but one": (("len(free) < needed and ", ""), "more victims"),
        "to the end": (("waiting.insert(place, victim)", "waiting.append(victim)"), "end of the queue"),
        "to the front": (("waiting.insert(place, victim)", "waiting.insert(0, victim)"), "front"),
        "not queued": (("        waiting.insert(place, victim)\n", ""), "waiting is then"),
        "free list replaced": (("free += victim.blocks", "free = free + victim.blocks"), "the free blocks are then"),
        "running replaced": (
            ("running.remove(victim)", "running = [s for s in running if s is not victim]"),
            "running is then",
        ),
        "nothing done where it cannot be enough": (
            (
                "    victims = []\n",
                "    victims = []\n"
                "    if len(free) + sum(len(s.blocks) for s in running) < needed:\n        return victims\n",
            ),
            "returned []",
        ),
        "blocks None": (("        victim.blocks = []\n", "        victim.blocks = None\n"), "blocks is then None"),
        "a list in the free list": (("free += victim.blocks", "free.append(victim.blocks)"), "free blocks are then"),
        "what it said becomes prompt": (
            (
                "        victim.computed = 0\n",
                "        victim.computed = 0\n        victim.prompt_length = len(victim.tokens)\n",
            ),
            "prompt_length is then",
        ),
        "one victim only": (
            ("while len(free) < needed and len(running) > 1:", "if len(free) < needed and len(running) > 1:"),
            "returned",
        ),
        "the objects": (("victims.append(victim.name)", "victims.append(victim)"), "returned"),
    },
    "06.queue_key": {
        "priority, then arrival": (KEY + "(priority, arrival)", "starve"),
        "first come, first served": (KEY + "(arrival, priority)", "priority is ignored"),
        "the young first": (KEY + "(priority * ageing - arrival, arrival)", "sign of arrival"),
        "0 last": (KEY + "(arrival - priority * ageing, arrival)", "sign of the priority"),
        "no tie": (KEY + "priority * ageing + arrival", "tie is missing"),
        "tie by priority": (KEY + "(priority * ageing + arrival, priority)", "your tie"),
        "divided": (KEY + "(priority / ageing + arrival, arrival)", "turns it round"),
        "no ageing": (KEY + "(priority + arrival, arrival)", "ageing is ignored"),
        "rounded": (KEY + "(priority + arrival // ageing, arrival)", "rounded down"),
        "floats": (KEY + "(priority + arrival / ageing, arrival)", "division"),
        "a float": (KEY + "(float(priority * ageing + arrival), arrival)", "drops digits"),
        "text of 12 digits": (KEY + "f'{priority * ageing + arrival:012d}-{arrival:012d}'", "expected"),
        "one age for all": (KEY + "(priority * 10 + arrival, arrival)", "expected"),
        "nothing": (KEY + "None", "raised"),
    },
    "06.serve": {
        "the prompt only": ((REFUSE, "            if -(-prompt // block_size) > num_blocks:"), "preempts itself"),
        "the last token too": (
            (REFUSE, "            if -(-(prompt + new) // block_size) > num_blocks:"),
            "never fed back",
        ),
        "not exactly": ((REFUSE, REFUSE.replace("> num_blocks", ">= num_blocks")), "exactly can run"),
        "rounded down": ((REFUSE, "            if (prompt + new - 1) // block_size > num_blocks:"), "rounded up"),
        "tokens against blocks": ((REFUSE, "            if prompt + new - 1 > num_blocks:"), "tokens against blocks"),
        "what is free": ((REFUSE, REFUSE.replace("> num_blocks", "> free")), "free now"),
        "skips instead": (
            (REFUSE, "            if False:"),
            "nobody was refused",
        ),
        "prompts one token longer": (
            (REFUSE, "            if -(-(prompt + 1) // block_size) > num_blocks:"),
            "expected",
        ),
        "refused and queued": (
            (
                "                refused.append(name)\n                continue",
                "                refused.append(name)",
            ),
            "expected",
        ),
        "not reported": (
            ("                refused.append(name)\n                continue", "                continue"),
            "expected",
        ),
        "an error": (
            (
                "                refused.append(name)\n                continue",
                "                raise ValueError(name)",
            ),
            "raised",
        ),
        "the answer cut short": (
            (
                "                refused.append(name)\n                continue",
                "                new = num_blocks * block_size - prompt + 1\n"
                "                if new < 1:\n"
                "                    refused.append(name)\n"
                "                    continue",
            ),
            "cut short",
        ),
        "the head is skipped": ((LOOP, SKIP), "overtake the head"),
    },
    "06.figures": {
        "no decodes in the whole step": (figures(whole_gap_ms="10 + 0.05 * 4096"), "32 tokens"),
        "seconds": (figures(whole_gap_ms="0.2164"), "ms are asked for"),
        "no decodes in the budget": (figures(steps="4096 / 512"), "go to the streams"),
        "not rounded": (figures(steps="4096 / 480"), "round up"),
        "chunk alone": (figures(chunk_gap_ms="10 + 0.05 * 480"), "ride in the same step"),
        "budget beside the streams": (figures(chunk_gap_ms="10 + 0.05 * 544"), "part of the 512"),
        "no streams": (figures(ttft_ms="9 * 10 + 0.05 * 4096"), "in all nine"),
        "no streams in the full steps": (figures(ttft_ms="8 * 34 + 24.4"), "cost time as well"),
        "no streams in the last step": (figures(ttft_ms="8 * 35.6 + 22.8"), "in the last step, too"),
        "8 steps of 544": (figures(ttft_ms="8 * 37.2"), "chunks of 480"),
        "the last step full": (figures(ttft_ms="9 * 35.6"), "last step is smaller"),
        "the last step forgotten": (figures(ttft_ms="8 * 35.6"), "last step is missing"),
        "one forward": (figures(ttft_ms="216.4"), "one forward"),
        "out only": (figures(swap_ms="42.95"), "twice"),
        "FLOP a parameter": (figures(recompute_ms="91.5"), "2 FLOPs"),
        "one token": (figures(recompute_ms="0.0893"), "one token"),
        "one way": (figures(even_gb_s="5.87"), "twice"),
        "GiB": (figures(even_gb_s="10.93"), "more than 0.5 %"),
        "text": (figures(steps="'9'"), "expected a number"),
        "a key short": ("def figures():\n    return {'steps': 9}", "KeyError"),
    },
}
