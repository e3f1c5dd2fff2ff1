# %% [markdown]
# # 10 Fusion, compilation and CUDA graphs
#
# **A decode step of a small batch is a hundred tiny kernels and a CPU that cannot start them fast enough: make fewer
# kernels, then start them all with one call.**
#
# > *The interviewer asks:* "Your 1B model decodes at half the speed that memory bandwidth allows, and the GPU is idle
# > half of the time. Where does the time go, what do you do about it, and what does that cost?"
#
# You will be able to
# - count the kernel launches (内核启动) of a token, and the ceiling on tokens/s that launching alone sets;
# - say what a fusion (算子融合) saves, in bytes and in launches, and write one: residual add + RMSNorm;
# - explain capture and replay of a CUDA graph (CUDA 图), what is frozen in it, and why prefill stays outside.
#
# 35 minutes to read. Runs `tiny`, which ships with the course.

# %%
import inspect

import matplotlib.pyplot as plt
import numpy as np
import torch

from minillm import load_model
from minillm.cache.contiguous import ContiguousCache
from minillm.engine import graphs
from minillm.engine.compiled_bench import bench_compile
from minillm.engine.engine import Engine
from minillm.engine.options import EngineOptions
from minillm.engine.static_step import StaticCache, StepBuffers
from minillm.kernels import cpp, fused, fused_reference
from minillm.kernels.launch import interpreted, why_not
from minillm.kernels.linear_cpu import TiledLinear, TiledMLP
from minillm.lab import explore, pick, plots, predict, predictions, recorded, reveal, units
from minillm.measure import clock
from minillm.measure.launches import LaunchCount, gaps, overhead_share, timeline
from minillm.model.compiled import CompiledDecoder
from minillm.model.decoder import MLP
from minillm.model.generate import generate_naive
from minillm.model.layout import faster_linear, pack_linears
from minillm.model.sampling import SamplingParams
from minillm.model.shapes import known_shape

model = load_model("tiny", dtype="float32")
config, device = model.config, model.device
print(
    f"model: tiny, on {device}, {torch.get_num_threads()} CPU threads; {config.num_layers} layers, width "
    f"{config.hidden_size}; Triton " + (why_not() or ("interpreted" if interpreted() else "compiled"))
)

# %% [markdown]
# ## 1. The waste, measured
#
# One decode step: one token through the model, from a cache that holds 63. torch's profiler notes when each operation
# begins and ends.


# %% tags=["nbval-ignore-output"]
HELD = 63


def decode_step(model, rows=1, new=1):
    """A function that runs the same step again and again: `new` tokens a row, behind HELD stored ones."""
    cache = ContiguousCache(config, rows, HELD + new, device=device)
    prompt = torch.arange(5, 5 + HELD, device=device).expand(rows, HELD)
    token = torch.arange(9, 9 + new, device=device).expand(rows, new)

    @torch.inference_mode()
    def step():
        cache.truncate(HELD)
        return model(token, cache=cache)[:, -1].argmax(-1)

    with torch.inference_mode():
        model(prompt, cache=cache)
    return step


def calmest(step, repeats):
    """The shortest of several traces: a busy machine only ever lengthens one."""
    return min((timeline(step, warmup=2) for _ in range(repeats)), key=lambda ops: ops[-1].end)


step = decode_step(model)
ops = calmest(step, pick(15, 8))
busy, whole = sum(op.end - op.start for op in ops), ops[-1].end
_, ax = plots.figure(width=7.6, height=2.0)
shown = [op for op in ops if op.start < whole / config.num_layers * 1.6]
kinds = {"matrix product": {"linear", "matmul", "mm"}, "attention": {"scaled_dot_product_attention"}}
colors = {"matrix product": plots.BLUE, "attention": plots.GREEN, "everything else": plots.ORANGE}
for op in shown:
    kind = next((k for k, names in kinds.items() if op.name in names), "everything else")
    ax.barh(0, op.end - op.start, left=op.start, height=0.7, color=colors[kind], edgecolor="white", linewidth=0.4)
ax.set(yticks=[], ylim=(-0.6, 0.6), title="The first layers of one decode step (tiny): white is nobody working")
plots.unit_axis(ax.xaxis, "s", "time, under the profiler")
ax.grid(False, axis="y")
handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in colors.values()]
ax.legend(handles, colors, loc="upper center", bbox_to_anchor=(0.5, -0.55), ncols=3)
plt.show()
plain = clock.timed(step, pick(30, 10), 3).median
print(f"{len(ops)} calls, views included; {1 - busy / whole:.0%} of the step lies between them")
print(
    f"median gap {units.show(np.median(gaps(ops)), 's')}; without the profiler a step takes {units.show(plain, 's')}"
)

# %% [markdown]
# *Each bar is one operation, each white gap is Python and torch's dispatcher finding the next. The profiler itself
# makes the gaps wider than they are; that they are there at all is the point.* On a GPU it is worse: the same code
# on the CPU must finish before a kernel can even start, while the kernel of a batch of 1 runs for a few
# microseconds. The PyTorch team's first trace of a plain LLaMA-7B loop showed just this: 25.5 tokens/s on an A100,
# "heavily CPU overhead bound" (their blog, *Accelerating Generative AI with PyTorch II*, 2023).
#
# How many launches are that? Views (reshape, split, transpose) launch nothing. The rest is counted at torch's
# dispatcher. On a GPU each of them is at least one kernel; a norm, which a CPU's torch makes of several calls, is
# one there, and is counted as one.

