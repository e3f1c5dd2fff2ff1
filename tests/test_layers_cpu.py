"""A whole step in one C++ call gives what the layers give one by one: families, mixed steps, and what it refuses."""

import copy
import dataclasses

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.cache.contiguous import ContiguousCache
from minillm.cache.paged import PagedCache, PagedStep
from minillm.errors import ParamsError
from minillm.kernels import cpp, layers_cpu
from minillm.kernels.layers_cpu import whole_step
from minillm.kernels.linear_cpu import tile_linears
from minillm.model.config import ModelConfig, RopeScaling
from minillm.model.decoder import Decoder, init_weights
from minillm.quant.named import quantize_by_name

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    cpp.why_not(torch.float32, CPU) is not None, reason=str(cpp.why_not(torch.float32, CPU))
)

PLAIN = dict(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=256,
)
KNOWN = {
    "llama": {},
    "one KV head": dict(num_kv_heads=1),
    "as many KV heads": dict(num_kv_heads=4),
    "no width is a multiple of a register": dict(hidden_size=50, intermediate_size=70, head_dim=10),
    "wide heads": dict(head_dim=64, hidden_size=20),
    "llama 3": dict(rope_scaling=RopeScaling("llama3", factor=8.0, original_length=64), tie_embeddings=True),
    "yarn": dict(rope_scaling=RopeScaling("yarn", factor=4.0, original_length=64)),
    "mistral": dict(windows=(7, None, 100)),
    "qwen 2": dict(qkv_bias=True),
    "qwen 3": dict(qk_norm=True, norm_eps=1e-6),
    "scaled and capped": dict(attention_scale=0.5, attention_softcap=2.0, embedding_scale=6.5),
}
UNKNOWN = {
    "gemma": dict(post_norms=True, activation="gelu_tanh"),
    "norms behind the branches": dict(post_norms=True),
    "gpt 2": dict(norm_kind="layer", positions="learned", gated_mlp=False, activation="gelu", mlp_bias=True),
    "a bias behind attention": dict(out_bias=True),
    "a bias in the MLP": dict(mlp_bias=True),
    "layers with frequencies of their own": dict(local_layers=(1,), rope_local_theta=1e4),
}
BLOCK = 4


def make(**switches) -> Decoder:
    model = init_weights(Decoder(ModelConfig(**PLAIN | switches)), seed=1).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for tensor in model.parameters():
        if tensor.dim() == 1:  # norms and biases, which start as ones and zeros
            tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
        else:
            tensor *= 4  # sharper attention than fresh weights give
    return model


