# %% [markdown]
# # Exercise 00: one token
#
# Six tasks around chapter 00: what one user saw, what a forward pass must do, what a decode step must read, which
# requests were good, a benchmark that flatters, and a ceiling by formula. About 60 minutes, no GPU, no network, no
# model weights.
#
# **How exercises work.** Replace each `raise NotImplementedError` (or `...`) with your answer, then run the check
# below it. It calls *your* function on inputs you have not seen. A line with ✓ means done; otherwise one message says
# what was called, what was expected and what may be wrong. Three hints wait under each task, each telling more than
# the one before. `minillm grade exercises/00_one_token.ipynb` shows your score.
#
# Times are seconds on one clock. 1 GB is 10^9 bytes.

# %%
from itertools import pairwise

import numpy as np

from minillm.lab import check
from minillm.model.shapes import known_shape

# %% [markdown]
# ## Task 1. What one user saw (5 minutes, 1 point)
#
# **What.** From the arrival of a request and the time of each of its tokens: TTFT (time to first token, 首词元延迟),
# the gaps between tokens (ITL, inter-token latency, 词元间延迟), their mean (TPOT, time per output token, 单词元耗时)
# and end-to-end latency (端到端延迟).
#
# **Why.** Every figure of this course about speed is made of these four. Requests do not arrive at time 0, and some
# answers have a single token.


# %%
def latency(arrival, token_times):
    """{"ttft": s, "itl": list of s, "tpot": s or None, "e2e": s} of one request.

    arrival: float. token_times: list of one or more floats, rising. An answer of one token has no gap: itl is [] and
    tpot is None. Example: latency(10.0, [10.5, 10.75, 11.5]) is
    {"ttft": 0.5, "itl": [0.25, 0.75], "tpot": 0.5, "e2e": 1.5}.
    """
    ### BEGIN SOLUTION
    first, last, gaps = token_times[0], token_times[-1], len(token_times) - 1
    return {
        "ttft": first - arrival,
        "itl": [later - earlier for earlier, later in pairwise(token_times)],
        "tpot": (last - first) / gaps if gaps else None,
        "e2e": last - arrival,
    }
    ### END SOLUTION


# %%
check("00.latency", latency)

# %% [markdown]
# <details><summary>Hint 1: a nudge</summary>
#
# n tokens have n - 1 gaps between them. The time before the first token is not a gap.
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# Subtract neighbours for itl: `pairwise(token_times)` gives (first, second), (second, third), .... tpot is (last
# token - first token) / (tokens - 1), which is also the mean of itl. Return None where there is no gap.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# - Everything is too large by the same amount: the arrival was not subtracted.
# - tpot is too small by a bit: divided by n, not by n - 1. Too large: it contains the TTFT.
# - ZeroDivisionError: an answer of one token.
# </details>

# %% [markdown]
# ## Task 2. The FLOPs of a forward pass (10 minutes, 2 points)
#
# **What.** The floating-point operations (FLOPs, 浮点运算) of one forward of a Llama-like decoder: `batch` sequences,
# each with `context` tokens already in the KV cache (键值缓存) and `new` tokens more.
#
# **Why.** Divided by the FLOP/s of a chip it is the fastest possible prefill. Prefill is `new` = prompt, `context` =
# 0; a decode step is `new` = 1.
#
# A product of [n, k] with [k, m] is 2 n k m FLOPs. For every new token a layer multiplies by
# - q [hidden, heads x head_dim], k and v [hidden, kv_heads x head_dim] each, out [heads x head_dim, hidden];
# - gate and up [hidden, ffn] each, down [ffn, hidden];
#
# and each of the `num_heads` query heads multiplies its q with the keys of all `context + new` tokens (count them
# all, also those that the causal mask hides), then the weights with their values. At the end every new token passes
# the head [hidden, vocab]. Looking up an embedding, norms and softmax count as nothing.
#
# `config` has `hidden_size`, `intermediate_size` (ffn), `num_layers`, `num_heads`, `num_kv_heads`, `head_dim`,
# `vocab_size`.


# %%
def forward_flops(config, new, context=0, batch=1):
    """FLOPs of one forward, an integer. Example: llama-3.1-8b, 64 new tokens, nothing stored: 962,743,762,944."""
    ### BEGIN SOLUTION
    hidden, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * config.intermediate_size
    weights = config.num_layers * layer + hidden * config.vocab_size
    attention = 2 * q * (context + new) * config.num_layers
    return 2 * batch * new * (weights + attention)
    ### END SOLUTION


# %%
check("00.forward_flops", forward_flops)

