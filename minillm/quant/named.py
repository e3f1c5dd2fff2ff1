"""The schemes that `LLM(quantization=...)` knows by name.

Chapter 11. A name says what the layers' linears keep; activations stay in 16 or 32 bits (W8A16, W4A16), but for
"w8a8" and "fp8" (chapter 13), which multiply in 8 bits, with a scale a token. The head is
as large as many layers together in a small model, and is read at every token, so it is quantised too, to 8 bits at
the least: its errors reach the logits directly. The embedding is only looked up, and stays as it is.
"""

from __future__ import annotations

from minillm.errors import ParamsError, illegal
from minillm.model.decoder import Decoder
from minillm.quant.fp8 import fp8_model
from minillm.quant.linear import quantize_model
from minillm.quant.w8a8 import w8a8_model

NAMED = {
    "int8": dict(bits=8, group_size=None),
    "int4": dict(bits=4, group_size=32),
    "int3": dict(bits=3, group_size=32),
    "int2": dict(bits=2, group_size=32),
    "w8a8": dict(bits=8, group_size=None, activations="int8"),
    "fp8": dict(bits=8, group_size=None, activations="fp8"),
}


def check_name(quantization: str | None) -> None:
    """Called before the weights are loaded."""
    if quantization is not None and (not isinstance(quantization, str) or quantization not in NAMED):
        names = ", ".join(f'"{name}"' for name in NAMED)
        raise ParamsError(illegal("quantization", quantization, f"must be None or one of {names}"))


def quantize_by_name(model: Decoder, quantization: str | None, kernel: str = "auto") -> Decoder:
    """Replace the model's linears in place, rounding to the nearest."""
    check_name(quantization)
    if quantization is None:
        return model
    settings = dict(NAMED[quantization])
    activations = settings.pop("activations", None)
    if activations == "int8":
        w8a8_model(model, keep=("head",), kernel="unpack" if kernel == "unpack" else "auto")
    elif activations == "fp8":
        fp8_model(model, keep=("head",), emulate=kernel == "unpack")
    else:
        quantize_model(model, keep=("head",), kernel=kernel, **settings)
    return quantize_model(model, bits=8, group_size=None, keep=(), kernel=kernel)  # what is left: the head
