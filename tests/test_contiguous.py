"""The caches refuse what they would otherwise broadcast, cast or misread, before anything is stored."""

import pytest
import torch

from minillm.cache.contiguous import ConcatCache, ContiguousCache
from minillm.cache.generate import generate_cached, prefill
from minillm.errors import ParamsError, PromptError
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder, init_weights
from minillm.model.generate import generate_naive

CONFIG = ModelConfig(50, 32, 48, 2, 4, 2, 8, 64)


def filled(batch: int = 2) -> ContiguousCache:
    cache = ContiguousCache(CONFIG, batch, 8)
    prefill(MODEL, torch.ones(batch, 4, dtype=torch.long), cache)
    return cache


MODEL = init_weights(Decoder(CONFIG)).eval()
BAD = {
    "a bool for a size": (lambda: ContiguousCache(CONFIG, True, 8), "batch=True"),
    "more than the machine has": (lambda: ContiguousCache(CONFIG, 1, 10**13), "takes .* GB"),
    "sizes beyond 64 bits": (lambda: ContiguousCache(CONFIG, 10**12, 10**12), "takes .* GB"),
    "padding of another batch": (lambda: ContiguousCache(CONFIG, 2, 8, padding=torch.tensor([1])), "padding="),
    "padding in a list": (lambda: ContiguousCache(CONFIG, 2, 8, padding=[1, 0]), "padding="),
    "padding below zero": (lambda: ContiguousCache(CONFIG, 2, 8, padding=torch.tensor([-1, 0])), "padding="),
    "padding that fills a row": (lambda: ContiguousCache(CONFIG, 2, 8, padding=torch.tensor([8, 0])), "padding="),
    "one row into four": (lambda: prefill(MODEL, torch.ones(1, 4).long(), ContiguousCache(CONFIG, 4, 8)), "4 rows"),
    "no batch into four": (lambda: MODEL(torch.ones(4).long(), cache=ContiguousCache(CONFIG, 4, 8)), "4 rows"),
    "another type": (
        lambda: prefill(MODEL, torch.ones(1, 4).long(), ContiguousCache(CONFIG, 1, 8, torch.bfloat16)),
        "bfloat16",
    ),
    "a mask for rows": (lambda: filled().keep([True, False]), "rows="),
    "no rows": (lambda: filled().keep([]), "rows="),
    "a row that is not there": (lambda: filled().keep([2]), "rows="),
    "half a token": (lambda: filled().truncate(1.5), "length=1.5"),
    "a used cache": (lambda: generate_cached(MODEL, [1, 2], 3, cache=filled(1)), "must be empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_clear_error(name):
    call, message = BAD[name]
    with pytest.raises(PromptError, match=message):
        call()


def test_concat_refuses_another_batch():
    cache = ConcatCache()
    prefill(MODEL, torch.ones(2, 4).long(), cache)
    with pytest.raises(PromptError, match="behind it"):
        prefill(MODEL, torch.ones(1, 4).long(), cache)


@pytest.mark.parametrize("count", [-1, 1.5, None, "3", True])
@pytest.mark.parametrize("generate", [generate_naive, generate_cached])
def test_a_bad_count_is_one_clear_error(generate, count):
    with pytest.raises(ParamsError, match="max_tokens="):
        generate(MODEL, [1, 2], count)


def test_a_shape_on_meta_may_be_larger_than_the_machine():
    assert ContiguousCache(CONFIG, 1, 10**13, device="meta").nbytes == 2 * 2 * 2 * 8 * 10**13 * 4
