"""The compiled decoder gives what the plain one gives: every family, any number of rows, any cache."""

import copy
import gc
import shutil

import pytest
import torch

import minillm.model.compiled as compiled
from minillm import LLM, SamplingParams
from minillm.cache.contiguous import ContiguousCache
from minillm.errors import ParamsError
from minillm.model import compiled_calls
from minillm.model.compiled import FEW, FEW_OF_16_BITS, MANY, CompiledDecoder
from minillm.model.compiled_calls import CalledLinear
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder, init_weights
from minillm.model.row_linear import RowLinear
from minillm.quant.named import quantize_by_name

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="torch.compile needs a C++ compiler"
)

PLAIN = dict(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_length=64,
)
# Each switch of the decoder once: what is compiled is its code, so what matters is every branch, not every family.
SWITCHES = {
    "llama": {},
    "gemma": dict(
        post_norms=True,
        attention_softcap=20.0,
        logit_softcap=15.0,
        embedding_scale=6.9,
        windows=(5, None),
        activation="gelu_tanh",
        qk_norm=True,
        tie_embeddings=True,
    ),
    "gpt2": dict(
        norm_kind="layer",
        positions="learned",
        gated_mlp=False,
        activation="gelu",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        num_kv_heads=4,
    ),
}


def make(**switches) -> Decoder:
    return init_weights(Decoder(ModelConfig(**PLAIN | switches)), seed=1).eval().requires_grad_(False)


@torch.inference_mode()
def steps(model, rows: int, dtype=torch.float32) -> list[torch.Tensor]:
    """Logits of a prefill and of five decode steps of `rows` sequences."""
    config = model.config
    ids = torch.randint(1, config.vocab_size, (rows, 12), generator=torch.Generator().manual_seed(rows))
    cache = ContiguousCache(config, rows, 16, dtype)
    out = [model(ids[:, :7], cache=cache)]
    return out + [model(ids[:, t : t + 1], cache=cache) for t in range(7, 12)]


def close(got, expected, tolerance) -> bool:
    pairs = zip(got, expected)
    return all(g.shape == e.shape and (g - e).abs().max() <= tolerance * e.abs().max() for g, e in pairs)


@needs_compiler
@pytest.mark.parametrize("family", SWITCHES)
def test_compiled_logits_equal_plain_ones(family):
    model = make(**SWITCHES[family])
    plain, fast = copy.deepcopy(model), CompiledDecoder(model)
    for rows in (1, 3, 2, 5, 1):
        assert close(steps(fast, rows), steps(plain, rows), 1e-5), f"{rows} rows"
    assert fast.why_eager is None
    assert set(fast.compile_seconds) == {1, 2, MANY}, "one graph for one row, one for two, one for more"


@needs_compiler
def test_many_rows_can_be_left_as_they_are():
    model = make()
    plain, fast = copy.deepcopy(model), CompiledDecoder(model, many=False)
    for rows in (1, 3):
        assert close(steps(fast, rows), steps(plain, rows), 1e-5)
    assert set(fast.compile_seconds) == {1}


@needs_compiler
def test_two_models_and_two_dtypes_keep_their_own_graphs():
    """The graphs of all models share one function: what is not checked between calls must not be shared."""
    first, second = make(num_layers=4), make(num_layers=4, intermediate_size=96, norm_eps=1e-6)
    half = copy.deepcopy(first).to(torch.bfloat16)
    plain = [copy.deepcopy(m) for m in (first, second)]
    fast = [CompiledDecoder(m) for m in (first, second)]
    half_plain, half_fast = copy.deepcopy(half), CompiledDecoder(half)
    for rows in (1, 4):
        for a, b in zip(fast, plain):
            assert close(steps(a, rows), steps(b, rows), 1e-5)
        # Both round to 8 bits of mantissa in other places: a few steps of 2^-8 over two layers.
        assert close(steps(half_fast, rows, torch.bfloat16), steps(half_plain, rows, torch.bfloat16), 4e-2)
    assert [each.why_eager for each in (*fast, half_fast)] == [None] * 3


@needs_compiler
def test_llm_compiled_gives_the_same_tokens():
    params = SamplingParams(max_tokens=12, temperature=0)
    prompts = ["The sea was", "It was a truth", "Sir Walter", "In the beginning"]
    plain = [o.token_ids for o in LLM("tiny").generate(prompts, params)]
    llm = LLM("tiny", compile=True, attention="sdpa")  # "cpp" needs no graph
    assert [o.token_ids for o in llm.generate(prompts, params)] == plain
    assert [llm.generate([p], params)[0].token_ids for p in prompts] == plain
    assert llm.model.why_eager is None and {1, MANY} <= set(llm.model.compile_seconds)


