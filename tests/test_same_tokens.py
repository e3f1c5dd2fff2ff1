"""Same tokens: in float32 and greedy, every technique emits what the naive loop of chapter 1 emits.

A technique joins by adding a value to an axis of OPTIONS and, where needed, a line to `emit`. All pairs of values of
any two axes are covered, by a greedy pairwise cover that is built here.

Two results of the same sum in another order may differ in the last bits, and a near-tie of the two likeliest tokens
can then flip. `assert_same` therefore accepts another token only where the naive logits of the two are within 1e-4
of each other (float32 rounding over these depths is about 1e-5), and says so; from there on the texts may part.
Nothing is padded to a fixed batch size to avoid it: a batch that computes more to round alike would teach the wrong
lesson, and float64 everywhere would test another model than the one that runs.

The engine has a table of options of its own, ENGINE: all its runs go through the packed runner and the paged cache,
and several requests with common beginnings are in flight at once, twice, so that the second time the prefixes are
cached. A quantised KV cache changes the model (QUANTISED): its runs are compared with the contiguous quantised cache,
one request after the other.
"""

import copy
import functools
import itertools
import random

import pytest
import torch

from minillm.cache.contiguous import ConcatCache, ContiguousCache
from minillm.cache.generate import decode, generate_cached
from minillm.cache.quantized import QuantizedCache
from minillm.cache.quantized_paged import paged_format
from minillm.engine.engine import Engine
from minillm.engine.graphs import EagerBackend, GraphRunner
from minillm.engine.options import EngineOptions
from minillm.engine.parallel import STOP, ParallelRunner, follow, send
from minillm.engine.policies import Arrival, run_trace
from minillm.engine.speculation import Speculator
from minillm.kernels import cpp
from minillm.kernels.decoding_reference import paged_attention
from minillm.kernels.launch import interpreted, why_not
from minillm.kernels.layers_cpu import compile_decoder
from minillm.model.compiled import CompiledDecoder
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder, init_weights
from minillm.model.generate import generate_naive
from minillm.model.layout import pack_linears
from minillm.model.sampling import SamplingParams
from minillm.parallel.groups import run_threads
from minillm.parallel.launch import World
from minillm.parallel.tensor import apply_tensor_parallel
from minillm.quant.named import quantize_by_name
from minillm.speculative.adaptive import AdaptiveLength
from minillm.speculative.draft_model import DraftModel
from minillm.speculative.eagle import Eagle, EagleHead
from minillm.speculative.early_exit import first_layers
from minillm.speculative.ngram import NGram
from minillm.speculative.proposer import Draft