# %% [markdown]
# <details><summary>Hint 1: a nudge</summary>
#
# Count the weights in the matrices of one layer first. Each is used once per new token: one multiplication, one
# addition.
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# `tokens = batch * new`. Matrices: `2 * tokens * (layers * weights_of_a_layer + hidden * vocab)`. Attention, per
# layer and new token: `heads * head_dim * (context + new)` multiply-adds for the scores, and as many for the values.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# - Half: a multiply-add is two FLOPs.
# - Too small in the attention: query heads share keys in memory, but each still multiplies with them. Use `num_heads`
#   there.
# - Too large on models with few KV heads: k and v have `kv_heads * head_dim` columns.
# - Right for context 0 only: new tokens see the stored ones too.
# - Wrong where head_dim is unusual: `heads * head_dim` need not be `hidden`.
# </details>

# %% [markdown]
# ## Task 3. What a decode step reads (10 minutes, 2 points)
#
# **What.** The bytes that one decode step of a batch must read: all weights once, and for each request the keys and
# values (K and V) of its own context.
#
# **Why.** Divided by the bandwidth (带宽) of the memory it is the fastest possible decode step. The weights are
# shared by the batch (批次), the KV cache is not. Leave out the new token's own K and V and the activations.


# %%
def decode_bytes(config, parameters, contexts, weight_bytes=2, kv_bytes=2):
    """Bytes that one decode step reads, an integer.

    config: a ModelConfig (`num_layers`, `num_kv_heads`, `head_dim`). parameters: how many weights the model has.
    contexts: tokens stored for each request of the batch, a list. weight_bytes, kv_bytes: bytes of one number.
    Example: llama-3.1-8b with 8 * 10**9 parameters and contexts [1000, 3000] is 16,524,288,000.
    """
    ### BEGIN SOLUTION
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_bytes  # K and V of one token
    return parameters * weight_bytes + token * sum(contexts)
    ### END SOLUTION


# %%
check("00.decode_bytes", decode_bytes)

# %% [markdown]
# <details><summary>Hint 1: a nudge</summary>
#
# What does a second request in the batch add: weights, cache, or both?
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# One token of one request stores, in each layer and for each KV head, head_dim numbers of K and as many of V. Sum the
# contexts; add the weights once.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# - Right for one request, too large for more: the weights were read once per request.
# - The cache part is half: K without V.
# - Several times too large: `num_heads` in place of `num_kv_heads`.
# - Right for equal contexts only: `len(contexts) * contexts[0]`, or the longest one.
# - Right in 2 bytes only: weights and cache have sizes of their own.
# </details>

# %% [markdown]
# ## Task 4. Goodput (10 minutes, 2 points)
#
# **What.** Goodput (有效吞吐): requests per second that met **both** targets of a service level objective (SLO,
# 服务水平目标).
#
# **Why.** Throughput counts tokens that came too late to please anybody. Judge each request on its own, then divide
# by the time of the whole run: first arrival of any request to last token of any request, good or not.
#
# - A request is good if its TTFT and its TPOT are at most the limits (equal is good).
# - An answer of one token has no TPOT and meets any limit on it.
# - A request without tokens failed: it is not good. If none got a token, goodput is 0.0.


# %%
def goodput(requests, ttft_limit, tpot_limit):
    """Good requests per second, a float.

    requests: list of (arrival, token_times), in any order; token_times may be empty.
    Example: goodput([(0.0, [1.0, 2.0]), (1.0, [4.0, 5.0])], 2.0, 1.0) is 1 good request / 5 s = 0.2.
    """
    ### BEGIN SOLUTION
    good, end = 0, None
    for arrival, times in requests:
        if not times:
            continue
        end = times[-1] if end is None else max(end, times[-1])
        tpot = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        good += times[0] - arrival <= ttft_limit and tpot <= tpot_limit
    return 0.0 if end is None else good / (end - min(arrival for arrival, _ in requests))
    ### END SOLUTION


# %%
check("00.goodput", goodput)

# %% [markdown]
# <details><summary>Hint 1: a nudge</summary>
#
# Two separate things: which requests are good, and how long the whole run took.
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# Loop over the requests; skip those without tokens; compute TTFT and TPOT as in task 1; count if both are within
# their limits. Duration: the largest last token less the smallest arrival, over all requests.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# - All or nothing: the mean over requests was held against the limits. A mean hides the users who waited.
# - Too large: one of the two targets is enough, or the run was measured over the good requests only.
# - Off only at the border: `<` in place of `<=`.
# - Off where the first request does not arrive at 0: divide by last token - first arrival.
# </details>

