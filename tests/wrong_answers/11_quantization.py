"""Plausible wrong answers to exercise 11: each must be rejected, with the text that names the mistake."""

WRONG = {
    "11.quantise": {
        "one scale in all": (
            ("scale = x.abs().amax(-1) / top", "scale = (x.abs().amax() / top).expand(len(x))"),
            "each row has its own",
        ),
        "one range in all": (
            (
                "low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)",
                "low, high = (v.expand(len(x)) for v in (x.amin().clamp(max=0), x.amax().clamp(min=0)))",
            ),
            "scale",
        ),
        "2^b steps": (("scale = (high - low) / (2**bits - 1)", "scale = (high - low) / 2**bits"), "scale"),
        "2^(b-1) steps": (
            (
                "top = 2 ** (bits - 1) - 1\n        scale = x.abs().amax(-1) / top",
                "top = 2 ** (bits - 1) - 1\n        scale = x.abs().amax(-1) / (top + 1)",
            ),
            "one step fewer",
        ),
        "range without 0": (("x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)", "x.amin(-1), x.amax(-1)"), "hold 0"),
        "cut off": (("(x / scale[:, None]).round()", "(x / scale[:, None]).trunc()"), "not rounding"),
        "cut off by the conversion": (
            ("(x / scale[:, None] + zero[:, None]).round()", "(x / scale[:, None] + zero[:, None])"),
            "q",
        ),
        "zero not rounded": (("zero = (-low / scale).round()", "zero = -low / scale"), "whole number"),
        "zero with the other sign": (
            ("return q.to(torch.int32), scale, zero\n", "return q.to(torch.int32), scale, -zero\n"),
            "zero",
        ),
        "zero not added": (("(x / scale[:, None] + zero[:, None])", "(x / scale[:, None])"), "not added"),
        "int8 codes": (
            ("q.to(torch.int32), scale, zero", "q.to(torch.int8), scale, zero"),
            "q: expected",
        ),
        "zero cut off": (("zero = (-low / scale).round()", "zero = (-low / scale).trunc()"), "zero: expected"),
        "not clamped": ((".round().clamp(0, 2**bits - 1)", ".round()"), "clamp after rounding"),
        "steps from low": (
            ("(x / scale[:, None] + zero[:, None]).round()", "((x - low[:, None]) / scale[:, None]).round()"),
            "q: expected",
        ),
        "signed maximum": (("x.abs().amax(-1) / top", "x.amax(-1) / top"), "absolute"),
        "floats": (
            ("return q.to(torch.int32), scale, torch.zeros_like(scale)", "return q, scale, torch.zeros_like(scale)"),
            "integers",
        ),
        "always symmetric": (("    if symmetric:\n        top", "    if True:\n        top"), "scale"),
        "only 4 bits": (("    if symmetric:\n        top", "    bits = 4\n    if symmetric:\n        top"), "scale"),
        "the scale kept as a column": (
            ("return q.to(torch.int32), scale, zero\n", "return q.to(torch.int32), scale[:, None], zero\n"),
            "shape",
        ),
    },
    "11.pack": {
        "high bits first": (
            ("shifts = bits * torch.arange(per)", "shifts = bits * torch.arange(per).flip(0)"),
            "lowest bits",
        ),
        "halves of a row": (
            ("codes.unflatten(-1, (-1, per)).to(torch.int32)", "codes.unflatten(-1, (per, -1)).mT.to(torch.int32)"),
            "first half of a row",
        ),
        "not packed": ("def pack(codes, bits): return codes", "not packed"),
        "4 bits only": ("def pack(codes, bits): return codes[..., 0::2] | codes[..., 1::2] << 4", "4 bits only"),
        "int32": ((".sum(-1).to(torch.uint8)", ".sum(-1)"), "uint8"),
        "8 bits left as they are": (
            ("    per = 8 // bits\n", "    if bits == 8:\n        return codes.int()\n    per = 8 // bits\n"),
            "pack into uint8",
        ),
        "only two axes": (("codes.unflatten(-1, (-1, per))", "codes.view(len(codes), -1, per)"), "RuntimeError"),
        "shifts of one": (("bits * torch.arange(per)", "torch.arange(per)"), "expected"),
    },
    "11.unpack3": {
        "bytes from the high end": (("[0, 8, 16]", "[16, 8, 0]"), "little-endian"),
        "codes from the high end": (("3 * torch.arange(8)", "3 * torch.arange(8).flip(0)"), "lowest bits"),
        "in uint8": (
            "def unpack3(packed):\n    shifts = torch.tensor([0, 8, 16], dtype=torch.uint8)\n"
            "    w = packed.unflatten(-1, (-1, 3)) << shifts\n"
            "    return (w.sum(-1, keepdim=True) >> (3 * torch.arange(8)) & 7).flatten(-2).to(torch.uint8)",
            "lost",
        ),
        "first byte only": (("keepdim=True)  # [..., words, 1]", "keepdim=True) & 255"), "lost"),
        "two codes a byte": (
            "def unpack3(packed):\n    p = torch.stack((packed & 7, packed >> 3 & 7), -1).flatten(-2)\n"
            "    return torch.nn.functional.pad(p.unflatten(-1, (-1, 6)), (0, 2)).flatten(-2)",
            "byte's edge",
        ),
        "mask of two bits": (("& 7", "& 3"), "expected"),
        "int64": ((".flatten(-2).to(torch.uint8)", ".flatten(-2)"), "to be uint8"),
        "one word only": (("packed.unflatten(-1, (-1, 3))", "packed[..., :3].unflatten(-1, (-1, 3))"), "expected"),
    },
    "11.group_linear": {
        "groups interleaved": (
            ("codes.view(out, groups, -1).float()", "codes.view(out, -1, groups).mT.float()"),
            "expected",
        ),
        "both interleaved": (
            "def group_linear(x, codes, scale, zero):\n    n = codes.shape[1] // scale.shape[1]\n"
            "    return x @ ((codes.float() - zero.repeat(1, n)) * scale.repeat(1, n)).T",
            "k // group",
        ),
        "zero after the scale": (
            "def group_linear(x, codes, scale, zero):\n    n = codes.shape[1] // scale.shape[1]\n"
            "    return x @ (codes.float() * scale.repeat_interleave(n, 1) - zero.repeat_interleave(n, 1)).T",
            "before the scale",
        ),
        "no zero": ((" - zero[..., None]", ""), "missing"),
        "a whole zero": (("zero[..., None]", "zero[..., None].int()"), "need not be a whole number"),
        "zero is 8": (("zero[..., None]", "8.0"), "8 here only by chance"),
        "first group's scale": (("(sums * scale)", "(sums * scale[:, :1])"), "expected"),
        "uint8 differences": (
            "def group_linear(x, codes, scale, zero):\n    n = codes.shape[1] // scale.shape[1]\n"
            "    w = codes - zero.to(torch.uint8).repeat_interleave(n, 1)\n"
            "    return x @ (w.float() * scale.repeat_interleave(n, 1)).T",
            "wraps",
        ),
        "int8 codes": (
            ("codes.view(out, groups, -1).float()", "codes.to(torch.int8).view(out, groups, -1).float()"),
            "do not fit int8",
        ),
        "4 bits only": (("codes.view(out, groups, -1)", "(codes & 15).view(out, groups, -1)"), "may have 8 bits"),
        "one row": (("return (sums * scale).sum(-1)", "return (sums * scale).sum(-1)[:1]"), "expected"),
        "a mean over the groups": (("(sums * scale).sum(-1)", "(sums * scale).mean(-1)"), "expected"),
        "transposed": (("return (sums * scale).sum(-1)", "return (sums * scale).sum(-1).T"), "expected"),
    },
    "11.read_signed": {
        "an offset of 8": (
            ("low = (packed << 4).view(torch.int8) >> 4", "low = (packed & 15).to(torch.int8) - 8"),
            "no offset",
        ),
        "an offset for both": (
            "def read_signed(packed, scale):\n    v = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)\n"
            "    v = v.to(torch.int8) - 8\n"
            "    return (v.view(*scale.shape, -1) * scale[..., None]).view(len(v), -1)",
            "offset",
        ),
        "the odd columns broken": (
            "def read_signed(packed, scale):\n    low = (packed << 4).view(torch.int8) >> 4\n"
            "    v = torch.stack((low, (packed >> 4).to(torch.int8)), -1).flatten(-2)\n"
            "    return (v.view(*scale.shape, -1) * scale[..., None]).view(len(v), -1)",
            "they were right",
        ),
        "none negative": (
            "def read_signed(packed, scale):\n    v = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)\n"
            "    return (v.view(*scale.shape, -1) * scale[..., None]).view(len(v), -1)",
            "ever negative",
        ),
        "-8 stays 8": (
            (
                "low = (packed << 4).view(torch.int8) >> 4",
                "low = (packed & 15).to(torch.int8)\n    low = torch.where(low > 8, low - 16, low)",
            ),
            "8 stands for -8",
        ),
        "8 taken off": (
            (
                "low = (packed << 4).view(torch.int8) >> 4",
                "low = (packed & 15).to(torch.int8)\n    low = torch.where(low > 7, low - 8, low)",
            ),
            "15 is -1",
        ),
        "sign and magnitude": (
            (
                "low = (packed << 4).view(torch.int8) >> 4",
                "low = (packed & 15).to(torch.int8)\n    low = torch.where(low > 7, 8 - low, low)",
            ),
            "magnitude",
        ),
        "halves swapped": (("torch.stack((low, high), -1)", "torch.stack((high, low), -1)"), "swapped"),
        "scales interleaved": (
            ("(values.view(out, groups, -1) * scale[..., None])", "(values.view(out, -1, groups) * scale[:, None])"),
            "expected",
        ),
    },
    "11.budget": {
        "no zero point": (("(16 + 4) / 128", "16 / 128"), "zero point's 4 bits"),
        "zero point of 16 bits": (("(16 + 4) / 128", "32 / 128"), "not 16"),
        "no scale": (("4 + (16 + 4) / 128", "4"), "scale is missing"),
        "4 bits flat": (("layers = 6.476e9 * (4 + 16 / 32) / 8", "layers = 6.476e9 * 4 / 8"), "4.5 bits"),
        "all in 4 bits": (("(layers + 0.262e9 * 2) / 1e9", "6.738e9 * 4.5 / 8 / 1e9"), "stay in 16 bits"),
        "16-bit part missing": (("(layers + 0.262e9 * 2) / 1e9", "layers / 1e9"), "16-bit part is missing"),
        "embedding read": (("(layers + 0.131e9 * 2)", "(layers + 0.262e9 * 2)"), "looked up"),
        "head not read": (("(layers + 0.131e9 * 2)", "layers"), "head is read"),
        "KV left out": (("(48e9 - 10e9)", "48e9"), "KV"),
        "not whole": (("int((48e9 - 10e9) * 8 / 68.7e9 - 16 / 64)", "(48e9 - 10e9) * 8 / 68.7e9 - 16 / 64"), "whole"),
        "rounded up": (("int((48e9 - 10e9) * 8 / 68.7e9 - 16 / 64)", "5"), "come off first"),
        "GiB": (("* 2) / 1e9", "* 2) / 2**30"), "GiB"),
    },
}
