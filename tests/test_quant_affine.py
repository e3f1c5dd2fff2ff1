"""Affine quantisation against bounds, torch's fake quantisation and NumPy's packbits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import ParamsError
from minillm.quant.affine import Scheme, dequantize, fake_quantize, from_codes, quantize, round_to, to_blocks
from minillm.quant.packing import pack, packed_size, unpack

WIDTHS = (2, 3, 4, 5, 6, 7, 8)


def data(rows=6, columns=96, seed=0, shift=0.0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) + shift


def schemes(bits):
    for symmetric in (True, False):
        for granularity in ("tensor", "channel", "token"):
            yield Scheme(bits, symmetric, granularity)
        yield Scheme(bits, symmetric, "group", 32)
    yield Scheme(bits, False, "group", 32, "float")
    yield Scheme(bits, False, "channel", zero="float")


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shift", [0.0, 3.0, -50.0])
def test_a_round_trip_errs_by_at_most_half_a_step(bits, shift):
    """Or a whole one: an integer zero point may be off by half a step, and codes are clipped at the range's ends."""
    x = data(shift=shift)
    for scheme in schemes(bits):
        q = quantize(x, scheme)
        error = to_blocks((dequantize(q) - x).abs(), scheme)  # [..., size]
        steps = 1.0 if not scheme.symmetric and scheme.zero == "integer" else 0.5
        assert (error <= q.scale.unsqueeze(-1) * steps * (1 + 1e-4) + 1e-6 * x.abs().max()).all(), scheme
        assert q.values.shape == x.shape and scheme.low <= int(q.values.min()) <= int(q.values.max()) <= scheme.high
        assert int(q.codes().min()) >= 0 and int(q.codes().max()) < 2**bits
        assert torch.equal(from_codes(q.codes(), scheme), q.values)


@pytest.mark.parametrize("bits", WIDTHS)
def test_equal_to_torchs_fake_quantize(bits):
    """Scale and zero point from the formulas of the paper, row by row; the rounding by torch."""
    x = data(shift=0.4).double().float()
    for symmetric in (True, False):
        scheme = Scheme(bits, symmetric, "channel")
        rows = []
        for row in x:
            if symmetric:
                high = 2 ** (bits - 1) - 1
                scale, zero, low = row.abs().max().item() / high, 0, -high
            else:
                low, high = 0, 2**bits - 1
                bottom, top = min(row.min().item(), 0.0), max(row.max().item(), 0.0)
                scale = (top - bottom) / high
                zero = round(-bottom / scale)
            rows.append(torch.fake_quantize_per_tensor_affine(row, scale, zero, low, high))
        expected = torch.stack(rows)
        got = fake_quantize(x, scheme)
        step = quantize(x, scheme).scale
        assert ((got - expected).abs() > 1e-5).float().mean() < 0.01  # ties may fall to the other side
        assert ((got - expected).abs() <= step * 1.001).all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_zero_stays_zero(bits):
    x = torch.relu(data(shift=0.2))
    for scheme in schemes(bits):
        if scheme.zero == "integer":
            assert (fake_quantize(x, scheme)[x == 0] == 0).all(), scheme
    negative = -torch.relu(data()) - 1
    negative[:, 0] = 0
    assert (fake_quantize(negative, Scheme(bits, False, "channel"))[:, 0] == 0).all()


def test_a_grid_is_kept_exactly():
    """Numbers that lie on a scheme's own grid come back bit for bit."""
    for scheme in schemes(4):
        codes = torch.randint(scheme.low, scheme.high + 1, (4, 64), generator=torch.Generator().manual_seed(3))
        for size in (64, 32):  # every block holds both ends of the range
            codes[:, ::size], codes[:, 1::size] = scheme.low, scheme.high
        x = codes.float() * 0.25 - (0 if scheme.symmetric else 1.0 if scheme.zero == "integer" else 0.7)
        assert torch.allclose(fake_quantize(x, scheme), x, atol=1e-6), scheme


def test_groups_are_not_better_than_their_neighbours_by_luck():
    """An outlier costs its own group only; with one scale it costs everyone."""
    x = data(4, 128)
    x[2, 5] = 100.0
    whole, row, group = (
        (fake_quantize(x, s) - x).square().mean(-1)
        for s in (Scheme(4, True, "tensor"), Scheme(4, True, "channel"), Scheme(4, True, "group", 32))
    )
    assert (whole[[0, 1, 3]] > 0.5).all() and (row[[0, 1, 3]] < 0.05).all()
    assert group[2] < row[2] / 2
    assert (fake_quantize(x, Scheme(4, True, "group", 32))[2, 32:] - x[2, 32:]).square().mean() < 0.05


def test_token_and_channel_scale_the_last_axis_of_any_shape():
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    q = quantize(x, Scheme(8, True, "token"))
    assert q.scale.shape == (2, 3, 5, 1)
    assert torch.equal(q.scale[..., 0] * 127, x.abs().amax(-1)) or torch.allclose(
        q.scale[..., 0] * 127, x.abs().amax(-1)
    )
    assert quantize(x, Scheme(8, True, "group", 4)).scale.shape == (2, 3, 5, 2)
    assert quantize(x, Scheme(8, True, "tensor")).scale.shape == (1,)
    assert fake_quantize(x.transpose(1, 3), Scheme(8)).shape == (2, 8, 5, 3)  # not contiguous