# %%
with LaunchCount() as count:
    step()
launches = {"eager": count.total}
for name, times in count.names.most_common():
    print(f"{times:4d}  {name}")
print(f"{count.total:4d}  in all, for one token of a model of {config.num_layers} layers")

# %% [markdown]
# ## 2. Predict
#
# - *Launches.* A layer of this decoder: 2 norms, 4 products, 3 for the rotation (x cos, roll, multiply-add), 2
#   cache writes, 1 attention, 2 residual adds, 2 for SwiGLU: 16. Outside the layers: embedding, 9 for positions and
#   the rotation's tables, last norm, head, argmax: 13.
# - *After fusion.* Norm + add become one, SwiGLU's two become one, rotation and cache writes become one: 9 a layer.
# - *Bytes saved* by one fused add + norm of 32 rows at Llama 3.1 8B's width (4,096), 16 bits: the sum is not read
#   again.
# - *A ceiling from launches alone.* 32 layers of 16 launches at 5 µs each: tokens/s at batch 1, however fast the GPU.
# - *Outputs of graphs.* Graphs for batches of 1, 2, 4, 8, 16, ..., 256, each returning its own 16-bit logits of
#   128,256 words: bytes that stay allocated.

# %%
llama = known_shape("llama-3.1-8b")
sizes = graphs.batch_sizes(256)
predict("10.launches", 16 * config.num_layers + 13, "")
predict("10.fused_launches", 9 * config.num_layers + 13, "")  # the last layer's add is done by the last norm
predict("10.bytes_saved", 32 * llama.hidden_size * 2, "B")
predict("10.launch_ceiling", 1 / (32 * 16 * 5e-6), "tokens/s")
predict("10.own_outputs", sum(sizes) * llama.vocab_size * 2, "B")

# %% [markdown]
# ## 3. The idea, drawn


# %%
def lanes(ax, title, cpu, gpu, span):
    """Two lanes: launches on the CPU, kernels on the GPU, (start, length) each."""
    for y, spans, color in ((1, cpu, plots.ORANGE), (0, gpu, plots.BLUE)):
        for start, length in spans:
            ax.barh(y, length, left=start, height=0.62, color=color, edgecolor="white", linewidth=1)
    end = max(start + length for start, length in gpu)
    ax.plot([end, end], [-0.5, 1.5], color=plots.RED, lw=1.4)
    ax.annotate(f"done at {end:.0f} µs", (end, 1.36), (4, 0), textcoords="offset points", fontsize=8, color=plots.RED)
    ax.set(yticks=[0, 1], yticklabels=["GPU", "CPU"], xlim=(0, span), ylim=(-0.5, 1.6), xticks=[])
    ax.grid(False)
    ax.set_title(title, loc="left", fontsize=9)


def one_by_one(kernels, launch=5.0):
    """Each kernel starts when it was launched and the one before is done."""
    cpu, gpu, free = [], [], 0.0
    for i, kernel in enumerate(kernels):
        cpu.append((i * launch, launch))
        start = max((i + 1) * launch, free)
        gpu.append((start, kernel))
        free = start + kernel
    return cpu, gpu


kernels = [1.5, 4.0, 1.2, 1.2, 1.2, 1.5, 3.0, 1.2, 1.5, 4.0, 1.2, 1.2, 4.0]  # a layer, roughly; microseconds
melted = [1.8, 4.0, 1.8, 3.0, 1.8, 4.0, 1.8, 4.0]
figure, axes = plots.figure(4, 1, width=7.4, height=4.6)
eager = one_by_one(kernels)
span = max(s + k for s, k in eager[1]) * 1.12
lanes(axes[0], "eager: the GPU waits for every launch", *eager, span)
lanes(axes[1], "fused: fewer launches, and fewer bytes", *one_by_one(melted), span)
starts = np.cumsum([6.0, *melted])[:-1]
lanes(axes[2], "graph: one launch, the kernels follow each other", [(0, 6.0)], list(zip(starts, melted)), span)
large = [10 * k for k in kernels[:4]]
lanes(axes[3], "eager prefill: long kernels hide the launches", *one_by_one(large), span)
plt.show()

# %% [markdown]
# *A sketch, not a measurement: a launch of 5 µs, kernels of 1 to 4. A step takes the longer of two lanes. Fusion
# makes both shorter; a graph removes one lane; in the last row there is nothing to remove.*
#
# Three tools, one aim:
#
# | | removes | needs | in exchange |
# |---|---|---|---|
# | fusion | a write, a read and a launch | a kernel for the pair | a kernel to be kept right |
# | compilation (编译) | the same, and Python | code it can trace | seconds or minutes for each shape |
# | CUDA graph | all launches but one | fixed shapes and addresses | a capture and memory for each size |

# %% [markdown]
# ## 4. Build it
#
# ### A fusion
#
# The residual stream (残差流) gets the branch's output added, then the next branch norms the sum. As two kernels
# the sum is written to memory and read back. As one it stays in registers. This is the whole kernel; a program
# (程序) is one row.

