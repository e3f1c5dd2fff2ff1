"""Wrong answers to exercise 13: {task: {name: (answer, text in the message)}}."""

SCALE_X = "scale_x = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127  # [tokens, 1]"
SCALE_W = "scale_w = w.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127  # [out, 1]"
SUMS = "sums = a.int() @ b.int().T  # int32 [tokens, out]"
BACK = "return a, b, sums * scale_x * scale_w.T"
LOUD = "loud = torch.cat(batches).abs().amax(0)  # [in]"
COLUMN = "column = torch.cat(weights).abs().amax(0)  # [in]"
FORMULA = "s = loud**alpha / column ** (1 - alpha)"
ONES = "return torch.where((loud > 0) & (column > 0), s, torch.ones_like(s))"
FOLD = "return gain / s, None if bias is None else bias / s, [w * s for w in weights]"
CLAMP = "x = x.clamp(-448, 448)"
EXPONENT = "exponent = (torch.frexp(x).exponent - 1).clamp(min=-6)"
STEP = "step = torch.exp2((exponent - 3).float())"
ROUND = "return (x / step).round() * step"
SMOOTH = "    x, w = x / s, w * s\n    scale_x = x.abs().amax(1, keepdim=True) / 127\n"
SMOOTH_W = "    scale_w = w.abs().amax(1, keepdim=True) / 127\n"
MADE = SMOOTH + SMOOTH_W
CODES = "    a = (x / scale_x).round().to(torch.int8)\n    b = (w / scale_w).round().to(torch.int8)\n"
PUT_BACK = "    return (a.int() @ b.int().T) * scale_x * scale_w.T"
GOOD = {
    "codes": "2 / (90 / 127)",
    "worst": "1 / 17",
    "bytes": "4096 * 11008 + 4 * 11008",
    "rows": "1979e12 / 3.35e12 / 2",
    "speedup": "1 / (0.2 + 0.8 / 2)",
}


def figures(**changed: str) -> str:
    rows = ", ".join(f"{key!r}: {value}" for key, value in {**GOOD, **changed}.items())
    return "def estimates():\n    return {" + rows + "}"


def small(limit: str) -> str:
    """Right on small inputs only."""
    return f"def int8_linear(x, w):\n    if {limit}:\n        return x.to(torch.int8), w.to(torch.int8), x @ w.T\n"


