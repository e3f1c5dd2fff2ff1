"""Decode with fewer bits: our float32, INT8 and INT4 in alternation, and llama.cpp on blocks of the same width.

`minillm bench quantized`, chapter 11; each also with chapter 10's compiled step. Values come first: the fast kernels'
logits against the same integers unpacked into float32. Then bytes against their formula, tokens/s, and the share of
the read bandwidth that the weights alone account for. The peer is llama.cpp through `xllamacpp` (not a dependency:
install it by hand to see it measured); it times its own decode loop, and reads Q8_0 and Q4_1 files made from the same
weights.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import nn

from minillm.cache.contiguous import ContiguousCache
from minillm.cache.generate import decode, prefill
from minillm.measure.bench import NotMeasured
from minillm.measure.clock import Timing, paired, timed
from minillm.measure.machine import ceilings
from minillm.measure.records import Figure, figure
from minillm.model.compiled import CompiledDecoder
from minillm.model.decoder import Decoder
from minillm.model.hub import is_available, resolve
from minillm.model.layout import pack_linears
from minillm.model.weights import load_model
from minillm.quant.affine import Scheme, quantize
from minillm.quant.linear import as_module, model_bytes
from minillm.quant.named import NAMED, quantize_by_name

PEER_FORMATS = {"int8": "Q8_0", "int4": "Q4_1"}


def bench_quantized(
    model: str = "smollm2-135m",
    schemes: tuple[str, ...] = ("int8", "int4"),
    prompt: int = 64,
    tokens: int = 32,
    repeats: int = 5,
    smoke: bool = False,
) -> Iterator[Figure]:
    """Batch 1. Figures quantized.NAME.rate, .ratio (over our float32), .bytes, .bandwidth_share, .llama_cpp; on a GPU
    those of the kernels alone before them, which need no model. smoke: the shipped model, two tokens."""
    if smoke:
        model, prompt, tokens, repeats = "tiny", 8, 2, 1
    elif torch.cuda.is_available():
        yield from kernel_figures(torch.device("cuda"), ceilings("cuda").read_bandwidth)
    if not is_available(model):
        raise NotMeasured(f"{model} is not on this machine: run minillm pull {model}")
    yield from decode_figures(model, schemes, prompt, tokens, repeats)


def decode_figures(name, schemes, prompt, tokens, repeats) -> Iterator[Figure]:
    plain = pack_linears(load_model(name))
    roof = ceilings(plain.device)
    base = step(plain, prompt, tokens)
    for scheme in schemes:
        small = quantize_by_name(load_model(name), scheme)
        error = logit_error(small, quantize_by_name(load_model(name), scheme, kernel="unpack"))
        if not error <= 0.05:
            raise RuntimeError(f"{scheme}: the fast kernels' logits differ from the unpacked ones' by {error:.1%}")
        held, read = model_bytes(small), weights_read(small)
        expected = formula_bytes(plain, scheme)
        if held != expected:
            raise RuntimeError(f"{scheme}: the model holds {held} bytes, the formula says {expected}")
        timing = paired(base, step(small, prompt, tokens), repeats, warmup=1)
        workload = {"prompt": prompt, "tokens": tokens, "batch": 1, "threads": torch.get_num_threads()}

        def row(what, value, unit, spread=None, scheme=scheme, workload=workload):
            return figure(f"quantized.{scheme}.{what}", value, unit, spread=spread, model=name, workload=workload)

        rate = tokens / timing.b.median
        yield row("rate", rate, "tokens/s")
        yield row("float32", tokens / timing.a.median, "tokens/s")
        yield row("ratio", timing.ratio.median, "x", timing.ratio.quartiles)
        yield row("bytes", held, "B")
        yield row("bandwidth_share", read * rate / roof.read_bandwidth, "1")
        compiled = CompiledDecoder(small)
        if compiled.why_eager is None:
            timing = paired(base, step(compiled, prompt, tokens), repeats, warmup=1)
            rate = tokens / timing.b.median
            yield row("compiled.rate", rate, "tokens/s")
            yield row("compiled.ratio", timing.ratio.median, "x", timing.ratio.quartiles)
            yield row("compiled.bandwidth_share", read * rate / roof.read_bandwidth, "1")
        peer = llama_cpp_rate(name, PEER_FORMATS.get(scheme), prompt, tokens, repeats)
        if peer is not None:
            yield row("llama_cpp", peer.median, "tokens/s", peer.quartiles)
            yield row("over_llama_cpp", rate / peer.median, "x")


def kernel_figures(
    device: torch.device,
    bandwidth: float,
    shapes: Iterable[tuple[int, int]] = ((4096, 4096), (22016, 4096), (4096, 11008)),
    rows: Iterable[int] = (1, 16),
    touched: float = 256e6,
) -> Iterator[Figure]:
    """Our Triton products alone, on LLaMA-7B's matrices (out, in): share of the bandwidth, bytes of weights / time.

    touched: bytes of different matrices that one timing goes through, so that none of them waits in a cache."""
    for bits, group in ((8, None), (4, 128), (4, 32)):
        scheme = Scheme(bits, True, "channel" if group is None else "group", group)
        for outputs, inputs in shapes:
            weight = torch.randn(outputs, inputs, device=device)
            q = quantize(weight, scheme)
            first = as_module(q, kernel="triton")
            copies = [first, *(copy.deepcopy(first) for _ in range(int(touched // model_bytes(first))))]
            for n in rows:
                x = torch.randn(n, inputs, device=device, dtype=torch.bfloat16)
                expected = x.float() @ q.dequantize().T
                if not (first(x) - expected).abs().max() <= 0.02 * expected.abs().max():
                    raise RuntimeError(f"{bits} bits, {outputs} x {inputs}: the kernel is wrong, so it is not timed")
                timing = timed(lambda: [m(x) for m in copies], 10, 2, cuda_events=device.type == "cuda")  # noqa: B023
                share = len(copies) * model_bytes(first) / timing.median / bandwidth
                workload = {"rows": n, "out": outputs, "in": inputs, "group": group}
                yield figure(f"quantized.kernel.int{bits}.bandwidth_share", share, "1", workload=workload)


def step(model: Decoder, prompt: int, tokens: int) -> Callable[[], None]:
    """A function that decodes `tokens` tokens after a prompt that is in the cache already."""
    ids = torch.randint(5, model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0))
    cache = ContiguousCache(model.config, 1, prompt + tokens, model.dtype, model.device)
    first = prefill(model, ids.to(model.device), cache).argmax(-1)  # [1]

    def run() -> None:
        cache.truncate(prompt)
        token = first
        for _ in range(tokens):
            token = decode(model, token, cache).argmax(-1)
        token.tolist()

    return run


@torch.inference_mode()
def logit_error(model: Decoder, reference: Decoder) -> float:
    """Root mean square of the difference, over that of the reference's logits, on 32 tokens."""
    ids = torch.randint(5, model.config.vocab_size, (1, 32), generator=torch.Generator().manual_seed(1))
    got, expected = (m(ids.to(m.device)).float() for m in (model, reference))
    return ((got - expected).square().mean() / expected.square().mean()).sqrt().item()