# %%
if why_not() is None:
    import triton
    import triton.language as tl

    @triton.jit
    def add_norm_kernel(branch, residual, weight, summed, normed, width, eps, BLOCK: tl.constexpr):
        row, column = tl.program_id(0), tl.arange(0, BLOCK)
        inside = column < width  # BLOCK is a power of two, the width need not be
        x = tl.load(residual + row * width + column, mask=inside, other=0.0)
        x += tl.load(branch + row * width + column, mask=inside, other=0.0)
        tl.store(summed + row * width + column, x, mask=inside)  # for the next residual add
        scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)  # x is still here: no second read
        tl.store(normed + row * width + column, x * scale * tl.load(weight + column, mask=inside), mask=inside)

    generator = torch.Generator().manual_seed(0)
    x, branch = torch.randn(2, 5, 192, generator=generator).to(device)
    weight = torch.rand(192, generator=generator).to(device)
    summed, normed = torch.empty_like(x), torch.empty_like(x)
    add_norm_kernel[(5,)](branch, x, weight, summed, normed, 192, 1e-5, BLOCK=256)
    exact = (x + branch).double()
    exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    print(f"largest error against float64: {(normed - exact).abs().max():.1e}")
    assert torch.equal(summed, x + branch) and (normed - exact).abs().max() < 1e-5

# %% [markdown]
# ### A graph
#
# What CUDA does, in 20 lines without CUDA. While a step runs once, note every operation with **the very tensors** it
# read and wrote. A replay runs the list again: no model, no Python of the model, no decisions.

# %%
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from minillm.measure.launches import launches as computes  # noqa: E402


class SmallGraph(TorchDispatchMode):
    """`with SmallGraph() as graph: output = step()` captures; `graph.replay()` fills the same `output` again."""

    def __init__(self):
        super().__init__()
        self.nodes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if computes(function):  # a view is no work: it stays a view of a tensor that is filled again
            self.nodes.append((function, args, kwargs or {}, output))
        return output

    def replay(self):
        for function, args, kwargs, output in self.nodes:
            for old, new in zip(tensors(output), tensors(function(*args, **kwargs))):
                if new is not old:
                    old.copy_(new)  # to the address of the capture; a real kernel writes there by itself


def tensors(output):
    return [x for x in (output if isinstance(output, (tuple, list)) else (output,)) if isinstance(x, torch.Tensor)]


# %% [markdown]
# The step to capture must read *everything that changes* from tensors of fixed shape: token, position, slot, length,
# block table. `StepBuffers` holds them, `StaticCache` attends through them. Then a text is: write into the buffers,
# replay, read the output. Again.

# %%
prompt, BLOCK = [5, 17, 42, 8, 99], 16
engine = Engine(model, EngineOptions(num_blocks=8, block_size=BLOCK, max_num_seqs=1, attention="sdpa"), eos_ids=())
paged = engine.runner.cache
expected = generate_naive(model, prompt, pick(24, 8))


def captured_step():
    """(graph, buffers, output): one row, its blocks 0 and 1 of the pool."""
    buffers = StepBuffers(1, 2, device)
    tokens, positions, slots, lengths, tables = buffers.views(1)
    view = StaticCache(paged, positions, slots, lengths, tables)
    buffers.fill([(prompt[0], 0, 0, [0, 1])], 1)
    with torch.no_grad(), SmallGraph() as graph:
        output = model(tokens, positions, view)
    return graph, buffers, output


def run_captured(graph, output, feed, steps):
    """The prompt token by token, then greedy; `feed(token, position)` brings a token to where the graph reads it."""
    found = []
    with torch.no_grad():
        for position in range(len(prompt) + steps - 1):
            feed(prompt[position] if position < len(prompt) else found[-1], position)
            graph.replay()
            if position >= len(prompt) - 1:
                found.append(output.argmax(-1).item())
    return found


graph, buffers, output = captured_step()
right = run_captured(graph, output, lambda token, at: buffers.fill([(token, at, at, [0, 1])], 1), len(expected))
print(f"{len(graph.nodes)} operations captured once, replayed {len(prompt) + len(expected) - 1} times")
print("replayed:", right[:8], "... equal to the naive loop:", right == expected)
assert right == expected

# %% [markdown]
# **The classic bug**: a new tensor in the buffer's place. Python's variable changes; the graph knows the old address
# and reads what still lies there. Nothing raises, and the text is fluent.

# %%
stale = {"tokens": buffers.views(1)[0]}


def rebind(token, position):
    stale["tokens"] = torch.tensor([token], device=device)  # should be .copy_() into the tensor of the capture
    old = int(buffers.views(1)[0])
    buffers.fill([(old, position, position, [0, 1])], 1)  # all but the token is brought in correctly


wrong = run_captured(graph, output, rebind, len(expected))
print("right:", expected[:8])
print("stale:", wrong[:8])
assert wrong != expected

# %% [markdown]
# ## 5. The library's version
#
# `minillm.kernels.fused_norm`, the kernel, and `minillm.engine.graphs`, the one way into a replay:

# %%
if why_not() is None:
    from minillm.kernels import fused_norm

    kernel = fused_norm.add_rms_norm_kernel
    print(inspect.getsource(getattr(kernel, "fn", kernel)))
