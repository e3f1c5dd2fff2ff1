"""Wrong answers to exercise 03, each with a text that the check's message must contain."""

WRONG = {
    "03.weight_bytes": {
        "a head for tied models": (("(1 if config.tie_embeddings else 2)", "2"), "no tensor of its own"),
        "no head": (("(1 if config.tie_embeddings else 2)", "1"), "second [vocab, hidden] table"),
        "query heads for k and v": (
            (
                "config.head_dim, config.num_kv_heads * config.head_dim",
                "config.head_dim, config.num_heads * config.head_dim",
            ),
            "not num_heads",
        ),
        "k without v": (("2 * kv_rows)", "kv_rows)"), "one of the two is missing"),
        "q has hidden rows": (
            ("= config.num_heads * config.head_dim,", "= config.hidden_size,"),
            "need not be hidden",
        ),
        "no biases": (("(hidden + config.qkv_bias)", "hidden"), "biases"),
        "always gated": (("(3 if config.gated_mlp else 2)", "3"), "two matrices"),
        "never gated": (("(3 if config.gated_mlp else 2)", "2"), "three matrices"),
        "no norms": (("+ 2 * hidden", "+ 0"), "expected"),
        "no last norm": (("per_layer + hidden)", "per_layer)"), "after the last layer"),
        "no norm anywhere": (
            "def weight_bytes(config, b=2):\n"
            "    h, d = config.hidden_size, config.head_dim\n"
            "    q, kv = config.num_heads * d, config.num_kv_heads * d\n"
            "    layer = (q + 2 * kv) * (h + config.qkv_bias) + h * q\n"
            "    layer += (2 + config.gated_mlp) * h * config.intermediate_size\n"
            "    return ((2 - config.tie_embeddings) * config.vocab_size * h + config.num_layers * layer) * b",
            "the norms are missing",
        ),
        "elements": (("+ hidden) * bytes_per_weight", "+ hidden)"), "multiply by bytes_per_weight"),
        "always two bytes": (("* bytes_per_weight", "* 2"), "bytes_per_weight is ignored"),
        "one layer": (("config.num_layers * per_layer", "per_layer"), "expected"),
        "a float": (("* bytes_per_weight", "* bytes_per_weight / 1"), "integers"),
        "the Llama-2-7B number": ("def weight_bytes(config, b=2):\n    return 13_476_831_232", "expected"),
        "out has a bias too": (("hidden * q_rows", "hidden * (q_rows + config.qkv_bias)"), "expected"),
        "head_dim from hidden": (
            (
                "config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim",
                "hidden, config.num_kv_heads * (hidden // config.num_heads)",
            ),
            "expected",
        ),
    },
    "03.quantized_bytes": {
        "no scales": (("+ groups * (4 if asymmetric else 2)", ""), "are missing"),
        "no zero points": (("(4 if asymmetric else 2)", "2"), "zero point"),
        "always zero points": (("(4 if asymmetric else 2)", "4"), "only asymmetric"),
        "float32 scales": (("(4 if asymmetric else 2)", "(8 if asymmetric else 4)"), "2 bytes, not 4"),
        "groups rounded down": (("-(-columns // group)", "columns // group"), "last group"),
        "codes rounded down": (("-(-columns * bits // 8)", "columns * bits // 8"), "whole bytes"),
        "the matrix as one row": (
            "def quantized_bytes(shapes, bits, group, asymmetric=False):\n"
            "    s = 4 if asymmetric else 2\n"
            "    return sum(-(-r * c * bits // 8) + -(-r * c // group) * s for r, c in shapes)",
            "by itself",
        ),
        "a byte a code": (("-(-columns * bits // 8)", "columns"), "not a whole byte"),
        "true division": (("-(-columns * bits // 8)", "columns * bits / 8"), "expected"),
        "groups of at most 128": (("-(-columns // group)", "-(-columns // min(group, 128))"), "expected"),
        "each group in whole bytes": (
            (
                "-(-columns * bits // 8)",
                "sum(-(-min(group, columns - i) * bits // 8) for i in range(0, columns, group))",
            ),
            "expected",
        ),
        "last matrix only": (("total += rows", "total = rows"), "expected"),
        "bits for bytes": (("-(-columns * bits // 8)", "columns * bits"), "expected"),
        "rows and columns swapped": (("for rows, columns in shapes", "for columns, rows in shapes"), "expected"),
        "four bits only": (("columns * bits", "columns * 4"), "expected"),
        "scale of one row": (
            (
                "rows * (codes + groups * (4 if asymmetric else 2))",
                "rows * codes + groups * (4 if asymmetric else 2)",
            ),
            "expected",
        ),
    },
    "03.largest_batch": {
        "negative": (("max(0, budget - weights)", "(budget - weights)"), "0 requests"),
        "blocks ignored": (("blocks * block", "length"), "whole blocks"),
        "blocks rounded down": (("-(-length // block)", "length // block"), "not down"),
        "activations ignored": ((" + per_request", ""), "per_request is ignored"),
        "activations once": (
            "def largest_batch(budget, weights, kv_per_token, length, per_request=0, block=1):\n"
            "    each = -(-length // block) * block * kv_per_token\n"
            "    return max(0, budget - weights - per_request) // each",
            "not once",
        ),
        "not quite full": (("max(0, budget - weights)", "max(0, budget - weights - 1)"), "last byte"),
        "weights forgotten": (("max(0, budget - weights)", "budget"), "weights come out"),
        "nearest": (("max(0, budget - weights) // each", "max(0, round((budget - weights) / each))"), "in part"),
        "one too many": (
            ("max(0, budget - weights) // each", "max(0, (budget - weights) // each + 1)"),
            "one request",
        ),
        "by float": (("max(0, budget - weights) // each", "max(0, int((budget - weights) / each))"), "53 bits"),
        "a float": (("max(0, budget - weights) // each", "float(max(0, budget - weights) // each)"), "integers"),
        "at least one": (("max(0, budget - weights) // each", "max(1, (budget - weights) // each)"), "expected"),
        "one block more": (("-(-length // block)", "length // block + 1"), "expected"),
        "activations a token": (("* kv_per_token + per_request", "* (kv_per_token + per_request)"), "expected"),
    },
    "03.crossover": {
        "equal is enough": (("(growing * each) + 1)", "(growing * each))"), "one more"),
        "ceiling": (
            "def crossover(weights, kv_per_token_layer, windows, batch=1):\n"
            "    return -(-weights // (kv_per_token_layer * len(windows) * batch))",
            "expected",
        ),
        "windows ignored": (
            "def crossover(weights, kv_per_token_layer, windows, batch=1):\n"
            "    return weights // (kv_per_token_layer * len(windows) * batch) + 1",
            "they are ignored",
        ),
        "windowed layers hold nothing": (
            "def crossover(weights, kv_per_token_layer, windows, batch=1):\n"
            "    full = sum(w is None for w in windows)\n"
            "    return weights // (kv_per_token_layer * full * batch) + 1 if full else None",
            "still hold",
        ),
        "batch ignored": (("kv_per_token_layer * batch", "kv_per_token_layer"), "batch is ignored"),
        "batch of at most 8": (("kv_per_token_layer * batch", "kv_per_token_layer * min(batch, 8)"), "expected"),
        "one layer": (
            "def crossover(weights, kv_per_token_layer, windows, batch=1):\n"
            "    return weights // (kv_per_token_layer * batch) + 1",
            "every layer",
        ),
        "one too few": (("return needed", "return needed - 1"), "expected"),
        "one token at a time": (
            "def crossover(weights, kv_per_token_layer, windows, batch=1):\n"
            "    n = 1\n"
            "    while True:\n"
            "        if sum(n if w is None else min(n, w) for w in windows) * kv_per_token_layer * batch > weights:\n"
            "            return n\n"
            "        n += 1\n",
            "stopped",
        ),
        "the border belongs to nobody": (("if needed <= border", "if needed < border"), "expected"),
        "None for any window": (
            "def crossover(weights, kv_per_token_layer, windows, batch=1):\n"
            "    if any(w is not None for w in windows):\n"
            "        return None\n"
            "    return weights // (kv_per_token_layer * len(windows) * batch) + 1",
            "there is a length",
        ),
        "layers do not stop": (("w is None or w >= border", "w is None or w"), "expected"),
        "infinity for None": (("            return None", "            return math.inf"), "return None"),
        "sorts the windows in place": (
            ("each = kv_per_token_layer", "windows.reverse()\n    each = kv_per_token_layer"),
            "in place",
        ),
    },
    "03.plan_blocks": {
        "still query heads": (
            ("config.num_layers * config.num_kv_heads", "config.num_layers * config.num_heads"),
            "query heads",
        ),
        "still a share of what is left": (
            ("total * utilisation - weights - activations", "(total - weights - activations) * utilisation"),
            "taken of what is left",
        ),
        "still rounds": (
            ("int(available // (per_token * block_size))", "round(available / (per_token * block_size))"),
            "nearest",
        ),
        "only the heads mended": (
            "def plan_blocks(total, weights, activations, utilisation, config, block_size=16, kv_bytes=2):\n"
            "    available = (total - weights - activations) * utilisation\n"
            "    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_bytes\n"
            "    return max(0, round(available / (per_token * block_size)))",
            "taken of what is left",
        ),
        "only the fraction mended": (
            "def plan_blocks(total, weights, activations, utilisation, config, block_size=16, kv_bytes=2):\n"
            "    available = total * utilisation - weights - activations\n"
            "    per_token = 2 * config.num_layers * config.num_heads * config.head_dim * kv_bytes\n"
            "    return max(0, round(available / (per_token * block_size)))",
            "query heads",
        ),
        "only the rounding mended": (
            "def plan_blocks(total, weights, activations, utilisation, config, block_size=16, kv_bytes=2):\n"
            "    available = (total - weights - activations) * utilisation\n"
            "    per_token = 2 * config.num_layers * config.num_heads * config.head_dim * kv_bytes\n"
            "    return max(0, int(available // (per_token * block_size)))",
            "query heads",
        ),
        "negative": (("max(0, int(", "(int("), "not a negative number"),
        "activations ignored": ((" - weights - activations", " - weights"), "activations are ignored"),
        "rounded up": (
            ("int(available // (per_token * block_size))", "math.ceil(available / (per_token * block_size))"),
            "rounded up",
        ),
        "no K": (
            ("2 * config.num_layers * config.num_kv_heads", "config.num_layers * config.num_kv_heads"),
            "expected",
        ),
        "block of 16": (("per_token * block_size", "per_token * 16"), "expected"),
        "two bytes": (("config.head_dim * kv_bytes", "config.head_dim * 2"), "expected"),
        "head_dim from hidden": (
            ("config.head_dim * kv_bytes", "(config.hidden_size // config.num_heads) * kv_bytes"),
            "expected",
        ),
        "a float": (
            ("int(available // (per_token * block_size))", "available // (per_token * block_size)"),
            "integers",
        ),
        "at least one block": (("max(0, int(", "max(1, int("), "expected"),
        "activations under the fraction": (("- activations", "- activations * utilisation"), "expected"),
        "one block kept back": (
            (
                "max(0, int(available // (per_token * block_size)))",
                "max(0, int(available // (per_token * block_size)) - 1)",
            ),
            "expected",
        ),
    },
    "03.estimate_70b": {
        "GiB": (451.4, "GiB"),
        "KV only": (343.6, "weights are missing"),
        "weights only": (141.1, "KV cache is missing"),
        "K without V": (312.9, "K without V"),
        "query heads": (2890.0, "64 query heads"),
        "4-byte weights": (625.8, "counted at 4"),
        "1-byte weights": (414.1, "counted at 1"),
        "one user": (151.8, "32 users"),
        "bytes": (484.7e9, "in bytes"),
        "the cards": (7, "expected"),
        "text": ("'485 GB'", "expected a number"),
    },
}
