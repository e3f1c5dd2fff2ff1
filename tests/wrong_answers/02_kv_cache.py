"""Plausible wrong answers to exercise 02, each with text that its message must contain."""

CALL = "def kv_bytes(batch, layers, kv_heads, head_dim, length, itemsize): return "
FIG = "def figures():\n    mha, gqa = 2 * 32 * 32 * 128 * 2, 2 * 32 * 8 * 128 * 2\n    return "
GOOD = {
    "mha_2048_gib": "1.0",
    "mha_8x4096_gb": "17.18",
    "gqa_128k_gb": "17.18",
    "tokens_24gb": "18120",
}


def figures(**changed: str) -> str:
    return FIG + "{" + ", ".join(f"{key!r}: {value}" for key, value in {**GOOD, **changed}.items()) + "}"


GROW = "def concat_writes(prompt, steps, token_bytes): return "
MASK = "def causal_mask(time, length): return "
UNUSED = "unused = torch.arange(room) >= lengths[:, None]  # [batch, room]"

CONCAT = """
class Cache:
    def __init__(self, config, batch, max_length):
        self.kv, self.room = {}, max_length

    def positions(self, shape):
        start = min((k.shape[1] for k, _ in self.kv.values()), default=0)
        return torch.arange(start, start + shape[-1]).expand(shape)

    def attend(self, layer, q, k, v):
        if layer.index in self.kv:
            old_k, old_v = self.kv[layer.index]
            k, v = torch.cat((old_k, k), 1), torch.cat((old_v, v), 1)
        else:
            k, v = k.clone(), v.clone()
        if k.shape[1] > self.room:
            raise ValueError("full")
        self.kv[layer.index] = k, v
        mask = causal_mask(q.shape[1], k.shape[1])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, attn_mask=mask, scale=layer.scale, enable_gqa=True).transpose(1, 2)
"""

