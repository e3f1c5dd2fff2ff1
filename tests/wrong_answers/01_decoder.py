"""Wrong answers to exercise 01, and what the check must say of each."""

ROPE_JOINT = """
def rope(x, positions, theta):
    dim = x.shape[-1]
    frequencies = theta ** -(torch.arange(0, dim, 2) / dim)
    angle = positions[:, None, None].float() * frequencies
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * angle.cos() {} b * angle.sin(), a * angle.sin() {} b * angle.cos()), -1).flatten(-2)
"""
TURN = "torch.cat((a * cos - b * sin, a * sin + b * cos), -1)"
FREQUENCIES = "theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)"
MASK = "torch.ones(time, length, dtype=torch.bool, device=q.device).triu(length - time + 1)"
KEEP = "(above < top_p[:, None])"
PLACES = "torch.arange(start, start + time)"
PARAMETERS = "matrices + 2 * 151936 * 4096"
FLOPS = "2 * (matrices + 151936 * 4096) + 4 * 36 * 32 * 128 * 8192"
KV = "2 * 36 * 8 * 128 * 2,"

WRONG = {
    "01.rms_norm": {
        "1024 channels at most": (
            "right = rms_norm\n"
            "def rms_norm(x, weight, eps):\n"
            "    parts = zip(x.split(1024, -1), weight.split(1024))\n"
            "    return torch.cat([right(part, w, eps) for part, w in parts], -1)",
            "expected",
        ),
        "LayerNorm": (("wide = x.float()", "wide = x.float() - x.float().mean(-1, keepdim=True)"), "LayerNorm"),
        "eps outside the root": (
            (
                "torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)",
                "1 / (wide.square().mean(-1, keepdim=True).sqrt() + eps)",
            ),
            "under the root",
        ),
        "no eps": (("keepdim=True) + eps)", "keepdim=True))"), "eps is not used"),
        "a fixed eps": (("keepdim=True) + eps)", "keepdim=True) + 1e-5)"), "expected"),
        "sum": (("square().mean(-1", "square().sum(-1"), "not their sum"),
        "no gain": (("normed * weight.float()", "normed"), "gain"),
        "first axis": (("mean(-1, keepdim=True)", "mean(0, keepdim=True)"), "last axis"),
        "whole tensor": (("mean(-1, keepdim=True)", "mean()"), "whole tensor"),
        "half precision": (("wide = x.float()", "wide = x"), "overflow"),
        "float32 out": (("weight.float()).to(x.dtype)", "weight.float())"), "dtype of x"),
        "in place": (("wide = x.float()", "wide = x.float().mul_(1.0); x.mul_(2)"), "in place"),
        "l2 norm": ("def rms_norm(x, weight, eps):\n    return F.normalize(x, dim=-1) * weight", "expected"),
        "the last two axes": (
            ("mean(-1, keepdim=True)", "mean(tuple(range(max(0, x.dim() - 2), x.dim())), keepdim=True)"),
            "whole tensor",
        ),
        "gain plus one": (("weight.float()", "(1 + weight.float())"), "expected"),
    },
    "01.rope": {
        "wrong way": ((TURN, "torch.cat((a * cos + b * sin, b * cos - a * sin), -1)"), "wrong way round"),
        "wrong way, other layout": (ROPE_JOINT.format("+", "* -1 +"), "wrong way round"),
        "i / dim": ((FREQUENCIES, "theta ** -(torch.arange(dim // 2, dtype=torch.float32) / dim)"), "2i / dim"),
        "growing": ((FREQUENCIES, FREQUENCIES.replace("-(", "(")), "negative"),
        "positions ignored": (
            ("positions[:, None, None].float()", "torch.arange(len(x))[:, None, None]"),
            "not used",
        ),
        "theta ignored": ((FREQUENCIES, FREQUENCIES.replace("theta", "10000.0")), "theta is not used"),
        "mixed layouts": (
            (
                "a, b = x.float().chunk(2, -1)",
                "cos, sin = (t.repeat_interleave(2, -1) for t in (cos, sin))\n"
                "    a, b = x.float(), torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)\n"
                "    return a * cos + b * sin",
            ),
            "one layout and angles the other",
        ),
        "nothing done": ("def rope(x, positions, theta): return x", "as it came"),
        "angles in bfloat16": (
            (
                "positions[:, None, None].float() * frequencies",
                "positions[:, None, None].to(x.dtype) * frequencies.to(x.dtype)",
            ),
            "float32",
        ),
        "float32 out": (("b * cos), -1).to(x.dtype)", "b * cos), -1)"), "dtype"),
        "over the heads": (
            ("positions[:, None, None].float()", "positions[None, :, None].float()"),
            "size of tensor",
        ),
        "first half only": ((TURN, "torch.cat((a * cos - b * sin, b), -1)"), "expected"),
        "a product": ((TURN, "torch.cat((a * cos, b * sin), -1)"), "expected"),
        "only the first head": (
            (TURN, "torch.cat((torch.cat((a * cos - b * sin, a * sin + b * cos), -1)[:, :1], x[:, 1:].float()), 1)"),
            "expected",
        ),
        "offset by one": (("positions[:, None, None].float()", "(positions[:, None, None].float() + 1)"), "expected"),
    },
    "01.attention": {
        "256 keys at most": (
            "right = attention\ndef attention(q, k, v):\n    return right(q, k[:, :, -256:], v[:, :, -256:])",
            "expected",
        ),
        "tiled": (
            (
                "k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)",
                "k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)",
            ),
            "tiled",
        ),
        "top left": ((MASK, MASK.replace("length - time + 1", "1")), "top left"),
        "no mask": ((MASK, MASK.replace("length - time + 1", "length")), "no causal mask"),
        "no scale": (("k.transpose(-1, -2) * q.shape[-1] ** -0.5", "k.transpose(-1, -2)"), "sqrt(dim)"),
        "scaled by dim": (("(-1, -2) * q.shape[-1] ** -0.5", "(-1, -2) * (1 / q.shape[-1])"), "not by its root"),
        "scaled by v": (("(-1, -2) * q.shape[-1] ** -0.5", "(-1, -2) * v.shape[-1] ** -0.5"), "expected"),
        "strict": ((MASK, MASK.replace("length - time + 1", "max(length - time, 0)")), "nan"),
        "masked late": (
            (
                "return scores.masked_fill(future, -math.inf).softmax(-1)",
                "return scores.softmax(-1).masked_fill(future, 0)",
            ),
            "after the softmax",
        ),
        "over the queries": (
            (
                "return scores.masked_fill(future, -math.inf).softmax(-1) @ v",
                "return scores.masked_fill(future, -math.inf).softmax(-2) @ v",
            ),
            "last axis",
        ),
        "multiplied mask": (
            ("return scores.masked_fill(future, -math.inf)", "return (scores * ~future)"),
            "expected",
        ),
        "plain exp": (
            (
                "return scores.masked_fill(future, -math.inf).softmax(-1) @ v",
                "return (scores.exp() * ~future) / (scores.exp() * ~future).sum(-1, keepdim=True) @ v",
            ),
            "nan",
        ),
        "v first": (
            (
                "k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)",
                "v.repeat_interleave(group, 1), k.repeat_interleave(group, 1)",
            ),
            "expected",
        ),
        "first batch row": (("q @ k.transpose(-1, -2)", "q[:1] @ k[:1].transpose(-1, -2)"), "expected"),
        "one query only": (("return scores", "future = future[-1:]\n    return scores"), "expected"),
    },
    "01.nucleus": {
        "one row at 1 opens all": (("| (top_p[:, None] == 1)", "| (top_p == 1).any()"), "expected"),
        "1 only if all rows are": (("| (top_p[:, None] == 1)", "| (top_p == 1).all()"), "when top_p is 1"),
        "crossing dropped": ((KEEP, "(ordered.cumsum(-1) <= top_p[:, None])"), "crosses top_p was dropped"),
        "sorted order": (("torch.zeros_like(keep).scatter(-1, order, keep)", "keep"), "carry it back"),
        "first row's p": ((KEEP, "(ordered.cumsum(-1) - ordered < top_p[0])"), "own top_p"),
        "ascending": (("descending=True", "descending=False"), "wrong way round"),
        "1 is not off": ((" | (top_p[:, None] == 1)", ""), "reaches 1 early"),
        "of the logits": (("logits.softmax(-1).sort", "logits.sort"), "softmax"),
        "inverted": ((".scatter(-1, order, keep)", ".scatter(-1, order, keep).logical_not()"), "tokens that stay"),
        "floats": ((".scatter(-1, order, keep)", ".scatter(-1, order, keep).float()"), "bool"),
        "a threshold on each": (
            "def nucleus(logits, top_p):\n    p = logits.softmax(-1)\n"
            "    return p >= p.amax(-1, keepdim=True) * (1 - top_p[:, None])",
            "expected",
        ),
        "one too many": ((KEEP, "(ordered.cumsum(-1) - 2 * ordered < top_p[:, None])"), "expected"),
        "gather for scatter": (
            ("torch.zeros_like(keep).scatter(-1, order, keep)", "keep.gather(-1, order)"),
            "expected",
        ),
        "top-k": (
            (
                "return torch.zeros_like(keep)",
                "keep = torch.arange(logits.shape[1]).expand_as(logits) < 3\n    return torch.zeros_like(keep)",
            ),
            "depends on the row",
        ),
        "logits out": (
            (
                "return torch.zeros_like(keep).scatter(-1, order, keep)",
                "return logits.masked_fill(~torch.zeros_like(keep).scatter(-1, order, keep), -math.inf)",
            ),
            "bool",
        ),
        "always the best five": (
            ("return torch.zeros_like(keep)", "keep[:, 5:] = False\n    return torch.zeros_like(keep)"),
            "expected",
        ),
    },
    "01.estimate": {
        "no head": ((PARAMETERS, "matrices + 151936 * 4096"), "not tied"),
        "no embedding at all": ((PARAMETERS, "matrices"), "embedding and head are missing"),
        "MHA": (("(32 + 2 * 8)", "(32 + 2 * 32)"), "not 32"),
        "no gate": (("3 * 4096 * 12288", "2 * 4096 * 12288"), "three matrices"),
        "billions": ((PARAMETERS, "8.19"), "number itself"),
        "no attention": ((FLOPS, "2 * (matrices + 151936 * 4096)"), "8192 tokens of context"),
        "no factor 2": ((FLOPS, "matrices + 151936 * 4096 + 2 * 36 * 32 * 128 * 8192"), "factor 2"),
        "embedding multiplied": ((FLOPS, FLOPS.replace("matrices + 151936", "matrices + 2 * 151936")), "looked up"),
        "KV heads attend": ((FLOPS, FLOPS.replace("36 * 32", "36 * 8")), "every query head"),
        "one product": ((FLOPS, FLOPS.replace("4 * 36", "2 * 36")), "two products"),
        "KV of all heads": ((KV, KV.replace("36 * 8", "36 * 32")), "8, not 32"),
        "K alone": ((KV, "36 * 8 * 128 * 2,"), "factor 2"),
        "float32": ((KV, "2 * 36 * 8 * 128 * 4,"), "not 4"),
        "one layer": ((KV, "2 * 8 * 128 * 2,"), "36 layers"),
        "a number": (8.19e9, "must be a dict"),
        "text": ({"parameters": "8.19e9", "flops": 1, "kv_bytes": 1}, "expected a number"),
    },
    "01.chunked_attention": {
        "positions wrap in a long prompt": (
            ("torch.arange(start, start + time)", "torch.arange(start, start + time) % 32"),
            "expected",
        ),
        "positions kept in a byte": (
            ("torch.arange(start, start + time)", "torch.arange(start, start + time).to(torch.uint8)"),
            "expected",
        ),
        "keys only": (
            (
                "turned_q = rotate(q[piece, None], cos, sin)",
                "turned_q = rotate(q[piece, None], *cos_sin(positions - start, inverse))",
            ),
            "queries still restart",
        ),
        "queries only": (
            (
                "keys.append(rotate(k[piece, None], cos, sin)",
                "keys.append(rotate(k[piece, None], *cos_sin(positions - start, inverse))",
            ),
            "keys still restart",
        ),
        "restarted, written otherwise": ((PLACES, "torch.arange(0, time)"), "restart at 0"),
        "pieces counted": ((PLACES, "torch.arange(time) + start // chunk * time"), "shorter chunk"),
        "top left": ((".triu(start + 1)", ".triu(1)"), "mask was right"),
        "no positions": ((PLACES, "torch.zeros(time)"), "expected"),
        "chunk ignored, no mask": ((".triu(start + 1)", ".triu(start + time)"), "expected"),
        "growing twice": ((PLACES, "torch.arange(2 * start, 2 * start + time)"), "expected"),
        "last chunk only": (("return torch.cat(out)", "return out[-1]"), "expected"),
        "queries a token ahead": (
            ("rotate(q[piece, None], cos, sin)", "rotate(q[piece, None], *cos_sin(positions + 1, inverse))"),
            "by one token",
        ),
        "changes its input": (("keys, out = [], []", "keys, out = [], []\n    q.mul_(1.5)"), "in place"),
    },
}