print(inspect.getsource(graphs.DecodeGraphs.run))

# %% [markdown]
# | it adds | because |
# |---|---|
# | float32 inside, the sum rounded before it is normed | in 16 bits it equals the unfused result |
# | row offsets in 64 bits | row x width passes 2³¹ in a long prefill of a wide model |
# | one graph per size of a list, padded up | a batch of 5 must run; 256 captures would cost minutes |
# | padding rows: slot -1, length 0 | a stale slot would overwrite a stranger's cache |
# | the largest size first, one pool, one shared output | the smaller graphs fit into what the largest took |
# | each capture replayed and compared with its step | a capture that missed something is never used |
# | `why_eager`: one line, and every step runs as before | no CUDA, or no capture, is no error |
#
# How do fused kernels get into the model? `decoder.py` has no word of them. `fuse(model)` puts other blocks in the
# place of its blocks: a block may hand on a pair (branch, residual) instead of their sum, since the decoder only
# passes it to the next. **Same tokens, proved**: fused, compiled and replayed, against the naive loop.

# %%
ops_used = fused.torch_ops() if why_not() else fused.triton_ops()
fused_model = fused.fuse(load_model("tiny", dtype="float32"), ops_used)
with torch.no_grad():
    sample = torch.tensor([prompt], device=device)
    difference = (fused_model(sample) - model(sample)).abs().max().item()
print(f"fused logits: largest difference {difference:.1e}")
assert difference < 1e-3


def answers(engine, lengths):
    """Requests that end one after another, so that every size of graph has its turn."""
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in lengths]
    groups = [engine.add(prompt[: i + 1], p) for i, p in enumerate(params)]
    while engine.has_work:
        engine.step()
    return [engine.completions(group)[0].token_ids for group in groups]


lengths = pick([12, 7, 20, 4, 9], [6, 3, 8, 4, 5])
replaying = Engine(model, EngineOptions(num_blocks=32, max_num_seqs=5, attention="sdpa"), eos_ids=())
backend = graphs.CudaBackend() if device.type == "cuda" else graphs.EagerBackend()
replaying.runner = graphs.GraphRunner(model, replaying.runner.cache, (1, 2, 4, 8), backend)
got = answers(replaying, lengths)
assert got == [generate_naive(model, prompt[: i + 1], n) for i, n in enumerate(lengths)]
print(f"{len(lengths)} requests, {replaying.runner.replayed} steps replayed ({type(backend).__name__}): same tokens")
on_cpu = graphs.GraphRunner(model, replaying.runner.cache, (1, 2)).why_eager
print("asked for a CUDA graph here:", on_cpu or "captured")

# %% [markdown]
# ## 6. Measure it
#
# ### Launches
#
# The three fusions are counted as one launch each. Rotation and cache write need a cache that takes q, k and v before
# they are turned; `CountedCache` does what the paged one does under a graph.


# %%
class CountedCache(ContiguousCache):
    """Rotation and write as one launch, as in `fused_rope`; then attention."""

    def attend_unrotated(self, layer, qkv, tables):
        q, k, v = turn_and_store(self, layer, qkv, tables)
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, scale=layer.scale, enable_gqa=True
        ).transpose(1, 2)


def turn_and_store(cache, layer, qkv, tables):
    qk, v = qkv.split((config.num_heads + config.num_kv_heads, config.num_kv_heads), dim=-2)
    q, k = fused_reference.rotate(qk, *tables).split((config.num_heads, config.num_kv_heads), dim=-2)
    start = cache.lengths[layer.index]
    cache.k[layer.index][:, :, start : start + 1], cache.v[layer.index][:, :, start : start + 1] = (
        x.transpose(1, 2) for x in (k, v)
    )
    cache.lengths[layer.index] = start + 1
    return q, cache.k[layer.index][:, :, : start + 1], cache.v[layer.index][:, :, : start + 1]


count = LaunchCount()
turn_and_store = count.one(turn_and_store, "rope_and_write")
one_each = fused.Ops(
    count.one(fused_reference.add_rms_norm), count.one(fused_reference.gated), fused_reference.rope_and_write
)
counted = fused.fuse(load_model("tiny", dtype="float32"), one_each)
cache = CountedCache(config, 1, HELD + 1, device=device)
with torch.inference_mode():
    model(torch.arange(5, 5 + HELD, device=device)[None], cache=cache)
    token = torch.tensor([[9]], device=device)
    with count:
        logits = counted(token, cache=cache)[:, -1]
        chosen = logits.argmax(-1)
assert chosen == step(), "the fused step chose another token"
launches["fused"] = count.total
print(", ".join(f"{times} {name}" for name, times in count.names.most_common()))
reveal("10.launches", launches["eager"])
reveal("10.fused_launches", launches["fused"])

# %% [markdown]
# Compilation is the CPU's counterpart of all this: `CompiledDecoder` lets `torch.compile` write the step as one graph
# of generated loops. What is left to torch's dispatcher is attention, once a layer, and what
# stands around the graph. It takes seconds to make, once for each number of rows, though layers that differ in their
# weights alone are compiled once; here is how many.