WRONG = {
    "02.kv_bytes": {
        "no factor 2": (CALL + "batch * layers * kv_heads * head_dim * length * itemsize", "factor 2"),
        "no batch": (CALL + "2 * layers * kv_heads * head_dim * length * itemsize", "batch"),
        "no layers": (CALL + "2 * batch * kv_heads * head_dim * length * itemsize", "layers"),
        "no head_dim": (CALL + "2 * batch * layers * kv_heads * length * itemsize", "head_dim"),
        "no kv_heads": (CALL + "2 * batch * layers * head_dim * length * itemsize", "kv_heads is missing"),
        "numbers": (CALL + "2 * batch * layers * kv_heads * head_dim * length", "itemsize"),
        "always 2 bytes": (CALL + "2 * batch * layers * kv_heads * head_dim * length * 2", "expected"),
        "quadratic": (CALL + "2 * batch * layers * kv_heads * head_dim * length**2 * itemsize", "square"),
        "GiB": (CALL + "2 * batch * layers * kv_heads * head_dim * length * itemsize / 2**30", "bytes are asked for"),
        "the example": (CALL + "512", "expected"),
        "a tensor of it all": (CALL + "torch.zeros(2, batch)", "expected a number"),
    },
    "02.figures": {
        "GB for GiB": (figures(mha_2048_gib="1.0737"), "GiB are asked for"),
        "GiB for GB": (figures(mha_8x4096_gb="16.0"), "that is GiB"),
        "no batch": (figures(mha_8x4096_gb="mha * 4096 / 1e9"), "batch of 8"),
        "MHA for GQA": (figures(gqa_128k_gb="mha * 131072 / 1e9"), "8 KV heads"),
        "K alone": (figures(gqa_128k_gb="gqa / 2 * 131072 / 1e9"), "half"),
        "weights left out": (figures(tokens_24gb="(24e9 - 1e9) / mha"), "weights are not taken off"),
        "1 GB left out": (figures(tokens_24gb="(24e9 - 13.5e9) / mha"), "1 GB"),
        "bytes": (figures(gqa_128k_gb="gqa * 131072"), "more than 3 %"),
        "text": (figures(gqa_128k_gb="'17.2 GB'"), "expected a number"),
        "a key short": (FIG + "{'mha_2048_gib': 1.0}", "KeyError"),
    },
    "02.concat_writes": {
        "without the new token": (GROW + "token_bytes * sum(prompt + i for i in range(steps))", "new token as well"),
        "without the prompt": (GROW + "token_bytes * steps * (steps + 1) // 2", "prompt is copied"),
        "prompt once": (GROW + "token_bytes * (prompt + steps * (steps + 1) // 2)", "not once"),
        "preallocated": (GROW + "token_bytes * steps", "preallocated"),
        "the last step": (GROW + "token_bytes * (prompt + steps)", "add up all steps"),
        "a float": (GROW + "token_bytes * (steps * prompt + steps * (steps + 1) / 2)", "float"),
        "a rounded float": (
            GROW + "round(token_bytes * (steps * prompt + steps * (steps + 1) / 2))",
            "too large for a",
        ),
        "reads too": (GROW + "token_bytes * sum(2 * (prompt + i) - 1 for i in range(1, steps + 1))", "reads"),
        "one step more": (GROW + "token_bytes * sum(prompt + i for i in range(1, steps + 2))", "one step too many"),
        "ignores token_bytes": (GROW + "steps * prompt + steps * (steps + 1) // 2", "expected"),
    },
    "02.causal_mask": {
        "one byte a position": (
            "def causal_mask(time, length):\n"
            "    at = torch.arange(length).to(torch.int8)\n"
            "    return at <= at[length - time:, None]",
            "expected",
        ),
        "top left": (MASK + "torch.ones(time, length).tril().bool()", "top left"),
        "without itself": (MASK + "torch.ones(time, length).tril(length - time - 1).bool()", "sees itself"),
        "inverted": (MASK + "~torch.ones(time, length).tril(length - time).bool()", "inverted"),
        "one too far": (MASK + "torch.ones(time, length).tril(length - time + 1).bool()", "future"),
        "no mask": (MASK + "torch.ones(time, length).bool()", "no mask"),
        "new tokens only": (
            MASK + "torch.ones(time, length).tril(length - time).triu(0).bool()"
            " & (torch.arange(length) >= length - time)",
            "only the new tokens",
        ),
        "floats": (
            MASK + "torch.zeros(time, length).masked_fill(torch.ones(time, length).triu(1).bool(), -1e9)",
            "bool",
        ),
        "square": (MASK + "torch.ones(length, length).tril().bool()", "shape"),
        "transposed": (MASK + "torch.ones(time, length).tril(length - time).bool().T", "[time, length]"),
    },
    "02.cache": {
        "128 rows a call": (
            "class Small(Cache):\n"
            "    def attend(self, layer, q, k, v):\n"
            "        out = super().attend(layer, q, k, v)\n"
            "        out[:, 128:] = 0\n"
            "        return out\n"
            "Cache = Small",
            "calls of [200, 1, 70, 1, 3] tokens",
        ),
        "scales q in place": (
            (
                "scores = q.transpose(1, 2) @ keys.transpose(2, 3) * layer.scale",
                "q *= layer.scale\n        scores = q.transpose(1, 2) @ keys.transpose(2, 3)",
            ),
            "in place",
        ),
        "empties v": (("        group = q.shape[2]", "        v.zero_()\n        group = q.shape[2]"), "in place"),
        "one count for all layers": (
            (
                "        self.stored[layer.index] = end",
                "        self.stored = [end] * len(self.stored)",
            ),
            "each layer needs its own",
        ),
        "mask at the top left": (
            ("torch.arange(start, end)[:, None]  # [time, end]", "torch.arange(time)[:, None]"),
            "top left",
        ),
        "no mask": (
            ('scores.masked_fill(~visible, float("-inf")).softmax(-1)', "scores.softmax(-1)"),
            "no causal mask",
        ),
        "tiled heads": (
            (
                "self.keys[layer.index, :, :, :end].repeat_interleave(group, dim=1)  # [batch, heads, end, dim]\n"
                "        values = self.values[layer.index, :, :, :end].repeat_interleave(group, dim=1)",
                "self.keys[layer.index, :, :, :end].repeat(1, group, 1, 1)\n"
                "        values = self.values[layer.index, :, :, :end].repeat(1, group, 1, 1)",
            ),
            "repeat_interleave",
        ),
        "own scale": (("* layer.scale", "* q.shape[-1] ** -0.5"), "layer.scale"),
        "no scale": (("* layer.scale", ""), "layer.scale"),
        "positions from 0": (
            ("torch.arange(start, start + shape[-1]).expand(shape)", "torch.arange(shape[-1]).expand(shape)"),
            "positions start again",
        ),
        "tensors on the class": (
            (
                "        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)",
                "        if getattr(Cache, 'shape', None) != shape:\n"
                "            Cache.shape, Cache.keys, Cache.values = shape, torch.zeros(shape), torch.zeros(shape)",
            ),
            "share their tensors",
        ),
        "all of the room attended": (
            (
                "self.keys[layer.index, :, :, :end].repeat_interleave(group, dim=1)  # [batch, heads, end, dim]",
                "self.keys[layer.index].repeat_interleave(group, dim=1)",
            ),
            "raised",
        ),
        "grows by cat": (CONCAT, "do not grow by cat"),
        "first call by reference": (CONCAT.replace("k, v = k.clone(), v.clone()", "pass"), "reference"),
        "float positions": (
            ("torch.arange(start, start + shape[-1])", "torch.arange(start, start + shape[-1]).float()"),
            "integer",
        ),
        "int32 positions": (
            ("torch.arange(start, start + shape[-1])", "torch.arange(start, start + shape[-1]).int()"),
            "int64",
        ),
        "positions of one row": (
            ("torch.arange(start, start + shape[-1]).expand(shape)", "torch.arange(start, start + shape[-1])[None]"),
            "expected shape [2, 3]",
        ),
        "no ValueError": (
            ("if end > self.keys.shape[3]:", "if False:"),
            "ValueError",
        ),
        "room off by one": (("if end > self.keys.shape[3]:", "if end >= self.keys.shape[3]:"), "ValueError"),
        "attends the new tokens only": (
            (
                "self.values[layer.index, :, :, :end].repeat_interleave",
                "self.values[layer.index, :, :, :time].repeat_interleave",
            ),
            "raised",
        ),
        "writes at 0": (
            (
                "self.keys[layer.index, :, :, start:end] = k.transpose(1, 2)  # [batch, kv_heads, time, dim]\n"
                "        self.values[layer.index, :, :, start:end] = v.transpose(1, 2)",
                "self.keys[layer.index, :, :, :time] = k.transpose(1, 2)\n"
                "        self.values[layer.index, :, :, :time] = v.transpose(1, 2)",
            ),
            "row 0 again",
        ),
    },
    "02.decode_step": {
        "the scale of the first test": (("keys.transpose(2, 3) * scale", "keys.transpose(2, 3) * 0.5"), "expected"),
        "scales q in place": (
            (
                "    slots = torch.arange(batch)\n",
                "    q *= scale\n    scale = 1.0\n    slots = torch.arange(batch)\n",
            ),
            "in place",
        ),
        "still the longest": (
            (UNUSED, "unused = (torch.arange(room) >= lengths.max()).expand(batch, room)"),
            "last tenant",
        ),
        "zeroed, not masked": (
            (
                UNUSED,
                "unused = torch.arange(room) >= lengths[:, None]\n"
                "    keys.masked_fill_(unused[:, None, :, None], 0.0)\n"
                "    values.masked_fill_(unused[:, None, :, None], 0.0)\n"
                "    scores = q @ keys.transpose(2, 3) * scale\n"
                "    unused = (torch.arange(room) >= lengths.max()).expand(batch, room)",
            ),
            "zeroed keys",
        ),
        "the shortest": ((UNUSED, "unused = (torch.arange(room) >= lengths.min()).expand(batch, room)"), "shortest"),
        "one stale row": ((UNUSED, "unused = torch.arange(room) > lengths[:, None]"), "one stale row"),
        "does not see itself": (
            (UNUSED, "unused = torch.arange(room) >= (lengths - 1).clamp(min=1)[:, None]"),
            "does not see itself",
        ),
        "written behind the longest": (
            (
                "keys[slots, :, lengths] = k\n    values[slots, :, lengths] = v",
                "keys[:, :, lengths.max()] = k\n    values[:, :, lengths.max()] = v",
            ),
            "behind the longest",
        ),
        "lengths not in place": (("    lengths += 1\n", "    lengths = lengths + 1\n"), "in place"),
        "keys of its own": (
            ("    keys[slots, :, lengths] = k\n", "    keys = keys.clone()\n    keys[slots, :, lengths] = k\n"),
            "expected",
        ),
        "a copy of the cache": (
            (
                "    slots = torch.arange(batch)\n",
                "    slots = torch.arange(batch)\n    keys, values = keys.clone(), values.clone()\n",
            ),
            "keys and values must be changed in place",
        ),
        "mask over heads": (
            ("unused[:, None, None]", "unused[None, :, None]"),
            "raised",
        ),
    },
}