def weights_read(model: nn.Module) -> int:
    """Bytes of everything but the embedding, of which one row is read: what each decoded token moves."""
    return model_bytes(model) - model.embed.weight.nbytes


def formula_bytes(plain: Decoder, scheme: str) -> int:
    """Bytes of a model under a name of `quant.named`, from the shapes: codes, 2 bytes a scale (4 with the offset that
    the CPU's 4-bit kernel wants, and in float32 for products of 8 bits), the embedding and the norms as they were."""
    bits, group = NAMED[scheme]["bits"], NAMED[scheme]["group_size"]
    width = plain.dtype.itemsize
    kept = sum(p.numel() for p in plain.parameters() if p.dim() == 1) + plain.embed.weight.numel()
    total = kept * width
    for module_name, module in plain.named_modules():
        if hasattr(module, "in_features"):
            n, k = module.out_features, module.in_features
            head = module_name == "head" or group is None
            pair = 4 if bits == 4 and plain.device.type == "cpu" else 2
            wide = "activations" in NAMED[scheme] and module_name != "head"
            total += n * k + (4 if wide else 2) * n if head else n * k * bits // 8 + pair * n * k // group
    return total


def llama_cpp_rate(model: str, form: str | None, prompt: int, tokens: int, repeats: int) -> Timing | None:
    """Tokens/s of llama.cpp's own decode loop on a file of that format; None where xllamacpp is not installed."""
    try:
        import xllamacpp
    except ImportError:
        return None
    from minillm.quant.gguf_file import requantize

    source = resolve(model)
    source = source if source.is_file() else next(iter(sorted(source.glob("*.gguf"))), None)
    if source is None or form is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = requantize(source, Path(folder) / f"{form}.gguf", form)
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.verbosity = prompt + tokens + 8, 1, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        server = xllamacpp.Server(params)
        ids = torch.randint(5, 1000, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
        request = {"prompt": ids, "n_predict": tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": True}
        rates = [server.handle_completions(request)["timings"]["predicted_per_second"] for _ in range(repeats + 1)]
    return Timing(tuple(rates[1:]))


BENCHES: dict[str, Callable[..., Iterator[Figure]]] = {"quantized": bench_quantized}