# %% tags=["nbval-ignore-output"]
compiled = CompiledDecoder(load_model("tiny", dtype="float32"))
eager_step = decode_step(pack_linears(load_model("tiny", dtype="float32")))
compiled_step = decode_step(compiled)
assert torch.equal(compiled_step(), eager_step()), "the compiled step chose another token"
if compiled.why_eager is None:
    kept = [op for op in timeline(compiled_step) if op.name in ("attend", "argmax")]
    launches["compiled"] = len(kept) + 2  # two graphs: the layers, the head
    made = sum(compiled.compile_seconds.values())
    print(f"compiled for 1 row in {made:.1f} s (less where a cache on disk has it)")
else:
    print("not compiled:", compiled.why_eager)
launches["graph"] = 1
plots.bars(
    [f"{name}{'' if name != 'graph' else ' (one replay)'}" for name in launches],
    list(launches.values()),
    "",
    "Calls to start one decode step (tiny)",
    colors=[plots.MEANING["naive"], plots.BLUE, plots.GREEN, plots.ORANGE][: len(launches)],
)
plt.show()
for name in ("eager", "fused", "replay"):
    print(f"launches a token on a GPU, {name}: {recorded(f'graphs.launches.{name}')}")

# %% [markdown]
# *Counted, not timed. "compiled" counts the calls that are left outside of generated code.* A graph does not make the
# kernels fewer: it makes the CPU's part one call. So the two multiply: fuse first, then capture what is left.
#
# ### Time
#
# Eager and compiled alternate here; eager and replayed were recorded on a GPU. The red mark is this machine's read
# bandwidth over the bytes of a step: no launch removed will pass it.

# %% tags=["nbval-ignore-output"]
from minillm.lab import is_fast  # noqa: E402
from minillm.measure.counts import forward_counts  # noqa: E402
from minillm.measure.machine import ceilings  # noqa: E402

pair = clock.paired(eager_step, compiled_step, repeats=pick(60, 15), warmup=3)
machine = ceilings(fast=is_fast())
ceiling = machine.read_bandwidth / forward_counts(config, 1, context=HELD).total_bytes
print(f"eager step / compiled step: {pair.ratio} x")
saved = pair.a.median - pair.b.median
if compiled.why_eager is None and saved > 0:
    print(f"the compile time is earned back after {made / saved:.0f} tokens")
plots.beside(
    [
        dict(name="eager", here=1 / pair.a.median, recorded=recorded("graphs.batch1.eager_rate"), ceiling=ceiling),
        dict(name="compiled here,\ngraph on GPU", here=1 / pair.b.median, recorded=recorded("graphs.batch1.rate")),
    ],
    "tokens/s",
    "Decode, batch 1 (tiny here; the GPU's model in its record)",
).xaxis.set_major_locator(plt.MaxNLocator(5))
plt.show()
_, gpu_lane = one_by_one([0.5] * (32 * 16))  # the sketch's rule, with kernels of half a microsecond
reveal("10.launch_ceiling", 1e6 / sum(gpu_lane[-1]))
for rows in (1, 8, 32):
    print(f"GPU, replay over eager at batch {rows}: {recorded(f'graphs.batch{rows}.ratio')}")

# %% [markdown]
# ### Who multiplies when there are more rows
#
# A generated loop reads a row of W and keeps one sum for each row of x: fine for one or two. From three on the
# product is a call again, and a library has to choose an order for W before it knows the rows. `kernels/linear.cpp`
# has one order for any: panels of two or three vector registers, as many rows of x at a time as have a register for
# each of their sums (24 sums with AVX-512, else 12), so that two or three loads of weights serve them all.
# `LLM(compile=True)` takes it on a CPU. An output is one sum from the first input to the last, so this product gives
# a request the same bits whatever its batch. An MLP is two such products with silu(gate) x up between them: one call,
# in which a panel of gate and one of up are multiplied and mixed at once, so that what lies between never leaves the
# cache. Few rows: the threads take panels in turn. Many: each takes rows of its own, so that none reads what another
# has just written.
#
# Both help a decode batch. The more rows, the less there is to win: at 64, or with a prompt's 512 for the MLP, the
# two sides are within 10 % of each other, for arithmetic is all there is.

# %% tags=["nbval-ignore-output"]
no_cpp, rows_of_x = cpp.why_not(torch.float32, device), (1, 2, 4, 8, 16, 32, 64)
layers = [
    torch.nn.Linear(576, 3072, bias=False).requires_grad_(False) for _ in range(pick(16, 4))
]  # more than a cache
forms = {"torch": [faster_linear(layer) or layer for layer in layers]}
if not no_cpp:
    forms["linear.cpp"] = [TiledLinear(layer) for layer in layers]


def all_of(form: list, x: torch.Tensor):
    """A function that multiplies x by the weights of every layer."""
    return lambda: [linear(x) for linear in form]