OPTIONS = {
    "cache": ["contiguous", "concat"],
    "chunk": ["whole", 1, 3],  # tokens a prefill call
    "layout": ["plain", "packed"],
    "heads": ["mha", "gqa", "mqa"],
    "window": [None, 5],
    "prompt": [1, 2, 17],
    "batch": ["alone", "padded"],
}
ENGINE = {
    "prefix": ["off", "hash", "radix"],
    "batching": ["one by one", "static", "dynamic", "continuous"],
    "chunk": ["whole", 3, 7],  # tokens a step at most
    "first": ["decode", "prefill"],
    "preemption": ["recompute", "swap", "swap, host full"],
    "policy": ["fcfs", "priority"],
    "block": [1, 4, 16],
    "pool": ["roomy", "tight"],
    "layout": ["plain", "packed"],
    "heads": ["mha", "gqa", "mqa"],
    "window": [None, 5],
    "graph": ["off", "replay"],
    "attention": ["sdpa", "naive", "triton", "cpp"],
    "speculation": ["off", "ngram", "int8 copy", "first layers", "adaptive", "tree", "eagle"],
}
QUANTISED = {name: values for name, values in ENGINE.items() if name != "graph"} | {
    "batching": ["one by one", "continuous"],
    "block": [1, 4, 8, 16],
    "attention": ["sdpa", "naive"],
    "kv": ["int8", "fp8", "int4", "int2"],
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


def engine_options(option: dict, longest: int) -> EngineOptions:
    """tight: the pool holds the longest request and one block more, so requests must make way for each other."""
    whole = option["chunk"] == "whole"
    tokens = 64 if whole else option["chunk"]
    blocks = -(-longest // option["block"])
    return EngineOptions(
        max_num_seqs=1 if option["batching"] == "one by one" else min(3, tokens),
        max_num_batched_tokens=tokens,
        enable_chunked_prefill=not whole,
        prefill_first=option["first"] == "prefill",
        enable_prefix_caching=option["prefix"],
        preemption=option["preemption"].split(",")[0],
        num_host_blocks={"swap": blocks * 2, "swap, host full": 1}.get(option["preemption"]),
        policy=option["policy"],
        block_size=option["block"],
        num_blocks=blocks + 1 if option["pool"] == "tight" else 6 * blocks,
        headroom=0,
        attention=option.get("attention", "sdpa"),
        kv_cache_dtype=option.get("kv", "auto"),
    )


def shared_prompts() -> list[list[int]]:
    """Five prompts of 1 to 23 tokens; two begin alike, one is the beginning of another, one comes twice."""
    generator = torch.Generator().manual_seed(4)
    text = torch.randint(1, 211, (40,), generator=generator).tolist()
    return [text[:16], [*text[:16], *text[30:37]], text[20:21], text[:9], text[:16]]


@functools.lru_cache
def expected_texts(heads: str, window: int | None) -> list[list[int]]:
    model = model_of({"heads": heads, "window": window})
    return [generate_naive(model, prompt, NEW_TOKENS) for prompt in shared_prompts()]


def use_the_twins(monkeypatch) -> None:
    """The paged kernels' torch twins in their place: the interpreter would need minutes for all these runs. One run
    with the kernels themselves is `test_the_paged_kernels_emit_the_same_tokens`."""
    from minillm.kernels import paged_attention as kernels

    def store(k, v, keys, values, slots):
        written = slots >= 0
        keys.flatten(0, 1)[slots[written]], values.flatten(0, 1)[slots[written]] = k[written], v[written]

    def attend(*tensors, max_query, max_length, splits=None, **options):
        return paged_attention(*tensors, **options, splits=2, tile=16)

    monkeypatch.setattr(kernels, "store_kv", store)
    monkeypatch.setattr(kernels, "paged_attention", attend)


class Branching:
    """Another proposer's chains with a wrong sibling before each token: trees whose accepted path leaves gaps."""

    wants_hidden = False

    def __init__(self, inner):
        self.inner, self.release, self.observe = inner, inner.release, inner.observe

    def propose(self, contexts):
        return [self.branch(draft.tokens) for draft in self.inner.propose(contexts)]

    @staticmethod
    def branch(chain):
        tokens, parents, trunk = [], [], -1
        for token in chain:
            tokens += [(token + 5) % 211, token]
            parents += [trunk, trunk]
            trunk = len(tokens) - 1
        return Draft(tokens, parents)


def untrained_eagle(model) -> Eagle:
    """It guesses badly, and its trees are wide."""
    head = EagleHead(model.config).to(model.device).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        if parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return Eagle(getattr(model, "model", model), head.eval(), 3, nodes=7)


def speculator(kind: str, model) -> Speculator | None:
    """adaptive: an exact copy, so long as it seems to win; whatever lengths that gives, the tokens are the same."""
    if kind == "off":
        return None
    if kind == "ngram":
        return Speculator(NGram(), 3)
    if kind == "first layers":
        return Speculator(DraftModel(first_layers(getattr(model, "model", model), 2), 3, block_size=4), 3)
    if kind == "eagle":
        return Speculator(untrained_eagle(model), 3)
    heads = {4: "mha", 2: "gqa", 1: "mqa"}[model.config.num_kv_heads]
    draft = model_of({"heads": heads, "window": next(iter(model.config.windows), None)}).to(model.device)
    if kind == "adaptive":
        return Speculator(DraftModel(draft, 3, block_size=4, num_blocks=13), AdaptiveLength(4, pause=3))
    copy = DraftModel(quantize_by_name(draft, "int8"), 3, block_size=4)
    return Speculator(Branching(copy) if kind == "tree" else copy, 4)


def emit_engine(model: Decoder, option: dict, attach=None) -> tuple[list[list[int]], int]:
    """(the tokens of each prompt, twice; preemptions). attach: what is done to the engine before its first step."""
    prompts = shared_prompts()
    options = engine_options(option, max(map(len, prompts)) + NEW_TOKENS - 1)
    if option["batching"] in ("static", "dynamic"):
        trace = [Arrival(0.5 * i, tuple(prompt), NEW_TOKENS) for i, prompt in enumerate(prompts)]
        runs = [run_trace(model, trace, option["batching"], size=3, window=0.6, cost=lambda _: 0.1) for _ in (0, 1)]
        return [output for run in runs for output in run.outputs], 0
    engine = Engine(model, options, eos_ids=(), speculator=speculator(option.get("speculation", "off"), model))
    if option.get("graph") == "replay":  # a graph's contract without CUDA, which also pads 3 requests to 4 rows
        engine.runner = GraphRunner(model, engine.runner.cache, (1, 2, 4), EagerBackend())
        assert engine.runner.why_eager is None
    if attach is not None:
        attach(engine)
    params, groups = SamplingParams(max_tokens=NEW_TOKENS, temperature=0), []
    for _ in range(2):
        groups += [engine.add(prompt, params, priority=len(prompt) % 3) for prompt in prompts]
        while engine.has_work:
            engine.step()
    assert engine.pool.free_count == engine.pool.num_blocks
    done = [engine.completions(group)[0] for group in groups]
    return [c.token_ids for c in done], sum(c.metrics.preemptions for c in done)


@pytest.mark.parametrize("option", pairwise(ENGINE), ids=lambda o: "-".join(str(v) for v in o.values()))
def test_the_engine_emits_the_same_tokens(option, monkeypatch):
    expected = expected_texts(option["heads"], option["window"])
    model = model_of(option)
    if option["attention"] == "triton":
        if why_not() is not None:
            pytest.skip(why_not())
        if interpreted():
            use_the_twins(monkeypatch)
        else:
            model = model.to("cuda")
    if option["attention"] == "cpp" and cpp.why_not(model.dtype, model.device) is not None:
        pytest.skip(cpp.why_not(model.dtype, model.device))
    got, _ = emit_engine(pack_linears(model) if option["layout"] == "packed" else model, option)
    for prompt, tokens, wanted in zip(shared_prompts() * 2, got, expected * 2, strict=True):
        assert_same(model_of(option), prompt, tokens, wanted)


@functools.lru_cache
def compiled_model() -> CompiledDecoder:
    return compile_decoder(model_of({"heads": "gqa", "window": None}))


COMPILED = {name: values for name, values in ENGINE.items() if name not in ("layout", "heads", "window")} | {
    "attention": ["sdpa", "cpp"],  # graphs of torch.compile, or the whole step in one call
}


@pytest.mark.parametrize("option", pairwise(COMPILED), ids=lambda o: "-".join(str(v) for v in o.values()))
def test_the_engine_emits_the_same_tokens_compiled(option):
    """One model for all options: its three graphs are made once, and must hold for every shape that comes."""
    option = option | {"heads": "gqa", "window": None, "layout": "packed"}
    fast = compiled_model()
    if option["attention"] == "cpp" and cpp.why_not(fast.dtype, fast.device) is not None:
        pytest.skip(cpp.why_not(fast.dtype, fast.device))
    got, _ = emit_engine(fast, option)
    if fast.why_eager is not None:
        pytest.skip(fast.why_eager)
    for prompt, tokens, wanted in zip(shared_prompts() * 2, got, expected_texts("gqa", None) * 2, strict=True):
        assert_same(model_of(option), prompt, tokens, wanted)


# Drafts by the first layers of the target are left out: on several ranks its layers run on all or on none.
RANKS = {name: values for name, values in ENGINE.items() if name not in ("graph", "attention")} | {
    "batching": ["one by one", "continuous"],
    "speculation": [
        "off",
        "ngram",
        "int8 copy",
        "adaptive",
        "tree",
    ],
    "ranks": [2, 4],
}


@pytest.mark.parametrize("option", pairwise(RANKS), ids=lambda o: "-".join(str(v) for v in o.values()))
def test_the_engine_emits_the_same_tokens_on_several_ranks(option):
    """Rank 0 schedules, the others follow its plans. With 4 ranks, heads of "gqa" and "mqa" are kept more than once.
    Ranks are threads here; tests/test_parallel_engine.py starts processes."""
    whole, told = model_of(option), []

    def rank_main(group):
        model = apply_tensor_parallel(copy.deepcopy(whole), group)
        model = pack_linears(model) if option["layout"] == "packed" else model
        world = World(group, group, torch.device("cpu"))
        if group.rank() > 0:
            return follow(model, world)

        def attach(engine):
            told.append(engine)
            assert not group.sent
            engine.runner = ParallelRunner(model, engine.runner.cache, world)

        got, _ = emit_engine(model, option, attach)
        send(STOP, [], world)
        return got

    got = run_threads(rank_main, option["ranks"])[0]
    assert len(told) == 1, "one rank alone has an engine"
    expected = expected_texts(option["heads"], option["window"])
    for prompt, tokens, wanted in zip(shared_prompts() * 2, got, expected * 2, strict=True):
        assert_same(whole, prompt, tokens, wanted)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_paged_kernels_emit_the_same_tokens():
    """Two requests, a prompt in two chunks, five new tokens: every step through Triton."""
    model, prompts = model_of({"heads": "gqa", "window": 5}), shared_prompts()[2:4]
    options = EngineOptions(block_size=4, num_blocks=12, max_num_batched_tokens=7, max_num_seqs=2, attention="triton")
    engine = Engine(copy.deepcopy(model).to("cpu" if interpreted() else "cuda"), options, eos_ids=())
    groups = [engine.add(prompt, SamplingParams(max_tokens=5, temperature=0)) for prompt in prompts]
    while engine.has_work:
        engine.step()
    for prompt, group in zip(prompts, groups):
        assert_same(model, prompt, group.requests[0].output, generate_naive(model, prompt, 5))


def quantised_cache(model: Decoder, option: dict) -> QuantizedCache:
    return QuantizedCache(model.config, 1, 64, paged_format(option["kv"], option["block"]))


def assert_same_quantised(model: Decoder, option: dict, prompt: list[int], got: list[int]) -> None:
    """As `assert_same`, beside the contiguous quantised cache. A K or V at the border of two codes may be rounded up
    here and down there, which moves logits by more than float32's rounding: hence the wider gap."""
    expected = generate_cached(model, prompt, NEW_TOKENS, cache=quantised_cache(model, option))
    assert len(got) == len(expected)
    for i, (a, b) in enumerate(zip(got, expected)):
        if a != b:
            with torch.inference_mode():
                text = torch.tensor([[*prompt, *expected[:i]]])
                logits = model(text, cache=quantised_cache(model, option))[0, -1]
            gap = (logits[b] - logits[a]).item()
            assert gap < 1e-3, f"token {i} is {a}, the contiguous cache says {b}, and they are {gap:.2e} apart"
            return


@pytest.mark.parametrize("option", pairwise(QUANTISED), ids=lambda o: "-".join(str(v) for v in o.values()))
def test_the_quantised_engine_emits_what_the_quantised_model_emits(option):
    model = model_of(option)
    got, _ = emit_engine(pack_linears(model_of(option)) if option["layout"] == "packed" else model, option)
    for prompt, tokens in zip(shared_prompts() * 2, got, strict=True):
        assert_same_quantised(model, option, prompt, tokens)


def test_fewer_bits_change_the_text():
    """Else the test above would prove nothing: 2 bits emit other tokens, 8 bits hardly any."""
    model, base = model_of({"heads": "gqa", "window": None}), {"block": 4}
    changed = {
        kv: sum(
            a != b
            for prompt, wanted in zip(shared_prompts(), expected_texts("gqa", None))
            for a, b in zip(
                generate_cached(model, prompt, NEW_TOKENS, cache=quantised_cache(model, base | {"kv": kv})), wanted
            )
        )
        for kv in QUANTISED["kv"]
    }
    assert changed["int2"] > 10 and changed["int2"] > changed["int8"]


def test_the_tight_pool_preempts():
    base = {name: values[0] for name, values in ENGINE.items()} | {
        "batching": "continuous",
        "pool": "tight",
        "block": 4,
    }
    for preemption in ENGINE["preemption"]:
        assert emit_engine(model_of(base), base | {"preemption": preemption})[1] > 0
    assert emit_engine(model_of(base), base | {"pool": "roomy"})[1] == 0


@pytest.mark.parametrize("options", [OPTIONS, ENGINE, QUANTISED])
def test_the_cover_covers_every_pair(options):
    cover = pairwise(options)
    for a, b in itertools.combinations(options, 2):
        seen = {(c[a], c[b]) for c in cover}
        assert seen == set(itertools.product(options[a], options[b]))


def test_a_wrong_token_is_noticed():
    model = model_of({"heads": "gqa", "window": None})
    expected = generate_naive(model, [5, 6], 4)
    wrong = [*expected[:2], (expected[2] + 1) % 211, expected[3]]
    with pytest.raises(AssertionError, match="token 2"):
        assert_same(model, [5, 6], wrong, expected)