# %% [markdown]
# ## Task 5. Debug it: the benchmark that flatters (15 minutes, 3 points)
#
# **What.** A load test (压力测试) ran in several client processes and merged their reports with the function below.
# It looks tidy, and all three figures of it are wrong. Each mistake has been published in earnest. Mend it so that
# - `output_tokens_per_s` is the output tokens of all clients over the time of the whole run, first arrival to last
#   token;
# - `mean_tpot` is the mean, over the requests with two tokens or more, of each request's TPOT;
# - `p99_ttft` is the 99th percentile (百分位数) of TTFT over all requests, as `np.percentile` gives it.
#
# **Why.** Nobody sees from a figure how it was made. Read benchmark code before you believe it, your own first.


# %%
def summarise(clients):
    """{"output_tokens_per_s": float, "mean_tpot": float, "p99_ttft": float} of a run.

    clients: a list of clients; each is a list of requests (prompt_tokens, arrival, token_times). All share one clock,
    and every request got at least one token.
    """
    ### BEGIN SOLUTION
    requests = [request for client in clients for request in client]
    tokens = sum(len(times) for _, _, times in requests)
    duration = max(times[-1] for _, _, times in requests) - min(arrival for _, arrival, _ in requests)
    tpots = [(times[-1] - times[0]) / (len(times) - 1) for _, _, times in requests if len(times) > 1]
    ttfts = [times[0] - arrival for _, arrival, times in requests]
    return {
        "output_tokens_per_s": tokens / duration,
        "mean_tpot": sum(tpots) / len(tpots),
        "p99_ttft": float(np.percentile(ttfts, 99)),
    }
    ### END SOLUTION
    ### BEGIN GIVEN
    # speeds, tpots, p99s = [], [], []
    # for client in clients:
    #     ttfts = []
    #     for prompt_tokens, arrival, token_times in client:
    #         e2e = token_times[-1] - arrival
    #         speeds.append((prompt_tokens + len(token_times)) / e2e)
    #         tpots.append(e2e / len(token_times))
    #         ttfts.append(token_times[0] - arrival)
    #     p99s.append(np.percentile(ttfts, 99))
    # return {
    #     "output_tokens_per_s": sum(speeds),
    #     "mean_tpot": sum(tpots) / len(tpots),
    #     "p99_ttft": sum(p99s) / len(p99s),
    # }
    ### END GIVEN


# %%
check("00.summarise", summarise)

# %% [markdown]
# <details><summary>Hint 1: a nudge</summary>
#
# Take one client with two requests, one after the other. What should tokens/s be, and what does `sum(speeds)` say?
# And what if one client had 1 slow request and another had 1000 quick ones: what is the P99?
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# Put the requests of all clients into one list. Tokens/s: total output tokens over one duration. TPOT: task 1, for
# requests with a gap. P99: one `np.percentile` over all TTFTs, since percentiles cannot be averaged.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# - tokens/s far too large: prompt tokens are counted, or speeds of requests are summed though they did not all run at
#   once.
# - mean_tpot too large: TTFT is still in it, or an answer of one token counts with its whole e2e.
# - mean_tpot close but off: all gaps pooled in one mean (long answers then weigh more), or answers of one token
#   counted as 0.
# - p99_ttft off: it is still the mean, or the maximum, of the clients' own P99s.
# </details>

# %% [markdown]
# ## Task 6. Estimate it: the ceiling of a server (10 minutes, 2 points)
#
# Llama-3.1-8B (8.03 x 10^9 weights; 32 layers, 32 query heads, 8 KV heads, head dim 128) in bf16, weights and cache,
# on one GPU that reads 3.35 TB/s. **32 users** decode at the same time, each with **8192 tokens** of context. At most
# how many tokens per second do all of them get together?
#
# Pencil first: how many bytes does one step read, how long does that take, how many tokens does it make?
# `decode_bytes` may check your arithmetic. Within 4 %.

# %%
### BEGIN SOLUTION
tokens_per_second = 32 * 3.35e12 / decode_bytes(known_shape("llama-3.1-8b"), 8.03e9, [8192] * 32)
### END SOLUTION

# %%
check("00.estimate", tokens_per_second)

# %% [markdown]
# <details><summary>Hint 1: a nudge</summary>
#
# The KV caches of 32 users are larger than the weights.
# </details>
# <details><summary>Hint 2: the plan</summary>
#
# Weights: 2 bytes each. One token of cache: 2 x 32 layers x 8 KV heads x 128 x 2 bytes = 128 KiB. Times 8192, times
# 32. Add, divide by 3.35 x 10^12 for the seconds of a step; a step makes 32 tokens.
# </details>
# <details><summary>Hint 3: my values look wrong</summary>
#
# - About 6700: the cache is missing. About 6300: the cache of one user only.
# - About 700: 32 KV heads instead of 8. About 3200: K without V.
# - About 66: one user's share; the question is for all.
# - About 200: each user was made to read the weights again.
# </details>