if not no_cpp:
    seconds_of, ratios = {name: [] for name in forms}, []
    for n in rows_of_x:
        x = torch.randn(n, 576)
        runs = [all_of(form, x) for form in forms.values()]
        for got, wanted in zip(runs[1](), runs[0]()):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)  # 576 products, each sum in its own order
        pair = clock.paired(*runs, repeats=pick(15, 3), warmup=2)
        ratios.append(pair.ratio)
        for name, side in zip(forms, (pair.a, pair.b)):
            seconds_of[name].append(side.median / len(layers))
    alone = forms["linear.cpp"][0]
    batch = torch.randn(32, 576)
    assert all(torch.equal(alone(row[None])[0], both) for row, both in zip(batch, alone(batch)))
    _, axes = plots.figure()
    for name, taken in seconds_of.items():
        axes.plot(rows_of_x, [1e3 * t for t in taken], "o-", label=name)
    floor = layers[0].weight.nbytes / machine.read_bandwidth
    axes.axhline(1e3 * floor, color=plots.MEANING["ceiling"], ls="--", label="W, read once")
    axes.set(xlabel="rows of x", ylabel="ms", title="x @ W.T, W 3072 x 576, float32")
    axes.set_xscale("log", base=2)
    axes.legend()
    plt.show()
    for n, ratio in zip(rows_of_x, ratios):
        print(f"{n:3d} rows: torch / linear.cpp {ratio} x")
    mlps = [MLP(config.with_changes(hidden_size=576, intermediate_size=1536)).requires_grad_(False) for _ in layers]
    for mlp in mlps:
        mlp.gate_up, mlp.down = TiledLinear(mlp.gate_up), TiledLinear(mlp.down)
    joined = [TiledMLP(mlp) for mlp in mlps]
    for n in (32, 512):
        x = torch.randn(n, 576)
        runs = [all_of(form, x) for form in (mlps, joined)]
        torch.testing.assert_close(runs[1]()[0], runs[0]()[0], rtol=1e-4, atol=1e-5)
        pair = clock.paired(*runs, repeats=pick(15, 3), warmup=2)
        print(f"{n:3d} rows: an MLP in pieces / in one call {pair.ratio} x")
else:
    print("not measured:", no_cpp)

# %% [markdown]
# ### All layers in one call
#
# What `torch.compile` leaves are calls again: for each layer a product, attention with its projection, an MLP. Each
# passes through Python, and by the time the next one starts, the weights of a layer have swept Python's own code and
# data out of the processor's caches. A CUDA graph ends that on a GPU by replaying its launches; a **megakernel**
# (巨型内核) by having only one (Mirage Persistent Kernel, Cheng et al. 2025, arXiv:2512.22219). On a CPU one C++
# call can do the same: `kernels/layers.cpp` is the loop over the layers, with the products and the attention of this
# chapter and the last one in it, for any mix of prompts and decodes over the blocks of a paged cache.
#
# The price: a compiler takes any model, this loop knows the models that somebody wrote it for. Llama, Mistral, Qwen 2
# and Qwen 3 are such; Gemma, quantised weights, trees of drafts and other caches get the graphs. `LLM(compile=True)`
# takes whichever can be had. Here the engine answers the same requests in three ways, in turn; random weights in the
# shape of a real model, so this is about time alone. With one request, graphs and the one call both read the weights
# about as fast as memory gives them. With 8, calls are most of what is left to save. With 32, arithmetic takes over.

# %% tags=["nbval-ignore-output"]
WAYS = {"plain": "layer by layer", "graphs": "graphs", "whole": "one call"}
if not no_cpp:
    shape, batches = pick("shape:smollm2-135m", "tiny"), pick((1, 8, 32), (1, 4))
    found = {
        f.name: f for f in bench_compile((shape,), batches, ("float32",), tokens=pick(48, 8), repeats=pick(5, 2))
    }
    for rows in batches:
        prefix = f"compile.{shape}.float32.batch{rows}"
        rates = [f"{name} {found[f'{prefix}.{way}'].value:6.1f}" for way, name in WAYS.items()]
        print(f"{rows:2d} requests, tokens/s: " + ", ".join(rates))
        for ratio in ("graphs_over_plain", "whole_over_plain", "whole_over_graphs"):
            fast, slow = (WAYS[way] for way in ratio.split("_over_"))
            figure = found[f"{prefix}.{ratio}"]
            print(f"    {fast} / {slow}: {figure.value:.2f} x [{figure.spread[0]:.2f}, {figure.spread[1]:.2f}]")
    print(f"the graphs took {found[f'compile.{shape}.float32.seconds'].value:.0f} s to make")
else:
    print("not measured:", no_cpp)

# %% [markdown]
# ### Bytes
#
# What each fusion keeps out of memory in one layer at Llama 3.1 8B's shape, 16 bits. The count is checked by the
# tests against the sizes of the tensors that go in and out.

# %%
print(f"{'':20s} {'rows':>6s} {'apart':>10s} {'fused':>10s} {'saved':>10s}  launches")
for rows in (1, 32, 8192):
    for t in fused.traffic(llama, rows, 2):
        shown = [units.show(n, "B") for n in (t.unfused_bytes, t.fused_bytes, t.saved)]
        print(
            f"{t.name:20s} {rows:6d} {shown[0]:>10s} {shown[1]:>10s} {shown[2]:>10s}  "
            f"{t.unfused_launches} -> {t.fused_launches}"
        )
