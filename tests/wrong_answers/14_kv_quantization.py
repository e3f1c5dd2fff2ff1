"""Plausible wrong answers to exercise 14: each must be rejected, with the text that names the mistake."""

KEYS = "keys = there_and_back(k.unflatten(0, (-1, group)), 1).flatten(0, 1)"
WRONG = {
    "14.round_kv": {
        "keys per token": ((KEYS, "keys = there_and_back(k, 1)"), "along the channel"),
        "turned round": (
            "def round_kv(k, v, bits, group):\n"
            "    def f(x, axis):\n"
            "        low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)\n"
            "        scale = ((high - low) / (2**bits - 1)).clamp(min=1e-20)\n"
            "        return low + ((x - low) / scale).round() * scale\n"
            "    return f(k, 1), f(v.unflatten(0, (-1, group)), 1).flatten(0, 1)",
            "turned round",
        ),
        "values per channel": (
            (
                "return keys, there_and_back(v, 1)",
                "return keys, there_and_back(v.unflatten(0, (-1, group)), 1).flatten(0, 1)",
            ),
            "all channels of one token",
        ),
        "all tokens share": ((KEYS, "keys = there_and_back(k, 0)"), "covers `group`"),
        "every n-th token": (
            (KEYS, "keys = there_and_back(k.unflatten(0, (group, -1)), 0).flatten(0, 1)"),
            "consecutive",
        ),
        "a group of all channels": (
            (KEYS, "keys = there_and_back(k.unflatten(0, (-1, group)).flatten(1), 1).view_as(k)"),
            "its own scale within a group",
        ),
        "one scale for the values": (
            ("return keys, there_and_back(v, 1)", "return keys, there_and_back(v.flatten()[None], 1).view_as(v)"),
            "each token has its own",
        ),
        "2^bits steps": (("/ (2**bits - 1)", "/ 2**bits"), "one step fewer"),
        "cut off": ((".round() * scale", ".trunc() * scale"), "cut off"),
        "around 0": (
            (
                "return low + ((x - low) / scale).round() * scale",
                "scale = (2 * torch.maximum(high.abs(), low.abs()) / (2**bits - 1)).clamp(min=1e-12)\n"
                "        return (x / scale).round() * scale",
            ),
            "around 0",
        ),
        "NaN where nothing changes": (
            ("        scale = torch.where(scale > 0, scale, torch.ones_like(scale))\n", ""),
            "never changes",
        ),
        "NaN where a token never changes": (
            (
                "        scale = torch.where(scale > 0, scale, torch.ones_like(scale))\n",
                "        scale = scale if x.ndim == 2 else torch.where(scale > 0, scale, torch.ones_like(scale))\n",
            ),
            "never changes",
        ),
        "0 where nothing changes": (
            (".round() * scale\n", ".round() * scale * (high > low) - low * (high == low)\n"),
            "expected",
        ),
        "always 4 bits": (
            ("def there_and_back(x, axis):\n", "bits = 4\n\n    def there_and_back(x, axis):\n"),
            "expected",
        ),
        "groups of 4": (("(-1, group)", "(-1, 4)"), "RuntimeError"),
        "not rounded": ("def round_kv(k, v, bits, group): return k, v", "expected"),
        "keys only": (("return keys, there_and_back(v, 1)", "return keys, v"), "expected"),
    },
    "14.window_step": {
        "those that waited are forgotten": (
            ("list(range(start // residual * residual, border))", "list(range(start, border))"),
            "waited before",
        ),
        "one unit a step": (
            "def window_step(start, new, residual):\n"
            "    end, own = start + new, start // residual * residual\n"
            "    full = own + residual if end >= own + residual else own\n"
            "    return {'rounded': list(range(own, full)), 'floats': list(range(full, end)),\n"
            "            'sees': [p // residual * residual for p in range(start, end)]}",
            "several units",
        ),
        "the completing query sees it rounded": (
            ("[p // residual", "[(p + 1) // residual"),
            "still sees it unrounded",
        ),
        "one border for all": (("[p // residual * residual for p", "[border for p"), "own border"),
        "the border before the step": (
            ("[p // residual * residual for p", "[start // residual * residual for p"),
            "within it",
        ),
        "a sliding window": (("[p // residual * residual for p", "[max(0, p + 1 - residual) for p"), "whole units"),
        "new floats only": (("list(range(border, end))", "list(range(max(border, start), end))"), "still wait"),
        "all that is rounded": (
            ("list(range(start // residual * residual, border))", "list(range(border))"),
            "only those of this step",
        ),
        "rounded when the window is one over": (
            ("border = end // residual * residual", "border = (end - 1) // residual * residual"),
            "expected",
        ),
        "ranges": (('"floats": list(range(border, end))', '"floats": (border, end)'), "expected"),
    },
    "14.attend": {
        "two softmaxes added": (
            (
                "return (k @ q * factor).softmax(0) @ v",
                "n = len(rounded_k)\n    a, b = k @ q * factor, v\n"
                "    return a[:n].softmax(0) @ b[:n] + a[n:].softmax(0) @ b[n:]",
            ),
            "added",
        ),
        "two softmaxes averaged": (
            (
                "return (k @ q * factor).softmax(0) @ v",
                "n = len(rounded_k)\n    a, b = k @ q * factor, v\n"
                "    parts = [a[:n].softmax(0) @ b[:n]] * (n > 0) + [a[n:].softmax(0) @ b[n:]]\n"
                "    return sum(parts) / len(parts)",
            ),
            "averaged",
        ),
        "groups interleaved": (
            (
                "scale.repeat_interleave(group, 0) + low.repeat_interleave(group, 0)",
                "scale.repeat(group, 1) + low.repeat(group, 1)",
            ),
            "repeat_interleave",
        ),
        "no low for keys": ((" + low.repeat_interleave(group, 0)", ""), "keys: `low`"),
        "no low for values": ((" + low[:, None]", ""), "values: `low`"),
        "low before the scale": (
            (
                "codes * scale.repeat_interleave(group, 0) + low.repeat_interleave(group, 0)",
                "(codes + low.repeat_interleave(group, 0)) * scale.repeat_interleave(group, 0)",
            ),
            "after the scale",
        ),
        "no factor": (("k @ q * factor", "k @ q"), "factor"),
        "a factor of its own": (("k @ q * factor", "k @ q * len(q) ** -0.5"), "is an argument"),
        "torch's own factor": (
            (
                "return (k @ q * factor).softmax(0) @ v",
                "return torch.nn.functional.scaled_dot_product_attention(q[None], k, v)[0]",
            ),
            "is an argument",
        ),
        "exp as it is": (
            (
                "return (k @ q * factor).softmax(0) @ v",
                "weights = (k @ q * factor).exp()\n    return (weights / weights.sum()) @ v",
            ),
            "take the largest off",
        ),
        "signed codes": (("rounded_k = codes * scale", "rounded_k = codes.to(torch.int8) * scale"), "up to 255"),
        "32 window tokens at most": (
            (
                "torch.cat((rounded_k, window_k)), torch.cat((rounded_v, window_v))",
                "torch.cat((rounded_k, window_k[:32])), torch.cat((rounded_v, window_v[:32]))",
            ),
            "expected",
        ),
        "no window": (
            (
                "k, v = torch.cat((rounded_k, window_k)), torch.cat((rounded_v, window_v))",
                "k, v = (rounded_k, rounded_v) if len(rounded_k) else (window_k, window_v)",
            ),
            "window's tokens",
        ),
        "window only": (
            (
                "k, v = torch.cat((rounded_k, window_k)), torch.cat((rounded_v, window_v))",
                "k, v = window_k, window_v",
            ),
            "rounded tokens are left out",
        ),
        "two orders": (
            ("k, v = torch.cat((rounded_k, window_k))", "k, v = torch.cat((window_k, rounded_k))"),
            "different orders",
        ),
        "no rounded tokens breaks": (
            ("len(codes) // max(len(scale), 1)", "len(codes) // len(scale)"),
            "ZeroDivisionError",
        ),
        "groups of 16": (("len(codes) // max(len(scale), 1)", "16"), "RuntimeError"),
        "the first group's scale": (("scale.repeat_interleave(group, 0) + ", "scale[:1] + "), "expected"),
    },
    "14.code_blocks": {
        "the stale scale stays": (
            (
                "        self.scale[block, place] = ((x.max()",
                "        if self.scale[block, place] == 0:\n            self.scale[block, place] = ((x.max()",
            ),
            "former token",
        ),
        "the low end is lost": (("        self.low[target] = self.low[source]\n", ""), "loses the low end"),
        "the low end is 0": (("self.low[target] = self.low[source]", "self.low[target] = 0"), "not 0"),
        "turned round": (
            (
                "        self.codes[target] = self.codes[source]\n        self.scale[target] = self.scale[source]\n"
                "        self.low[target] = self.low[source]\n",
                "        self.codes[source] = self.codes[target]\n        self.scale[source] = self.scale[target]\n"
                "        self.low[source] = self.low[target]\n",
            ),
            "turned round",
        ),
        "all lows": (("self.low[target] = self.low[source]", "self.low[:] = self.low[source]"), "nothing to do with"),
        "the first token's low": (
            ("self.low[target] = self.low[source]", "self.low[target] = self.low[source, 0]"),
            "expected",
        ),
        "codes are not copied": (("        self.codes[target] = self.codes[source]\n", ""), "expected"),
        "a scale that only grows": (
            (
                "self.scale[block, place] = ((x.max() - x.min()) / self.top).clamp(min=1e-12)",
                "self.scale[block, place] = max(self.scale[block, place], (x.max() - x.min()) / self.top)",
            ),
            "expected",
        ),
        "a copy that is the source itself": (
            "class CodeBlocks:\n"
            "    def __init__(self, blocks, size, dim, bits):\n"
            "        self.x, self.top = [torch.zeros(size, dim) for _ in range(blocks)], 2**bits - 1\n"
            "    def write(self, block, place, x):\n"
            "        scale = ((x.max() - x.min()) / self.top).clamp(min=1e-12)\n"
            "        self.x[block][place] = x.min() + ((x - x.min()) / scale).round() * scale\n"
            "    def copy(self, source, target): self.x[target] = self.x[source]\n"
            "    def read(self, block, count): return self.x[block][:count]\n",
            "goes its own way",
        ),
        "16 places are copied": (
            ("self.codes[target] = self.codes[source]", "self.codes[target, :16] = self.codes[source, :16]"),
            "expected",
        ),
        "block 0 cannot be forked": (
            "class Partly(CodeBlocks):\n"
            "    def copy(self, source, target):\n"
            "        if source:\n"
            "            super().copy(source, target)\n"
            "CodeBlocks = Partly",
            "a fork of a fork",
        ),
        "forks only go up": (
            "class Partly(CodeBlocks):\n"
            "    def copy(self, source, target): super().copy(min(source, target), max(source, target))\n"
            "CodeBlocks = Partly",
            "a fork of a fork",
        ),
        "never rounded": (
            "class CodeBlocks:\n"
            "    def __init__(self, blocks, size, dim, bits): self.x = torch.zeros(blocks, size, dim)\n"
            "    def write(self, block, place, x): self.x[block, place] = x\n"
            "    def copy(self, source, target): self.x[target] = self.x[source]\n"
            "    def read(self, block, count): return self.x[block, :count]\n",
            "expected",
        ),
        "one scale for both blocks": (
            ("self.scale[target] = self.scale[source]", "self.scale[target] = self.scale[target]"),
            "expected",
        ),
    },
    "14.budget": {
        "no low": (('"bits": 4 + 32 / 32', '"bits": 4 + 16 / 32'), "32 bits a group"),
        "no scales": (("2 + 32 / 32 + 2 + 32 / 128", "2 + 2"), "missing"),
        "values share by 32": (("2 + 32 / 32 + 2 + 32 / 128", "2 + 32 / 32 + 2 + 32 / 32"), "vector of 128"),
        "bits for bytes": (("2 + 32 / 128) / 8", "2 + 32 / 128)"), "bits"),
        "K only": (
            ("numbers * (2 + 32 / 32 + 2 + 32 / 128) / 8", "numbers * (2 + 32 / 32) / 8"),
            "values are missing",
        ),
        "half a window": (('"window": 128 * full', '"window": 64 * full'), "both wait"),
        "a rounded window": (('"window": 128 * full', '"window": 128 * token'), "not rounded"),
        "no window": (("(4096 * token + 128 * full)", "(4096 * token)"), "window is missing"),
        "a part of a request": (
            ("int(40e9 / (4096 * token + 128 * full))", "40e9 / (4096 * token + 128 * full)"),
            "round down",
        ),
        "even at the window": (('"even": 128 * full / (full - token)', '"even": 128'), "on top of the window"),
        "divided by the rounded": (("/ (full - token)", "/ token"), "less INT2"),
    },
}
