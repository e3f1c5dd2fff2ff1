"""Benchmarks with peers: the same weights, the same requests, one run, in alternation.

`minillm bench NAME [--json]`. Chapter 02's is `decode`: one forward a token from a warm cache, beside Hugging Face
transformers' `generate`. Each benchmark checks values before it times, and returns records; it prints nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch

from minillm.cache.contiguous import ContiguousCache
from minillm.cache.generate import decode, prefill
from minillm.errors import ParamsError
from minillm.kernels.layers_cpu import compile_decoder
from minillm.measure.clock import Paired, paired
from minillm.measure.counts import forward_counts
from minillm.measure.machine import ceilings
from minillm.measure.records import Figure, figure
from minillm.model.compiled import CompiledDecoder
from minillm.model.decoder import Decoder
from minillm.model.export import hf_weights
from minillm.model.hub import is_available
from minillm.model.layout import pack_linears
from minillm.model.weights import load_model


class NotMeasured(Exception):
    """The benchmark cannot run here; the message says what is missing."""


def bench_decode(
    model: str = "smollm2-135m",
    batches: tuple[int, ...] = (1, 8),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    prompt: int = 64,
    tokens: int = 32,
    repeats: int = 5,
) -> Iterator[Figure]:
    """Decode tokens/s against transformers' `generate`, and the share of the measured read bandwidth; packed weights,
    and, where there is a compiler for it, the compiled step of chapter 10."""
    if not is_available(model):
        raise NotMeasured(f"{model} is not on this machine: run minillm pull {model}")
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise NotMeasured("transformers is not installed: pip install -e '.[dev]'") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    roof = ceilings(device)
    yield figure("machine.read_bandwidth", roof.read_bandwidth, "B/s", workload={"threads": roof.threads})
    for dtype in dtypes:
        ours = load_model(model, dtype=dtype, device=device)
        theirs = as_transformers(ours)
        tolerance = 1e-4 if dtype == "float32" else 0.1
        check_same_logits(ours, theirs, tolerance)
        compiled = compile_decoder(copy.deepcopy(ours))
        runs = {f"decode.{dtype}": pack_linears(ours)}
        if compiled.why_eager is None:
            runs[f"decode.compiled.{dtype}"] = compiled
        for batch in batches:
            for prefix, decoder in runs.items():
                yield from _decode_figures(
                    f"{prefix}.batch{batch}",
                    model,
                    decoder,
                    theirs,
                    dtype,
                    batch,
                    prompt,
                    tokens,
                    repeats,
                    roof.read_bandwidth,
                )
        for rows, seconds in compiled.compile_seconds.items():
            name = f"decode.compiled.{dtype}.compile_seconds.{rows or 'more'}_rows"
            yield figure(name, seconds, "s", model=model, workload={"dtype": dtype})


def _decode_figures(prefix, name, ours, theirs, dtype, batch, prompt, tokens, repeats, bandwidth) -> Iterator[Figure]:
    workload = {
        "dtype": dtype,
        "batch": batch,
        "prompt": prompt,
        "tokens": tokens,
        "threads": torch.get_num_threads(),
    }
    result, steps = decode_pair(ours, theirs, batch, prompt, tokens, repeats)
    middle = prompt + tokens // 2
    counts = forward_counts(ours.config, 1, middle, batch, dtype_bytes=ours.dtype.itemsize)
    rate, peer = (batch * steps / timing.median for timing in (result.b, result.a))
    moved = counts.total_bytes / (result.b.median / steps)
    yield figure(f"{prefix}.rate", rate, "tokens/s", model=name, workload=workload)
    yield figure(f"{prefix}.transformers", peer, "tokens/s", model=name, workload=workload)
    ratio = result.ratio
    yield figure(f"{prefix}.ratio", ratio.median, "x", spread=ratio.quartiles, model=name, workload=workload)
    yield figure(f"{prefix}.bandwidth_share", moved / bandwidth, "1", model=name, workload=workload)


def decode_pair(
    ours: Decoder | CompiledDecoder, theirs, batch: int, prompt: int, tokens: int, repeats: int
) -> tuple[Paired, int]:
    """(timings of theirs as a and ours as b, decode steps in one timing). Prefill is outside ours and theirs: each
    run of transformers is a generate of `tokens` new tokens less one of a single token, measured in the same pair."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, ours.config.vocab_size, (batch, prompt), generator=generator).to(ours.device)
    cache = ContiguousCache(ours.config, batch, prompt + tokens, ours.dtype, ours.device)
    first = prefill(ours, ids, cache).argmax(-1)  # [batch]

    def run_ours() -> None:
        cache.truncate(prompt)
        token = first
        for _ in range(tokens - 1):
            token = decode(ours, token, cache).argmax(-1)
        token.tolist()

    mask = torch.ones_like(ids)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": mask}

    def run_theirs(count: int = tokens) -> None:
        with torch.inference_mode():
            theirs.generate(ids, max_new_tokens=count, **options).tolist()

    whole = paired(run_theirs, run_ours, repeats, warmup=1)
    start = paired(lambda: run_theirs(1), lambda: None, repeats, warmup=1).a.median
    a = type(whole.a)(tuple(max(s - start, 1e-9) for s in whole.a.samples))
    return Paired(a, whole.b), tokens - 1


def as_transformers(model: Decoder):
    """The same weights as a transformers LlamaForCausalLM: the peer, and an outside oracle. Llama type only."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    if c.family != "llama" or c.rope_scaling.kind != "default":
        raise ParamsError(f"family={c.family!r}: as_transformers covers plain Llama-type models only")
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            max_position_embeddings=c.max_length,
            rms_norm_eps=c.norm_eps,
            rope_theta=c.rope_theta,
            tie_word_embeddings=c.tie_embeddings,
        )
    ).to(dtype=model.dtype, device=model.device)
    theirs.load_state_dict(hf_weights(model) | {"lm_head.weight": model.head.weight})
    return theirs.eval().requires_grad_(False)


@torch.inference_mode()
def check_same_logits(ours: Decoder, theirs, tolerance: float) -> float:
    """Root mean square of the difference of the logits of 32 tokens, over that of the logits; raises above tolerance.

    (In bfloat16 both are a few per cent off their own float32 run, each in its own direction.)
    """
    ids = torch.randint(5, ours.config.vocab_size, (1, 32), generator=torch.Generator().manual_seed(1)).to(
        ours.device
    )
    expected = theirs(ids).logits.float()
    error = ((ours(ids).float() - expected).square().mean() / expected.square().mean()).sqrt().item()
    if not error <= tolerance:
        raise RuntimeError(f"logits differ from transformers' by {error:.2e} of their size (limit {tolerance})")
    return error


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {"decode": bench_decode}