reveal("10.bytes_saved", fused.traffic(llama, 32, 2)[0].saved)
layer_weights = forward_counts(llama, 1, dtype_bytes=2).total_weight_bytes / llama.num_layers
share = {rows: sum(t.saved for t in fused.traffic(llama, rows, 2)) / layer_weights for rows in (1, 8192)}
print(f"saved bytes beside a layer's share of the weights: {share[1]:.2%} at 1 row, {share[8192]:.0%} at 8,192 rows")
assert share[1] < 0.01 < share[8192]

# %% [markdown]
# Read the last line twice. At 1 row a fusion saves nothing worth having in bytes: the weights are all there is to
# read. It saves **launches**. At 8,192 rows launches are nothing, and it saves **bytes**. The same kernel, two
# reasons.

# %%
print("the operations one by one over the fused kernel, in time, on the GPU's own clock:")
for name, key in (("residual + RMSNorm", "add_norm"), ("act(gate) * up", "gate"), ("RoPE + KV write", "rope")):
    shown = [f"{n} rows: {recorded(f'fused.{key}.rows{n}.ratio')}" for n in (1, 64, 8192)]
    print(f"{name:20s} " + "   ".join(shown))

# %% [markdown]
# ## 7. Where it backfires
#
# ### Prefill gains nothing
#
# A call of more tokens launches as many kernels, each with more to do. The share of the step that lies between
# operations, by tokens in the call:

# %% tags=["nbval-ignore-output"]
tokens, shares, counts = pick([1, 8, 64, 256, 448], [1, 64, 256]), [], []
for new in tokens:
    prefill = decode_step(model, new=new)
    ops = calmest(prefill, pick(9, 4))
    shares.append(1 - sum(op.end - op.start for op in ops) / ops[-1].end)
    with LaunchCount() as count:
        prefill()
    counts.append(count.total)
_, ax = plots.figure(height=2.6)
ax.plot(tokens, [100 * s for s in shares], "o-", color=plots.MEANING["naive"])
ax.set_xscale("log")
plots.plain_log_ticks(ax.xaxis, tokens)
ax.set(xlabel="tokens in the call", ylabel="% of the step", ylim=(0, 100), title="Time between operations (tiny)")
plt.show()
print(f"launches: {counts[0]} for 1 token, {counts[-1]} for {tokens[-1]}: the same work list, longer work")
assert max(counts) < 1.3 * min(counts)

# %% [markdown]
# *Under the profiler, so too high; the fall is what counts.* And a graph of a prefill would have to exist for every
# length. So engines capture decode and run prefill as it is (or compile it with shapes left open).
#
# ### Memory for each batch size
#
# A tensor that a graph returns is never reused: it lives as long as the graph. If each size returns its own logits,
# that is the sum over all sizes; if all copy theirs into one buffer, only the largest. vLLM's list was 1, 2, 4, 8,
# 16, 24, ..., 256 (its `model_runner.py`); ours is the same rule.

# %%
own = graphs.graph_bytes(llama, sizes, 2, shared_output=False)
shared = graphs.graph_bytes(llama, sizes, 2)
logits = torch.empty(sum(sizes), llama.vocab_size, dtype=torch.bfloat16, device="meta").nbytes
reveal("10.own_outputs", logits)
print(f"{len(sizes)} sizes, Llama 3.1 8B: with own outputs {units.show(own, 'B')}, shared {units.show(shared, 'B')}")
per_token = 2 * llama.num_layers * llama.num_kv_heads * llama.head_dim * 2
print(f"the difference would hold the KV cache of {(own - shared) / per_token:,.0f} tokens")
taken, formula = recorded("graphs.memory"), recorded("graphs.memory_formula")
print(f"on a GPU (its record names model and sizes): taken {taken}, formula {formula}")

# %% [markdown]
# ### Padding
#
# Few sizes waste work, many cost captures. Rows computed for nothing, if batches of 1 to 64 come equally often:

# %%
lists = {
    "every size": tuple(range(1, 65)),
    "1, 2, 4, then 8s": graphs.batch_sizes(64),
    "powers of two": (1, 2, 4, 8, 16, 32, 64),
    "64 alone": (64,),
}
for name, chosen_sizes in lists.items():
    computed = sum(graphs.padded_size(n, chosen_sizes) for n in range(1, 65))
    real = sum(range(1, 65))
    print(f"{name:18s} {len(chosen_sizes):3d} captures, {computed / real - 1:6.1%} more rows than requests")

# %% [markdown]
# A padding row is not free, but in a step bound by reading weights it is nearly so: the weights are read once for all
# rows. That is why lists are coarse.
#
# What a graph cannot do, in one place: **a new shape** (another batch size is another graph); **a question to the
# GPU** (`.item()`, `if tensor:`, a boolean mask as an index: their result would be needed on the CPU while nothing
# has run); **a new address** (the stale token above); **a different path** (an `if` in Python is decided once, at
# capture).

# %% [markdown]
# ## 8. Play
#
# Layers x launches x time of a launch is the CPU's lane; the kernels' time is the GPU's. The step takes the longer
# one, if they overlap perfectly. Move the kernels' time: a larger batch or model moves you to the right end.


