"""Same tokens: in float32 and greedy, every technique emits what the naive loop of chapter 1 emits.

A technique joins by adding a value to an axis of OPTIONS and, where needed, a line to `emit`. All pairs of values of
any two axes are covered, by a greedy pairwise cover that is built here.

Two results of the same sum in another order may differ in the last bits, and a near-tie of the two likeliest tokens
can then flip. `assert_same` therefore accepts another token only where the naive logits of the two are within 1e-4
of each other (float32 rounding over these depths is about 1e-5), and says so; from there on the texts may part.
"""

import itertools
import random

import pytest
import torch

from minillm.cache.contiguous import ConcatCache, ContiguousCache
from minillm.cache.generate import decode, generate_cached
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder, init_weights
from minillm.model.generate import generate_naive
from minillm.model.layout import pack_linears

OPTIONS = {
    "cache": ["contiguous", "concat"],
    "chunk": ["whole", 1, 3],  # tokens a prefill call
    "layout": ["plain", "packed"],
    "heads": ["mha", "gqa", "mqa"],
    "window": [None, 5],
    "prompt": [1, 2, 17],
    "batch": ["alone", "padded"],
}
NEW_TOKENS = 12


def pairwise(options: dict[str, list]) -> list[dict]:
    """A short list of combinations in which every pair of values of two axes occurs."""
    names = list(options)
    pairs = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in options[a] for y in options[b]}
    rng, cover = random.Random(0), []
    while pairs:
        best = max(
            ({name: rng.choice(values) for name, values in options.items()} for _ in range(60)),
            key=lambda c: sum(c[a] == x and c[b] == y for a, x, b, y in pairs),
        )
        gained = {p for p in pairs if best[p[0]] == p[1] and best[p[2]] == p[3]}
        if gained:
            pairs -= gained
            cover.append(best)
    return cover


def model_of(option: dict) -> Decoder:
    kv_heads = {"mha": 4, "gqa": 2, "mqa": 1}[option["heads"]]
    config = ModelConfig(
        vocab_size=211,
        hidden_size=48,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=kv_heads,
        head_dim=16,
        max_length=64,
        windows=(option["window"], None, option["window"]) if option["window"] else (),
    )
    model = init_weights(Decoder(config), seed=kv_heads).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(6)  # spread the logits: an untrained model is all near-ties
    return model


def emit(model: Decoder, prompt: list[int], option: dict) -> list[int]:
    if option["layout"] == "packed":
        model = pack_linears(model)
    if option["batch"] == "padded":
        return emit_padded(model, prompt, option)
    cache = (
        ConcatCache() if option["cache"] == "concat" else ContiguousCache(model.config, 1, len(prompt) + NEW_TOKENS)
    )
    if option["chunk"] == "whole":
        return generate_cached(model, prompt, NEW_TOKENS, cache=cache)
    head = (len(prompt) - 1) // option["chunk"] * option["chunk"]
    for start in range(0, head, option["chunk"]):
        with torch.inference_mode():
            model.hidden(torch.tensor([prompt[start : start + option["chunk"]]]), cache=cache)
    return continue_from(model, prompt, head, cache)


def continue_from(model: Decoder, prompt: list[int], done: int, cache) -> list[int]:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt[done:]]), cache=cache)[:, -1]
        tokens = [logits.argmax(-1)]
        while len(tokens) < NEW_TOKENS:
            tokens.append(decode(model, tokens[-1], cache).argmax(-1))
    return torch.cat(tokens).tolist()


def emit_padded(model: Decoder, prompt: list[int], option: dict) -> list[int]:
    """The prompt as the shorter row of a batch of two (padding is a feature of the contiguous cache)."""
    other = [7, *prompt, 9, 11, 5]
    longest = len(other)
    padding = torch.tensor([longest - len(prompt), 0])
    rows = torch.tensor([[0] * (longest - len(prompt)) + prompt, other])
    cache = ContiguousCache(model.config, 2, longest + NEW_TOKENS, padding=padding)
    step = longest if option["chunk"] == "whole" else option["chunk"]
    with torch.inference_mode():
        for start in range(0, longest, step):
            logits = model(rows[:, start : start + step], cache=cache)[:, -1]
        tokens = [logits.argmax(-1)]
        while len(tokens) < NEW_TOKENS:
            tokens.append(decode(model, tokens[-1], cache).argmax(-1))
    return torch.stack(tokens)[:, 0].tolist()


def assert_same(model: Decoder, prompt: list[int], got: list[int], expected: list[int]) -> None:
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected)):
        if a != b:
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *expected[:i]]]))[0, -1]
            gap = (logits[b] - logits[a]).item()
            assert gap < 1e-4, f"token {i} is {a}, the naive loop says {b}, and they are {gap:.2e} apart"
            return


@pytest.mark.parametrize("option", pairwise(OPTIONS), ids=lambda o: "-".join(str(v) for v in o.values()))
def test_same_tokens(option):
    model = model_of(option)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(1, 211, (option["prompt"],), generator=generator).tolist()
    expected = generate_naive(model, prompt, NEW_TOKENS)
    assert len(set(expected)) > 2, "a constant text would prove nothing"
    assert_same(model_of(option), prompt, emit(model, prompt, option), expected)


def test_the_cover_covers_every_pair():
    cover = pairwise(OPTIONS)
    for a, b in itertools.combinations(OPTIONS, 2):
        seen = {(c[a], c[b]) for c in cover}
        assert seen == set(itertools.product(OPTIONS[a], OPTIONS[b]))


def test_a_wrong_token_is_noticed():
    model = model_of({"heads": "gqa", "window": None})
    expected = generate_naive(model, [5, 6], 4)
    wrong = [*expected[:2], (expected[2] + 1) % 211, expected[3]]
    with pytest.raises(AssertionError, match="token 2"):
        assert_same(model, [5, 6], wrong, expected)
