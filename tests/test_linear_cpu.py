"""The tiled product in C++ against float64: any shape, any number of rows, and no row that depends on another."""

import copy
import shutil
import types

import pytest
import torch
from torch import nn

from minillm import LLM, SamplingParams
from minillm.errors import ParamsError
from minillm.kernels import cpp, linear_cpu
from minillm.kernels.linear_cpu import TiledLinear, TiledMLP, joins, product, tile_linears
from minillm.model.decoder import MLP
from minillm.model.weights import load_model

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    cpp.why_not(torch.float32, CPU) is not None, reason=str(cpp.why_not(torch.float32, CPU))
)
# Inputs: fewer than a part of the loop, exactly one, more; outputs: fewer than a panel, whole panels, a rest.
SHAPES = ((1, 1), (7, 5), (768, 32), (769, 24), (800, 97))
ROWS = (1, 2, 3, 4, 5, 12, 13, 31, 40, 121)  # below, at and above one and two tiles, and a block


def linear(inputs: int, outputs: int, dtype=torch.float32, bias: bool = True) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    generator = torch.Generator().manual_seed(inputs * outputs)
    for x in made.parameters():
        x.data.copy_(torch.randn(x.shape, generator=generator))
    return made.requires_grad_(False)


def inputs(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.skipif(not any(map(shutil.which, cpp.COMPILERS)), reason="there is no C++ compiler")
def test_the_sources_compile_where_there_is_a_compiler():
    """All other tests of the kernels are skipped where they do not."""
    assert cpp.library().linear_wide() > 0


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", (True, False))
def test_equals_the_product_in_float64(shape, bias):
    plain = linear(*shape, bias=bias)
    tiled = TiledLinear(plain)
    for rows in ROWS:
        x = inputs(rows, shape[0])
        wanted = copy.deepcopy(plain).double()(x.double())
        # A sum of n products of standard normals, rounded n times: about n eps, and n is 800 at most.
        torch.testing.assert_close(tiled(x).double(), wanted, rtol=1e-5, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_summed_in_float32_and_rounded_once(shape):
    plain = linear(*shape, dtype=torch.bfloat16)
    tiled = TiledLinear(plain)
    assert tiled.packed.dtype == torch.bfloat16
    for rows in ROWS:
        x = inputs(rows, shape[0], dtype=torch.bfloat16)
        got = tiled(x)
        assert got.dtype == torch.bfloat16
        wanted = copy.deepcopy(plain).double()(x.double()).bfloat16()
        torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-3)  # one step of bfloat16, where a sum is a tie


@needs_compiler
@pytest.mark.parametrize("dtype", cpp.DTYPES)
def test_a_row_does_not_depend_on_the_rows_beside_it_or_on_the_threads(dtype):
    """To the last bit. Attention and the graphs for one or two rows have an order of their own."""
    tiled, threads = TiledLinear(linear(800, 47, dtype)), torch.get_num_threads()
    x = inputs(ROWS[-1], 800, dtype=dtype)
    alone = torch.cat([tiled(row[None]) for row in x])
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for rows in ROWS:
                assert torch.equal(tiled(x[:rows]), alone[:rows]), f"{rows} rows, {count} threads"
    finally:
        torch.set_num_threads(threads)


@needs_compiler
def test_infinities_and_nan_stay_in_their_row():
    tiled = TiledLinear(linear(40, 20))
    x = inputs(8, 40)
    clean = tiled(x)
    x[3, 5], x[6, 1] = torch.nan, torch.inf
    got = tiled(x)
    assert got[3].isnan().all() and not got[6].isfinite().any()
    kept = [0, 1, 2, 4, 5, 7]
    assert torch.equal(got[kept], clean[kept])


@needs_compiler
def test_shapes_of_x_and_inputs_with_gaps():
    plain = linear(24, 33)
    tiled = TiledLinear(plain)
    x = inputs(2, 3, 48)[..., ::2]
    assert tiled(x).shape == (2, 3, 33)
    assert torch.equal(tiled(x), tiled(x.contiguous()))
    assert tiled(x[:0]).shape == (0, 3, 33) and tiled(x[0, 0]).shape == (33,)


@needs_compiler
@pytest.mark.parametrize(
    ("x", "match"),
    [
        (torch.zeros(2, 23), r"\[2, 23\].*\[\.\.\., 24\]"),
        (torch.zeros(2, 24, dtype=torch.float64), "float64"),
        (torch.zeros(2, 24, device="meta"), "meta"),
    ],
)
def test_what_would_read_strange_memory_is_refused(x, match, monkeypatch):
    packed = TiledLinear(linear(24, 33)).packed
    monkeypatch.setattr(linear_cpu, "library", None)  # a call would be a TypeError
    with pytest.raises(ParamsError, match=match):
        product(x, packed, 24, 33)
    for inputs, outputs in ((26, 33), (24, 200)):
        with pytest.raises(ParamsError, match=rf"packed=.*\[{outputs}, {inputs}\]"):
            product(torch.zeros(2, inputs), packed, inputs, outputs)


def mlp_of(hidden: int, ffn: int, dtype=torch.float32, **changes) -> MLP:
    config = load_model("tiny").config.with_changes(hidden_size=hidden, intermediate_size=ffn, **changes)
    made = MLP(config).to(dtype).requires_grad_(False)
    for part, shape in (("gate_up", (hidden, made.gate_up.out_features)), ("down", (ffn, hidden))):
        getattr(made, part).weight = linear(*shape, dtype=dtype).weight
    return made


def tiled(mlp: MLP) -> MLP:
    mlp.gate_up, mlp.down = TiledLinear(mlp.gate_up), TiledLinear(mlp.down)
    return mlp


@needs_compiler
@pytest.mark.parametrize("dtype", cpp.DTYPES)
@pytest.mark.parametrize(("hidden", "ffn"), ((8, 3), (24, 40), (33, 100)))
def test_an_mlp_in_one_call_equals_float64(hidden, ffn, dtype):
    plain = mlp_of(hidden, ffn, dtype)
    exact = copy.deepcopy(plain).double()
    joined = TiledMLP(tiled(plain))
    for rows in ROWS:
        x = inputs(rows, hidden, dtype=dtype) * 4  # gates of both signs, far from 0 and near it
        got, wanted = joined(x), exact(x.double())
        assert got.dtype == dtype
        rounding = 1e-5
        if dtype == torch.bfloat16:  # rounded at the end, and, where pairs are multiplied, between the two products
            rounding = 2**-8 * (2 if cpp.library().linear_pairs() else 1)
        assert (got - wanted).abs().max() <= rounding * wanted.abs().max()
    assert torch.equal(joined(x[:5]), joined(x)[:5])
    assert joined(x[:0]).shape == (0, hidden) and joined(x[0]).shape == (hidden,)


@needs_compiler
def test_a_gate_of_any_size_gives_a_number():
    mlp = mlp_of(1, 1)
    mlp.gate_up.weight[:], mlp.down.weight[:] = 1.0, 1.0
    x = torch.tensor([-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0])[:, None]
    wanted = torch.nn.functional.silu(x) * x
    torch.testing.assert_close(TiledMLP(tiled(mlp))(x), wanted, rtol=1e-6, atol=1e-30)


@needs_compiler
def test_only_what_computes_the_same_is_joined():
    assert joins(tiled(mlp_of(8, 16)))
    assert not joins(mlp_of(8, 16)) and not joins(tiled(mlp_of(8, 16, activation="gelu_tanh")))
    assert not joins(tiled(mlp_of(8, 16, gated_mlp=False)))
    biased = tiled(mlp_of(8, 16))
    biased.down.bias = torch.zeros(8)
    assert not joins(biased)
    with pytest.raises(ParamsError, match=r"\[2, 9\].*\[\.\.\., 8\]"):
        TiledMLP(tiled(mlp_of(8, 16)))(torch.zeros(2, 9))


@needs_compiler
def test_a_tiled_model_keeps_its_logits():
    model = load_model("tiny")
    ids = torch.arange(5, 25)[None]
    with torch.inference_mode():
        wanted = model(ids)
        got = tile_linears(model)(ids)
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert isinstance(model.layers[0].attn.qkv, TiledLinear) and isinstance(model.head, TiledLinear)
    assert all(isinstance(block.mlp, TiledMLP) for block in model.layers)
    assert model.head.packed.shape[0] == -(-model.config.vocab_size // cpp.library().linear_wide())


@needs_compiler
@pytest.mark.parametrize("native", (False, True))
@pytest.mark.parametrize("pairs", (False, True))
def test_16_bits_are_tiled_unless_only_the_library_knows_the_instructions(monkeypatch, native, pairs):
    """native: oneDNN has some for them. pairs: linear.cpp has."""
    told = types.SimpleNamespace(linear_wide=cpp.library().linear_wide, linear_pairs=lambda: pairs)
    monkeypatch.setattr(linear_cpu, "library", lambda: told)
    monkeypatch.setattr(linear_cpu, "faster_linear", lambda linear: None)
    monkeypatch.setattr(linear_cpu, "row_at_a_time", lambda linear: not native)
    for dtype, tiled in (("float32", True), ("bfloat16", pairs or not native), ("float16", False)):
        kinds = {type(m) for m in tile_linears(load_model("tiny", dtype=dtype)).modules()}
        assert (TiledLinear in kinds) == tiled, dtype


@needs_compiler
@pytest.mark.parametrize("pairs", (False, True))
@pytest.mark.parametrize("dtype", cpp.DTYPES)
def test_panels_hold_every_weight_once_and_zeros_behind(monkeypatch, dtype, pairs):
    told = types.SimpleNamespace(linear_wide=lambda: 8, linear_pairs=lambda: pairs)
    monkeypatch.setattr(linear_cpu, "library", lambda: told)
    weight = torch.arange(1, 11 * 5 + 1, dtype=dtype).view(11, 5)
    packed = linear_cpu.panels(weight)
    paired = pairs and dtype == torch.bfloat16
    assert packed.shape == ((2, 3, 8, 2) if paired else (2, 5, 8)) and packed.is_contiguous()
    for out in range(16):
        for i in range(6 if paired else 5):
            got = packed[out // 8, i // 2, out % 8, i % 2] if paired else packed[out // 8, i, out % 8]
            assert got == (weight[out, i] if out < 11 and i < 5 else 0)


def test_without_a_compiler_the_library_s_product_serves(monkeypatch):
    monkeypatch.setattr(linear_cpu, "why_not", lambda dtype, device: "no compiler")
    assert {TiledLinear} & {type(m) for m in tile_linears(load_model("tiny")).modules()} == set()


@needs_compiler
def test_a_compiled_model_takes_it():
    llm = LLM("tiny", compile=True)
    params = SamplingParams(max_tokens=12, temperature=0)
    prompts = ["The sea was", "It was a truth", "Sir Walter", "In the beginning"]
    assert isinstance(llm.model.model.head, TiledLinear)
    wanted = [o.token_ids for o in LLM("tiny").generate(prompts, params)]
    assert [o.token_ids for o in llm.generate(prompts, params)] == wanted