# %% tags=["nbval-ignore-output"]
def draw(ax, layers, launches_a_layer, launch_us, kernel_us):
    cpu, gpu = layers * launches_a_layer * launch_us * 1e-6, layers * launches_a_layer * kernel_us * 1e-6
    share = overhead_share(layers, launches_a_layer, launch_us * 1e-6, gpu)
    step_s = max(cpu, gpu)
    ax.barh([1], [cpu], color=plots.ORANGE)
    ax.barh([0], [gpu], color=plots.BLUE)
    if step_s > gpu:
        ax.barh([0], [step_s - gpu], left=[gpu], color=plots.MEANING["waiting"])
    ax.set_yticks([0, 1], ["GPU", "CPU"])
    ax.grid(False, axis="y")
    plots.unit_axis(ax.xaxis, "s", "time of a step")
    ax.xaxis.set_major_locator(plt.MaxNLocator(3))
    ax.set_xlim(0, step_s * 1.15)
    ax.set_title(f"{1 / step_s:,.0f} tokens/s at most; {share:.0%} of the step the GPU waits")


explore(
    draw,
    layers=(8, 80, 8, 32),
    launches_a_layer=[16, 9, 1],
    launch_us=(1.0, 10.0, 0.5, 5.0),
    kernel_us=(0.5, 30.0, 0.5, 2.0),
    static=[dict(launches_a_layer=16), dict(launches_a_layer=9), dict(kernel_us=20.0)],
    height=2.2,
)

# %% [markdown]
# *Grey: the GPU waits. 32 layers, a launch of 5 µs, kernels of 2 µs unless said otherwise. Fewer launches help in
# proportion; kernels of 20 µs hide them.*

# %% [markdown]
# ## 9. Say it
#
# **"The GPU idles during decode. Why, and what do you do?"**
# - *20 seconds.* At batch 1 each kernel runs for a few microseconds, and launching one takes the CPU about as long:
#   the step is as long as the launches. Fuse to have fewer, capture the step as a CUDA graph to launch them all at
#   once.
# - *2 minutes.* Take a trace and look for white between kernels (section 1). Count: 16 launches a layer, so 32
#   layers at 5 µs are 2.6 ms a token whatever the GPU does, 390 tokens/s (section 2). Fused norms, SwiGLU and
#   rotation leave 9 a layer (section 6). A graph makes it one call. Tokens stay the same (section 5). Then the next
#   limit is bandwidth, and that is where you wanted to be.
# - *Follow-up: why does it not help prefill?* Kernels there are long enough to hide their launches; the last row of
#   the sketch, and the fall in section 7.
# - *The number:* 16 launches a layer eager, 9 fused, 1 call a step with a graph.
#
# **"What does a CUDA graph need, and what does it cost?"**
# - *20 seconds.* Fixed shapes, fixed addresses, no synchronisation inside. So: one graph per padded batch size,
#   inputs copied into static buffers, lengths and block tables read on the device. It costs capture time and memory
#   a size.
# - *2 minutes.* Build the small graph of section 4; show the stale token. Padding rows need slot -1 and length 0,
#   or they write into a stranger's block. Capture the largest size first, share the pool and the output: with
#   outputs of their own, 35 sizes at a vocabulary of 128,256 keep 1.1 GB (section 7).
# - *Follow-up: a batch of 5?* Runs in the graph of 8. *Follow-up: what if it cannot be captured?* Run eagerly and log
#   why. *Follow-up: attention over growing lengths?* The grid is fixed for full tables; the kernel reads the length.
# - *The number:* 1.1 GB against 66 MB of logits.
#
# **"Fusion saves memory traffic. How much, when?"**
# - *20 seconds.* Add + norm: 5 passes over the rows become 4. SwiGLU: 5 become 3. At one row that is nothing next
#   to the weights and only the launch counts; at thousands of rows it is time.
# - *2 minutes.* The table of section 6, line by line, and its last line. Then `torch.compile`: finds the same
#   fusions, plus Python removed; its price is compile time for each shape, earned back after the number of tokens
#   that section 6 prints.
# - *Follow-up: why not fuse everything into one kernel?* A product needs tiles and a norm needs whole rows; between
#   them all blocks must meet, which is what the end of a kernel is. A megakernel lets them meet inside, with counters
#   in memory, and somebody has to write it for the model; section 6 has one for a CPU.
# - *The number:* saved bytes are rows x width x 2 for an add + norm in 16 bits.

# %%
predictions()

# %% [markdown]
# ## 10. Exercise, papers, next
#
# - Exercise: `exercises/10_fusion_and_graphs.ipynb`: launches counted, bytes saved, the fused kernel, batch sizes,
#   the stale buffer, the launch ceiling.
# - Papers and pages: *PyTorch 2*, Ansel et al., ASPLOS 2024, the compiler behind section 6. *Root Mean Square Layer
#   Normalization*, Zhang and Sennrich 2019 (arXiv:1910.07467). *GLU Variants Improve Transformer*, Shazeer 2020
#   (arXiv:2002.05202). *Accelerating Generative AI with PyTorch II*, the PyTorch team's blog, 2023. The CUDA
#   programming guide's chapter on graphs.
# - In the library: `minillm/kernels/fused*.py`, `minillm/engine/graphs.py`, `minillm/model/compiled.py`,
#   `minillm/kernels/layers_cpu.py`; on a CPU `minillm bench compile`, on a GPU `minillm bench fused` and `graphs`.
# - Next: chapter 11. The step is now bound by reading weights, so read fewer bits.