class Scene:
    """Sequences, and a paged cache in which each has blocks that lie scattered."""

    def __init__(self, model, lengths=(40, 23, 9, 130), dtype=torch.float32):
        generator = torch.Generator().manual_seed(3)
        self.texts = [torch.randint(1, 101, (n,), generator=generator) for n in lengths]
        needed = [-(-n // BLOCK) for n in lengths]
        order = torch.randperm(sum(needed), generator=generator)
        self.tables = [part.tolist() for part in order.split(needed)]
        self.cache = PagedCache(model.config, sum(needed), BLOCK, dtype, attention="cpp")
        self.cache.k.fill_(float("nan")), self.cache.v.fill_(float("nan"))  # what is read was written

    def step(self, *parts: tuple[int, int, int]):
        """(tokens, positions) of stretches (request, start, end), and the cache told of them."""
        tokens = torch.cat([self.texts[r][start:end] for r, start, end in parts])
        positions = torch.cat([torch.arange(start, end) for _, start, end in parts])
        slots = [self.tables[r][p // BLOCK] * BLOCK + p % BLOCK for r, start, end in parts for p in range(start, end)]
        widest = max(len(self.tables[r]) for r, _, _ in parts)
        tables = [self.tables[r] + [0] * (widest - len(self.tables[r])) for r, _, _ in parts]
        self.cache.begin(
            PagedStep(
                slot_mapping=torch.tensor(slots),
                block_tables=torch.tensor(tables),
                query_lengths=[end - start for _, start, end in parts],
                kv_lengths=[end for _, _, end in parts],
                positions=positions,
            )
        )
        return tokens, positions


# A prompt whole and another's start, a chunk beside a decode, drafts of three, a chunk as short as a draft, decodes.
STEPS = (
    ((0, 0, 38), (1, 0, 11), (3, 0, 100)),
    ((1, 11, 22), (0, 38, 39), (2, 0, 1)),
    ((0, 39, 40), (2, 1, 4), (3, 100, 130)),
    ((1, 22, 23), (2, 4, 9)),
)


@torch.inference_mode()
def walked(whole, scene, steps=STEPS):
    """Hidden states of every token, text by text, put together from the steps."""
    found = [torch.full((len(text), whole.model.config.hidden_size), float("nan")) for text in scene.texts]
    for parts in steps:
        tokens, positions = scene.step(*parts)
        hidden = whole.hidden(tokens, positions, scene.cache)
        assert hidden.shape == (len(tokens), found[0].shape[1])
        for (request, start, end), rows in zip(parts, hidden.split([end - start for _, start, end in parts])):
            found[request][start:end] = rows.float()
    return found


@torch.inference_mode()
def exact(model, texts):
    """The same without a cache, in float64."""
    model = copy.deepcopy(model).double()
    return [model.hidden(text) for text in texts]


@pytest.mark.parametrize("family", KNOWN)
def test_equals_the_layers_in_float64(family):
    model = make(**KNOWN[family])
    scene = Scene(model)
    wanted, got = exact(model, scene.texts), walked(whole_step(tile_linears(model)), scene)
    for g, w in zip(got, wanted):
        # Float32 through three layers whose sums have at most 70 terms; normed outputs are about 1.
        torch.testing.assert_close(g.double(), w, rtol=0, atol=3e-5)


def test_what_it_does_not_know_stays_with_the_layers():
    for name, switches in UNKNOWN.items():
        assert whole_step(tile_linears(make(**switches))) is None, name
    assert whole_step(make()) is None, "linears that are not tiled"
    assert whole_step(quantize_by_name(make(hidden_size=64), "int8")) is None
    mixed = tile_linears(make())
    mixed.layers[1].attn.layer = dataclasses.replace(mixed.layers[1].attn.layer, softcap=3.0)
    assert whole_step(mixed) is None, "a layer with a soft cap of its own"
    part = tile_linears(make())
    part.layers = part.layers[:2]
    assert whole_step(part) is None, "some layers of a larger model"


def test_bfloat16_weights_and_blocks_stay_near_float64(monkeypatch):
    monkeypatch.setattr("minillm.kernels.linear_cpu.row_at_a_time", lambda linear: True)  # as without instructions
    model = make().to(torch.bfloat16)
    scene = Scene(model, dtype=torch.bfloat16)
    wanted, got = exact(model, scene.texts), walked(whole_step(tile_linears(model)), scene)
    for g, w in zip(got, wanted):
        # K, V and the last norm's output are rounded to 8 bits; torch's bfloat16 also rounds between operations.
        assert (g.double() - w).abs().mean() < 8e-3


def test_k_and_v_are_rounded_to_the_nearest_bfloat16(monkeypatch):
    monkeypatch.setattr("minillm.kernels.linear_cpu.row_at_a_time", lambda linear: True)
    model = make(num_layers=1).to(torch.bfloat16)
    scene, stored = Scene(model, dtype=torch.bfloat16), []

    class Kept:
        def attend(self, layer, q, k, v):
            stored.extend((k, v))
            return q

    exact_model = copy.deepcopy(model).double()
    if cpp.library().linear_pairs():  # what is multiplied is rounded before
        exact_model.layers[0].attn_norm.register_forward_hook(lambda *args: args[-1].bfloat16().double())
    with torch.inference_mode():
        exact_model.hidden(scene.texts[0], torch.arange(40), Kept())
        tokens, positions = scene.step((0, 0, 40))
        whole_step(tile_linears(model)).hidden(tokens, positions, scene.cache)
        for exact_one, pool in zip(stored, (scene.cache.k, scene.cache.v)):
            got = pool[0].flatten(0, 1)[scene.cache.step.slot_mapping].double()
            # Half a step of 8 bits, and what float32 adds to it: cut off instead of rounded, half of them would be
            # further away. A few may stem from an x that was rounded the other way, for it was nearly a tie.
            near = (got - exact_one).abs() <= 2**-8 * 1.01 * exact_one.abs() + 1e-6
            assert near.double().mean() > 0.99


def test_a_row_has_the_same_bits_beside_any_others_and_with_any_threads():
    """Decodes at the same places in both; prompts cut in two ways."""
    model = make()
    whole, threads = whole_step(tile_linears(model)), torch.get_num_threads()
    first = walked(whole, Scene(model))
    other = (
        ((3, 0, 60),),
        ((0, 0, 12), (3, 60, 100)),
        ((0, 12, 38), (1, 0, 22), (2, 0, 1)),
        ((3, 100, 130), (0, 38, 39)),
        ((2, 1, 4), (0, 39, 40), (1, 22, 23)),
        ((2, 4, 9),),
    )
    try:
        torch.set_num_threads(threads % 3 + 1)
        second = walked(whole, Scene(model), other)
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(first, second):
        assert torch.equal(a, b)


def test_other_caches_and_trees_are_left_to_the_layers():
    model = make()
    whole, scene = whole_step(tile_linears(model)), Scene(model)
    tokens, positions = scene.step((0, 0, 5))
    for cache in (None, ContiguousCache(model.config, 1, 8), PagedCache(model.config, 4, BLOCK, attention="sdpa")):
        if isinstance(cache, PagedCache):
            cache.begin(scene.cache.step)
        assert whole.hidden(tokens, positions, cache) is None
    scene.cache.step.masks[0] = torch.ones(5, 5, dtype=torch.bool).tril()
    assert whole.hidden(tokens, positions, scene.cache) is None, "a tree"
    narrow = Scene(model, dtype=torch.bfloat16)
    assert whole.hidden(*narrow.step((0, 0, 5)), narrow.cache) is None, "blocks of another type than the weights"
    scene.step((0, 0, 5))
    scene.cache.step.slot_mapping[4] = -1
    scene.cache.begin(scene.cache.step)
    assert whole.hidden(tokens, positions, scene.cache) is None, "padding"


def wrong_steps(step):
    """What must not reach the kernel, by the argument that is at fault."""
    far = 10**6
    yield "slots", dict(slots=step.slots + far)
    yield "slots", dict(slots=step.slots[1:])
    yield "slots", dict(slots=step.slots.int())
    yield "slots", dict(slots=step.slots - step.slots.max() - 1)
    yield "tables", dict(tables=step.tables + far)
    yield "tables", dict(tables=step.tables.T.contiguous().T)
    yield "places", dict(places=step.places + far)
    yield "requests", dict(requests=step.requests + far)
    yield "requests", dict(requests=step.requests[:0])
    yield "lengths", dict(lengths=step.lengths + far)
    yield "stretches", dict(stretches=step.stretches + far)
    yield "stretches", dict(stretches=step.stretches - 5)
    yield "keys", dict(keys=step.keys[:-1])
    yield "values", dict(values=step.values.transpose(1, 2))
    yield "values", dict(values=step.values.to(torch.bfloat16))
    yield "values", dict(values=step.values[:, 1:].contiguous())


def test_bad_steps_are_told_before_anything_is_read(monkeypatch):
    model = make()
    whole, scene = whole_step(tile_linears(model)), Scene(model)
    tokens, positions = scene.step((0, 0, 9), (2, 0, 1), (1, 0, 1))
    step = scene.cache.in_place()
    monkeypatch.setattr(layers_cpu, "library", None)  # a call would be a TypeError
    for name, change in wrong_steps(step):
        scene.cache.in_place = lambda change=change: dataclasses.replace(step, **change)
        with pytest.raises(ParamsError, match=name):
            whole.hidden(tokens, positions, scene.cache)
    with pytest.raises(ParamsError, match=r"positions=\[10\]: must be \[11\]"):
        whole.hidden(tokens, positions[1:], scene.cache)


def test_a_compiled_llm_needs_no_graph():
    """One C++ call does all steps; nothing is left for torch.compile to make."""
    params = SamplingParams(max_tokens=12, temperature=0)
    prompts = ["The sea was", "It was a truth", "Sir Walter", "In the beginning"]
    wanted = [o.token_ids for o in LLM("tiny").generate(prompts, params)]
    llm = LLM("tiny", compile=True)
    calls, real = [], llm.model.whole.hidden
    llm.model.whole.hidden = lambda *args: calls.append(real(*args)) or calls[-1]
    assert [o.token_ids for o in llm.generate(prompts, params)] == wanted
    assert [llm.generate([p], params)[0].token_ids for p in prompts] == wanted
    assert len(calls) > 24 and all(out is not None for out in calls)
    assert llm.model.compile_seconds == {}
