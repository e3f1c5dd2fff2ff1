"""`minillm bench speculative`: tokens/s with drafts against the same engine without, proposer by proposer.

Chapter 16. Same weights, same requests, in alternation; greedy tokens are compared before anything is timed. Five
questions: what each proposer gives at batch 1, greedy and sampled; how the gain fades as the batch grows; whether the
adaptive length loses where drafts rarely pay, a batch that goes on with a novel nobody was trained on; what prompt
lookup gives a real model where the answer copies its prompt; and what it gives in a chat, beside the heads that were
trained for that model, if there are any here (`python -m minillm.speculative.train`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from minillm.engine.engine import Engine
from minillm.engine.options import EngineOptions
from minillm.engine.speculation import SpeculationStats, Speculator
from minillm.measure.bench import NotMeasured
from minillm.measure.clock import paired
from minillm.measure.ladder import agreement
from minillm.measure.records import Figure, figure
from minillm.model.hub import ASSETS, is_available
from minillm.model.layout import pack_linears
from minillm.model.sampling import SamplingParams
from minillm.model.tokenizer import Tokenizer, load_tokenizer
from minillm.model.weights import load_model
from minillm.speculative.heads import heads_path
from minillm.speculative.make import make_lengths, make_proposer
from minillm.speculative.options import WITH_HEADS, SpeculativeOptions

PREDICTABLE = (  # the beginnings of texts that repeat themselves, as the books of `tiny` do
    "And Enosh lived ninety years, and became the father of Kenan. Enosh lived after he became the father of Kenan",
    "The sons of Reuben; their generations, by their families, by their fathers' houses, from twenty years old and",
    "Praise him, sun and moon! Praise him, all you shining stars! Praise him, you heavens of heavens! Praise him",
    "Give thanks to the God of gods; for his loving kindness endures forever. Give thanks to the Lord of lords; for",
)
COPY = (
    "The ship left the harbour at six in the morning with a cargo of salt, rope and forty barrels of oil. Its "
    "captain, a quiet man from Bristol, had made the same journey eleven times and expected no trouble "
    "before the islands."
)
CHAT = (
    "What is the capital of France, and what is it known for?",
    "Give me three tips for learning to cook.",
    "Explain in simple words why the sky is blue.",
)
PROPOSERS = ("ngram", "tiny-draft", "tiny-distilled", "self-int8", "self-int4", "exit-3", "medusa", "eagle")


FLOOR_BATCH = 8  # requests at which drafts rarely pay on a CPU


def bench_speculative(
    model: str = "tiny",
    proposers: tuple[str, ...] = PROPOSERS,
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0),
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
    real: str = "smollm2-135m",
    tokens: int = 96,
    repeats: int = 5,
    smoke: bool = False,
) -> Iterator[Figure]:
    """speculative.MODEL.PROPOSER.tT.ratio, .acceptance, .tokens_per_call; .adaptive.ratio, .batch8.adaptive.ratio;
    speculative.MODEL.batchN.ratio; speculative.REAL.copy.ratio, .tokens_per_call; speculative.REAL.chat.PROPOSER.
    ratio, .acceptance, .tokens_per_call, .adaptive.ratio."""
    if smoke:
        proposers, temperatures, batches, tokens, repeats = ("ngram", "tiny-draft"), (0.0,), (1, 2), 12, 1
    target = pack_linears(load_model(model))
    encode = load_tokenizer(model).encode
    prompts = [encode(text) for text in PREDICTABLE]
    for method in proposers:
        for temperature in temperatures:
            options = SpeculativeOptions(method, num_tokens=4, adaptive=False)
            prefix = f"speculative.{model}.{method}.t{temperature:g}"
            yield from compare(prefix, model, target, options, prompts, 1, tokens, repeats, temperature)
        options = SpeculativeOptions(method, num_tokens=8)
        prefix = f"speculative.{model}.{method}.adaptive"
        yield from compare(prefix, model, target, options, prompts, 1, tokens, repeats, 0.0)
    for batch in batches:
        options = SpeculativeOptions("ngram", num_tokens=8, adaptive=False)
        some = [prompts[i % len(prompts)] for i in range(max(batch, len(prompts)))]
        prefix = f"speculative.{model}.batch{batch}"
        yield from compare(prefix, model, target, options, some, batch, tokens, repeats, 0.0)
    novel = encode((ASSETS / "heldout.txt").read_text(encoding="utf-8")[: 500 * FLOOR_BATCH])
    some = [novel[100 * i : 100 * i + 16 + 8 * i] for i in range(FLOOR_BATCH)]
    for method in proposers:
        options = SpeculativeOptions(method, num_tokens=8)
        prefix = f"speculative.{model}.{method}.batch{FLOOR_BATCH}.adaptive"
        yield from compare(prefix, model, target, options, some, FLOOR_BATCH, tokens, repeats, 0.0)
    if smoke:
        return
    if not is_available(real):
        raise NotMeasured(f"{real} is not on this machine: run minillm pull {real}")
    target, tokenizer = pack_linears(load_model(real)), load_tokenizer(real)
    prompts = [ask(tokenizer, f"Repeat this text, word for word:\n\n{COPY}")]
    options = SpeculativeOptions("ngram", num_tokens=8)
    yield from compare(f"speculative.{real}.copy", real, target, options, prompts, 1, 56, repeats, 0.0)
    prompts = [ask(tokenizer, question) for question in CHAT]
    tree = target.device.type != "cpu"  # a CPU's forward over a tree of 12 costs several steps
    for method in ("ngram", *(kind for kind in WITH_HEADS if heads_path(real, kind).is_file())):
        for name, adaptive in (("", False), (".adaptive", True)):
            options = SpeculativeOptions(method, num_tokens=2, adaptive=adaptive, tree=tree)
            prefix = f"speculative.{real}.chat.{method}{name}"
            yield from compare(prefix, real, target, options, prompts, 1, 48, repeats, 0.0)


def ask(tokenizer: Tokenizer, question: str) -> list[int]:
    text = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def compare(prefix, name, target, options, prompts, batch, tokens, repeats, temperature) -> Iterator[Figure]:
    """Figures of one proposer against plain decoding, on one target."""
    plain, fast = make_engine(target, batch), make_engine(target, batch, name, options)
    params = [SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True, seed=i) for i in range(4)]
    texts = [run(engine, prompts, params) for engine in (plain, fast)]  # both warm up
    if temperature == 0 and target.dtype == torch.float32 and agreement(*texts) < 0.9:  # near-ties may differ
        raise RuntimeError(f"{prefix}: with drafts the engine says something else")
    fast.speculator.stats = SpeculationStats()
    timing = paired(lambda: run(plain, prompts, params), lambda: run(fast, prompts, params), repeats, warmup=0)
    about = {"proposer": options.method, "num_tokens": options.num_tokens, "adaptive": options.adaptive}
    about |= {"batch": batch, "tokens": tokens, "temperature": temperature, "threads": torch.get_num_threads()}
    stats, ratio = fast.speculator.stats, timing.ratio
    yield figure(f"{prefix}.ratio", ratio.median, "x", spread=ratio.quartiles, model=name, workload=about)
    yield figure(f"{prefix}.acceptance", stats.acceptance, "1", model=name, workload=about)
    yield figure(f"{prefix}.tokens_per_call", stats.tokens_per_call, "tokens", model=name, workload=about)


def make_engine(target, batch: int, name: str = "", options: SpeculativeOptions | None = None) -> Engine:
    speculator = None
    if options is not None:
        speculator = Speculator(make_proposer(options, name, target, None, batch), make_lengths(options))
    blocks = batch * -(-target.config.max_length // 16) if target.config.max_length <= 1024 else batch * 64
    engine_options = EngineOptions(max_num_seqs=batch, max_num_batched_tokens=512, num_blocks=blocks)
    return Engine(target, engine_options, eos_ids=(), speculator=speculator)


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    groups = [engine.add(prompt, params[i % len(params)]) for i, prompt in enumerate(prompts)]
    while engine.has_work:
        engine.step()
    return [group.requests[0].output for group in groups]


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {"speculative": bench_speculative}