@needs_compiler
@pytest.mark.parametrize("quantization", ["int8", "int4", "int3"])
def test_quantised_models_compile_too(quantization):
    """INT8 takes part as multiply and sum, INT4 and INT3 are called. The eager kernels round x to bfloat16 first."""
    model = quantize_by_name(make(hidden_size=64), quantization)
    exact = quantize_by_name(make(hidden_size=64), quantization, kernel="unpack")
    fast = CompiledDecoder(model)
    for rows in (1, 2, 4):
        assert close(steps(fast, rows), steps(exact, rows), 2e-2)
    assert fast.why_eager is None
    if quantization == "int8":
        with torch.inference_mode():  # nothing is rounded here: float32's own tolerance
            x = torch.randn(2, 64)
            got = fast.few.layers[0].attn.qkv(x)
        assert close([got], [exact.layers[0].attn.qkv(x)], 1e-5)


def test_weights_are_shared_not_copied():
    model = make(tie_embeddings=True)
    embedding = model.embed.weight.data_ptr()
    fast = CompiledDecoder(model)
    if fast.why_eager is None:
        assert fast.few.embed.weight.data_ptr() == fast.few.head.weight.data_ptr() == embedding
        assert isinstance(fast.few.head, RowLinear) and isinstance(fast.many.head, CalledLinear)
        assert not list(fast.many.layers[0].attn.out.parameters()), (
            "the graph for many rows holds no linear's weights"
        )


def test_a_dead_model_leaves_nothing_registered():
    fast = CompiledDecoder(make())
    key = getattr(fast, "key", None)
    del fast
    gc.collect()
    assert key not in compiled_calls._MODELS


def test_without_a_compiler_the_model_runs_as_it_was(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    model = make()
    plain, fast = copy.deepcopy(model), CompiledDecoder(model)
    assert "C++ compiler" in fast.why_eager
    assert close(steps(fast, 1), steps(plain, 1), 1e-5) and not fast.compile_seconds


def test_a_failing_compiler_is_named_once_and_the_step_still_runs(monkeypatch):
    model = make()
    plain, fast = copy.deepcopy(model), CompiledDecoder(model)
    if fast.why_eager is not None:
        pytest.skip(fast.why_eager)

    def broken(*_):
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(fast, "_few", broken)
    assert close(steps(fast, FEW[-1])[1:], steps(plain, FEW[-1])[1:], 1e-5)
    assert fast.why_eager == "torch.compile failed: no space left on device"


@needs_compiler
def test_16_bits_of_up_to_8_rows_are_multiplied_as_sums_where_torch_takes_them_one_by_one(monkeypatch):
    """Rows between the sizes are padded, and the padding never reaches the cache."""
    monkeypatch.setattr(compiled, "row_at_a_time", lambda linear: True)
    model = make(tie_embeddings=True).to(torch.bfloat16)
    plain, fast = copy.deepcopy(model), CompiledDecoder(model)
    for rows in (3, 7, 8):
        got, expected = (steps(each, rows, torch.bfloat16) for each in (fast, plain))
        assert close(got, expected, 0.04)  # both round to 8 bits of mantissa, in other places
    assert fast.why_eager is None, fast.why_eager
    assert [size for size in fast.compile_seconds if size != MANY] == [4, 8] and fast.few_sizes == FEW_OF_16_BITS


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_row_linear_equals_float64(rows, dtype, bias):
    torch.manual_seed(0)
    linear = torch.nn.Linear(130, 70, bias=bias).to(dtype).requires_grad_(False)
    x = torch.randn(rows, 130).to(dtype)
    expected = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    got = RowLinear(linear)(x)
    assert got.dtype == dtype
    assert (got - expected).abs().max() <= {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype] * expected.abs().max()


def test_a_copy_would_call_back_to_the_original():
    with pytest.raises(TypeError, match=r"cannot be copied.*copy the model before"):
        copy.deepcopy(CompiledDecoder(make()))


def test_compile_must_be_a_flag():
    with pytest.raises(ParamsError, match="compile='yes'"):
        LLM("tiny", compile="yes")


@needs_compiler
def test_the_benchmark_checks_tokens_and_times_all_sides():
    from minillm.engine.compiled_bench import bench_compile

    figures = {f.name: f for f in bench_compile(("tiny",), (1,), ("float32",), prompt=3, tokens=4, repeats=1)}
    prefix, ways = "compile.tiny.float32", ("plain", "graphs", "whole")  # what compiles a graph compiles the kernels
    ratios = ("graphs_over_plain", "whole_over_plain", "whole_over_graphs")
    assert set(figures) == {f"{prefix}.seconds", *(f"{prefix}.batch1.{key}" for key in (*ways, *ratios))}
    rate = {way: figures[f"{prefix}.batch1.{way}"].value for way in ways}
    for ratio in ratios:
        fast, slow = ratio.split("_over_")
        assert figures[f"{prefix}.batch1.{ratio}"].value == pytest.approx(rate[fast] / rate[slow])
    assert figures[f"{prefix}.seconds"].value > 0