WRONG = {
    "13.int8_linear": {
        "one scale for all tokens": (
            (SCALE_X, "scale_x = x.abs().max().view(1, 1) / 127"),
            "one scale for all tokens",
        ),
        "one scale for W": ((SCALE_W, "scale_w = w.abs().max().view(1, 1) / 127"), "one scale for all of w"),
        "summed in int8": ((SUMS, "sums = (a @ b.T).float()"), "wrapped around"),
        "summed in int16": ((SUMS, "sums = (a.short() @ b.short().T).float()"), "int16"),
        "W truncated": (
            ("b = (w / scale_w).round().to(torch.int8)\n    sums", "b = (w / scale_w).to(torch.int8)\n    sums"),
            "expected",
        ),
        "both truncated": (
            "def int8_linear(x, w):\n"
            "    sx = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127\n"
            "    sw = w.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127\n"
            "    a, b = (x / sx).to(torch.int8), (w / sw).to(torch.int8)\n"
            "    return a, b, (a.int() @ b.int().T) * sx * sw.T",
            "truncated",
        ),
        "128": (
            "def int8_linear(x, w):\n"
            "    sx = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 128\n"
            "    sw = w.abs().amax(1, keepdim=True).clamp(min=1e-30) / 128\n"
            "    a, b = ((v / s).round().clamp(-128, 127).to(torch.int8) for v, s in ((x, sx), (w, sw)))\n"
            "    return a, b, (a.int() @ b.int().T) * sx * sw.T",
            "not 128",
        ),
        "W's scale forgotten": ((BACK, "return a, b, sums * scale_x"), "scales of w are not put back"),
        "x's scale forgotten": ((BACK, "return a, b, sums * scale_w.T"), "scales of x are not put back"),
        "no scale": ((BACK, "return a, b, sums.float()"), "not put back"),
        "divided": ((BACK, "return a, b, sums / scale_x / scale_w.T"), "not divide"),
        "not transposed": ((BACK, "return a, b, sums * scale_x * scale_w"), "raised"),
        "float product": ((BACK, "return a, b, x @ w.T"), "float product"),
        "0 / 0": (
            "def int8_linear(x, w):\n"
            "    sx, sw = (v.abs().amax(1, keepdim=True) / 127 for v in (x, w))\n"
            "    a, b = (x / sx).round(), (w / sw).round()\n"
            "    return a.nan_to_num().to(torch.int8), b.nan_to_num().to(torch.int8), (a @ b.T) * sx * sw.T",
            "above 0",
        ),
        "a channel scale": ((SCALE_X, "scale_x = x.abs().amax(0, keepdim=True).clamp(min=1e-30) / 127"), "expected"),
        "asymmetric": (
            (SCALE_X, "scale_x = (x.amax(1, keepdim=True) - x.amin(1, keepdim=True)).clamp(min=1e-30) / 255"),
            "expected",
        ),
        "a floor under x's scale": ((SCALE_X, SCALE_X.replace("1e-30", "0.01")), "however quiet"),
        "a floor under W's scale": ((SCALE_W, SCALE_W.replace("1e-30", "0.01")), "however quiet"),
        "summed in float16": ((SUMS, "sums = (a.half() @ b.half().T).float()"), "expected"),
        "codes in int32": ((BACK, "return a.int(), b.int(), sums * scale_x * scale_w.T"), "expected dtype int8"),
        "codes in float32": ((BACK, "return a.float(), b.float(), sums * scale_x * scale_w.T"), "expected integer"),
        "an epsilon on the scales": (
            (SCALE_X, "scale_x = x.abs().amax(1, keepdim=True) / 127 + 1e-6"),
            "expected",
        ),
        "only y": ((BACK, "return sums * scale_x * scale_w.T"), "expected"),
        "y and codes the wrong way": ((BACK, "return sums * scale_x * scale_w.T, a, b"), "expected"),
        "the largest, not the largest |x|": (
            (SCALE_X, "scale_x = x.amax(1, keepdim=True).clamp(min=1e-30) / 127"),
            "expected",
        ),
        "right for small inputs": (
            small("x.abs().max() < 5") + "    return x, w, x @ w.T",
            "expected",
        ),
    },
    "13.smooth_scale": {
        "swapped": ((FORMULA, "s = loud ** (1 - alpha) / column**alpha"), "swapped"),
        "upside down": ((FORMULA, "s = column ** (1 - alpha) / loud**alpha"), "upside down"),
        "times": ((FORMULA, "s = loud**alpha * column ** (1 - alpha)"), "must divide"),
        "without the weights": ((FORMULA, "s = loud**alpha"), "left out"),
        "alpha as a factor": (
            (FORMULA, "s = alpha * loud / ((1 - alpha) * column).clamp(min=1e-30)"),
            "exponent",
        ),
        "mean": ((LOUD, "loud = torch.cat(batches).abs().mean(0)"), "mean of |x|"),
        "mean of W": ((COLUMN, "column = torch.cat(weights).abs().mean(0)"), "mean of |w|"),
        "no abs": ((LOUD, "loud = torch.cat(batches).amax(0).clamp(min=0)"), "the largest |x|"),
        "no abs of W": ((COLUMN, "column = torch.cat(weights).amax(0).clamp(min=0)"), "the largest |w|"),
        "rows of W": ((COLUMN, "column = torch.cat(weights).abs().amax(1)"), "each row of w"),
        "first weight": ((COLUMN, "column = weights[0].abs().amax(0)"), "only the first weight"),
        "last weight": ((COLUMN, "column = weights[-1].abs().amax(0)"), "only the last weight"),
        "last batch": ((LOUD, "loud = batches[-1].abs().amax(0)"), "only the last batch"),
        "first batch": ((LOUD, "loud = batches[0].abs().amax(0)"), "only the first batch"),
        "mean of maxima": (
            (LOUD, "loud = torch.stack([x.abs().amax(0) for x in batches]).mean(0)"),
            "mean of the batches",
        ),
        "no care for zeros": ((ONES, "return s"), "silent"),
        "only silent inputs": ((ONES, "return torch.where(loud > 0, s, torch.ones_like(s))"), "must get 1"),
        "not beyond 100": (
            (ONES, "return torch.where((loud > 0) & (column > 0), s, torch.ones_like(s)).clamp(0.01, 100)"),
            "must not be clamped",
        ),
        "the smallest of the weights": (
            (COLUMN, "column = torch.stack([w.abs().amax(0) for w in weights]).amin(0)"),
            "expected",
        ),
        "zeros": ((ONES, "return torch.where((loud > 0) & (column > 0), s, torch.zeros_like(s))"), "must get 1"),
        "clamped as the authors do, ones forgotten": (
            (ONES, "return (loud.clamp(min=1e-5) ** alpha / column.clamp(min=1e-5) ** (1 - alpha)).clamp(min=1e-5)"),
            "must get 1",
        ),
        "always one half": ((FORMULA, "s = (loud / column) ** 0.5"), "expected"),
        "a number": ((ONES, "return s.max()"), "expected"),
    },
    "13.fold": {
        "bias forgotten": ((FOLD, "return gain / s, bias, [w * s for w in weights]"), "bias of the norm"),
        "bias lost": ((FOLD, "return gain / s, None, [w * s for w in weights]"), "bias was lost"),
        "bias times": (
            (FOLD, "return gain / s, None if bias is None else bias * s, [w * s for w in weights]"),
            "not multiplied",
        ),
        "first weight only": (
            (FOLD, "return gain / s, None if bias is None else bias / s, [weights[0] * s, *weights[1:]]"),
            "only the first weight",
        ),
        "other way": (
            (FOLD, "return gain * s, None if bias is None else bias * s, [w / s for w in weights]"),
            "other way round",
        ),
        "both divided": (
            (FOLD, "return gain / s, None if bias is None else bias / s, [w / s for w in weights]"),
            "must be multiplied",
        ),
        "both multiplied": (
            (FOLD, "return gain * s, None if bias is None else bias * s, [w * s for w in weights]"),
            "must be divided",
        ),
        "weights untouched": (
            (FOLD, "return gain / s, None if bias is None else bias / s, weights"),
            "make up for it",
        ),
        "gain untouched": (
            (FOLD, "return gain, None if bias is None else bias / s, [w * s for w in weights]"),
            "gain",
        ),
        "rows": (
            (FOLD, "return gain / s, None if bias is None else bias / s, [w * s[:, None] for w in weights]"),
            "not rows",
        ),
        "in place": (
            "def fold(gain, bias, weights, s):\n"
            "    gain /= s\n"
            "    if bias is not None:\n        bias /= s\n"
            "    return gain, bias, [w * s for w in weights]",
            "in place",
        ),
        "bias needed": ((FOLD, "return gain / s, bias / s, [w * s for w in weights]"), "raised"),
        "one weight back": (
            (FOLD, "return gain / s, None if bias is None else bias / s, weights[0] * s"),
            "expected",
        ),
    },
    "13.e4m3": {
        "half up": ((ROUND, "return (x / step + 0.5).floor() * step"), "all up"),
        "half away": ((ROUND, "return x.sign() * ((x / step).abs() + 0.5).floor() * step"), "away from 0"),
        "truncated": ((ROUND, "return (x / step).trunc() * step"), "truncated"),
        "floor": ((ROUND, "return (x / step).floor() * step"), "rounded down"),
        "no saturation": ((CLAMP, "x = x + 0"), "saturate"),
        "480": ((CLAMP, "x = x.clamp(-480, 480)"), "480"),
        "240": ((CLAMP, "x = x.clamp(-240, 240)"), "240"),
        "flush below the smallest": (
            (ROUND, "return ((x / step).round() * step) * (x.abs() >= 2.0**-9)"),
            "not 0",
        ),
        "flush": ((ROUND, "return ((x / step).round() * step) * (x.abs() >= 2.0**-6)"), "subnormal"),
        "exponent not clamped": ((EXPONENT, "exponent = torch.frexp(x).exponent - 1"), "not clamped at -6"),
        "-7": ((EXPONENT, "exponent = (torch.frexp(x).exponent - 1).clamp(min=-7)"), "not -7"),
        "-5": ((EXPONENT, "exponent = (torch.frexp(x).exponent - 1).clamp(min=-5)"), "-5"),
        "frexp's exponent": ((EXPONENT, "exponent = torch.frexp(x).exponent.clamp(min=-6)"), "off by one"),
        "2 bits": ((STEP, "step = torch.exp2((exponent - 2).float())"), "two bits"),
        "4 bits": ((STEP, "step = torch.exp2((exponent - 4).float())"), "four bits"),
        "E5M2": ("def e4m3(x):\n    return x.clamp(-448, 448).to(torch.float8_e5m2).float()", "that is E5M2"),
        "log2 of 0": ((EXPONENT, "exponent = torch.log2(x.abs()).floor()"), "not clamped"),
        "NaN to 0": ((CLAMP, "x = x.nan_to_num().clamp(-448, 448)"), "nan must stay"),
        "INT8 in disguise": (
            "def e4m3(x):\n    return (x.clamp(-448, 448) / 448 * 127).round() / 127 * 448",
            "expected",
        ),
        "infinity": (
            (ROUND, "return torch.where(x.abs() >= 448, x.sign() * torch.inf, (x / step).round() * step)"),
            "expected",
        ),
        "NaN above, as older casts": (
            (ROUND, "return torch.where(x.abs() == 448, torch.nan, (x / step).round() * step)"),
            "not become nan",
        ),
        "rounded twice": ((CLAMP, "x = x.half().float().clamp(-448, 448)"), "expected"),
        "infinity to NaN": (
            (CLAMP, "x = torch.where(x.isinf(), torch.nan, x).clamp(-448, 448)"),
            "not become nan",
        ),
        "bfloat16": ("def e4m3(x):\n    return x.clamp(-448, 448).bfloat16().float()", "expected"),
    },
    "13.smoothed_linear": {
        "clamped": (
            (
                MADE + CODES,
                "    scale_x = x.abs().amax(1, keepdim=True) / 127\n"
                + SMOOTH_W
                + "    x, w = x / s, w * s\n"
                + CODES.replace(".round()", ".round().clamp(-127, 127)"),
            ),
            "clamping hides",
        ),
        "x mended only": (
            (
                MADE,
                SMOOTH_W + "    x, w = x / s, w * s\n    scale_x = x.abs().amax(1, keepdim=True) / 127\n",
            ),
            "w's scale",
        ),
        "w mended only": (
            (
                MADE,
                "    scale_x = x.abs().amax(1, keepdim=True) / 127\n    x, w = x / s, w * s\n" + SMOOTH_W,
            ),
            "x's scale",
        ),
        "not smoothed": ((SMOOTH, SMOOTH.replace("    x, w = x / s, w * s\n", "")), "not used any more"),
        "float": ("def smoothed_linear(x, w, s):\n    return x @ w.T", "float product"),
        "float, smoothed": ("def smoothed_linear(x, w, s):\n    return (x / s) @ (w * s).T", "float product"),
        "sides swapped": ((SMOOTH, SMOOTH.replace("x / s, w * s", "x * s, w / s")), "swapped"),
        "only x smoothed": ((SMOOTH, SMOOTH.replace("w * s", "w")), "expected"),
        "one scale for all": (
            (SMOOTH, SMOOTH.replace("x.abs().amax(1, keepdim=True)", "x.abs().max().view(1, 1)")),
            "expected",
        ),
        "w's rows": ((SMOOTH, SMOOTH.replace("w * s", "w * s.mean()")), "expected"),
        "the bug, renamed": (
            "def smoothed_linear(x, w, s):\n"
            "    sx = x.abs().amax(1, keepdim=True) / 127\n"
            "    sw = w.abs().amax(1, keepdim=True) / 127\n"
            "    a, b = (x / s / sx).round().to(torch.int8), (w * s / sw).round().to(torch.int8)\n"
            "    return (a.int() @ b.int().T) * sx * sw.T",
            "as it was",
        ),
        "scale put back twice": ((PUT_BACK, PUT_BACK + " * s.mean()"), "expected"),
    },
    "13.estimates": {
        "255 codes": (figures(codes="2 / (90 / 255)"), "two sides"),
        "128": (figures(codes="2 / (180 / 256)"), "127 on each side"),
        "45": (figures(codes="90 / 2"), "upside down"),
        "1/8": (figures(worst="1 / 8"), "whole step"),
        "1/16": (figures(worst="1 / 16"), "1 + 1/16"),
        "E5M2": (figures(worst="1 / 9"), "E5M2"),
        "two bytes": (figures(bytes="2 * 4096 * 11008"), "one byte"),
        "bits": (figures(bytes="8 * 4096 * 11008"), "bits, not bytes"),
        "a float": (figures(bytes="4 * 4096 * 11008"), "4 bytes"),
        "rows x 2": (figures(rows="1979e12 / 3.35e12"), "two operations"),
        "rows of bfloat16": (figures(rows="989e12 / 3.35e12 / 2"), "bfloat16"),
        "2 x": (figures(speedup="2.0"), "rest stays"),
        "1.8": (figures(speedup="0.2 + 0.8 * 2"), "averaged"),
        "0.6": (figures(speedup="0.2 + 0.8 / 2"), "inverse"),
        "text": (figures(rows="'295'"), "expected a number"),
        "a key short": ("def estimates():\n    return {'codes': 2.82}", "KeyError"),
    },
}