def test_constants_and_types():
    for value in (0.0, 2.5, -2.5, 1e-30):
        x = torch.full((2, 32), value)
        for scheme in schemes(4):
            assert torch.allclose(fake_quantize(x, scheme), x, atol=1e-37), (value, scheme)
    half = data().bfloat16()
    assert fake_quantize(half, Scheme(8)).dtype == torch.bfloat16
    assert quantize(half, Scheme(8)).scale.dtype == torch.float32
    assert quantize(data().double(), Scheme(8)).scale.dtype == torch.float64


def test_given_scales_are_used_and_clipped():
    blocks = torch.tensor([[-10.0, -1.0, 0.4, 0.6, 9.0]])
    got = round_to(blocks, torch.tensor([1.0]), None, Scheme(4))
    assert got.tolist() == [[-7, -1, 0, 1, 7]]
    got = round_to(blocks, torch.tensor([1.0]), torch.tensor([8.0]), Scheme(4, False))
    assert got.tolist() == [[0, 7, 8, 9, 15]]


def test_bits_per_weight():
    assert Scheme(4, True, "group", 32).bits_per_weight((64, 64)) == 4.5
    assert Scheme(4, False, "group", 32).bits_per_weight((64, 64)) == 5.0
    assert Scheme(4, False, "group", 32).bits_per_weight((64, 64), zero_bits=4) == 4.625
    assert Scheme(8).bits_per_weight((64, 64)) == 8.25
    assert Scheme(8, True, "tensor").bits_per_weight((64, 64)) == 8 + 16 / 4096


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(bits=1), "bits=1"),
        (dict(bits=9), "2 to 8"),
        (dict(bits=True), "bits=True"),
        (dict(bits=4.0), "bits=4.0"),
        (dict(symmetric="yes"), "symmetric='yes'"),
        (dict(granularity="row"), "granularity='row'"),
        (dict(granularity="group"), "group_size=None"),
        (dict(granularity="group", group_size=0), "group_size=0"),
        (dict(granularity="channel", group_size=32), "group_size=32"),
        (dict(zero="half", symmetric=False), "zero='half'"),
        (dict(zero="float"), "zero='float'"),
    ],
)
def test_illegal_schemes(arguments, text):
    with pytest.raises(ParamsError, match=text):
        Scheme(**arguments)


def test_illegal_tensors():
    with pytest.raises(ParamsError, match="group_size=32: must divide the last axis, 40"):
        quantize(torch.randn(4, 40), Scheme(4, True, "group", 32))
    with pytest.raises(ParamsError, match="floating"):
        quantize(torch.ones(4, dtype=torch.int32), Scheme(4))
    with pytest.raises(ParamsError, match="at least one"):
        quantize(torch.tensor(1.0), Scheme(4))
    with pytest.raises(ParamsError, match="at least one"):
        quantize(torch.empty(0, 4), Scheme(4))


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """The oracle: every code's bits, lowest first, in one stream for each row, packed by NumPy."""
    spread = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    return np.packbits(spread.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**31))
def test_packing_equals_packbits_and_comes_back(bits, words, rows, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, 2, 8 * words), dtype=np.uint8)
    packed = pack(torch.from_numpy(codes), bits)
    assert packed.dtype == torch.uint8 and packed.shape[-1] == packed_size(8 * words, bits) == words * bits
    assert np.array_equal(packed.numpy(), stream(codes, bits))
    assert np.array_equal(unpack(packed, bits).numpy(), codes)


def test_every_byte_comes_back():
    for bits, count in ((2, 256), (4, 256), (8, 256), (3, 255), (5, 255)):
        packed = torch.arange(256, dtype=torch.uint8)[:count]
        assert torch.equal(pack(unpack(packed, bits), bits), packed)


def test_four_bits_as_gptq_keeps_them():
    """Eight codes in an int32, the first in the lowest bits."""
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15]], dtype=torch.uint8)
    expected = sum(int(c) << (4 * i) for i, c in enumerate(codes[0]))
    assert int(np.frombuffer(pack(codes, 4).numpy().tobytes(), "<u4")[0]) == expected


def test_packing_refuses_what_it_would_spoil():
    with pytest.raises(ParamsError, match=r"-1, 3.*adding 8"):
        pack(torch.tensor([-1, 3]), 4)
    with pytest.raises(ParamsError, match=r"0 \.\. 15"):
        pack(torch.tensor([1, 16]), 4)
    with pytest.raises(ParamsError, match="count=3: must be a multiple of 2"):
        pack(torch.tensor([1, 2, 3]), 4)
    with pytest.raises(ParamsError, match="count=4: must be a multiple of 8 at 3 bits"):
        packed_size(4, 3)
    with pytest.raises(ParamsError, match="bits=0"):
        unpack(torch.zeros(4, dtype=torch.uint8), 0)
    with pytest.raises(ParamsError, match="multiple of 3 bytes"):
        unpack(torch.zeros(4, dtype=torch.uint8), 3)
    with pytest.raises(ParamsError, match="uint8"):
        unpack(torch.zeros(4, dtype=torch.int32), 4)
