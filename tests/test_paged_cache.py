"""The paged cache through the real decoder: the same logits as one contiguous forward of each request alone."""

import random

import pytest
import torch

from minillm.cache import paged_plan
from minillm.cache.block_pool import BlockPool, BlockTable
from minillm.cache.contiguous import ContiguousCache
from minillm.cache.paged import PagedCache, PagedStep, cache_bytes
from minillm.cache.paged_plan import BATCH_SPREAD, BATCH_TOKENS, batches
from minillm.errors import ParamsError
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder

VOCAB = 61


def make_model(seed=0, dtype=torch.float64, **changes):
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_length=256,
    ).with_changes(**changes)
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # large enough that attention is far from uniform
                parameter.normal_(0, 0.4, generator=generator)
    return model


def random_config(rng):
    kv_heads = rng.choice((1, 2, 4))
    return {
        "num_layers": 2,
        "num_kv_heads": kv_heads,
        "num_heads": kv_heads * rng.choice((1, 2, 3)),
        "head_dim": rng.choice((4, 8)),
        "windows": rng.choice(((), (None, 3), (7, 7), (1, None))),
        "attention_softcap": rng.choice((None, None, 2.0)),
        "qk_norm": rng.random() < 0.3,
    }


@torch.inference_mode()
def alone(model, tokens):
    cache = ContiguousCache(model.config, 1, len(tokens), dtype=model.dtype)
    return model(torch.tensor([tokens]), cache=cache)[0]  # [length, vocab]


class Packed:
    """Runs any mix of requests through one PagedCache and keeps the logits of every token."""

    def __init__(self, model, num_blocks, block_size, rng=None, host_blocks=0, fill=float("nan")):
        self.model, self.size = model, block_size
        self.pool = BlockPool(num_blocks, block_size)
        if rng is not None:  # hand the blocks out in no order
            blocks = self.pool.allocate(num_blocks)
            rng.shuffle(blocks)
            self.pool.free(blocks)
        self.cache = PagedCache(model.config, num_blocks, block_size, model.dtype, host_blocks=host_blocks)
        self.cache.k.fill_(fill)  # what nobody wrote must reach nobody
        self.cache.v.fill_(fill)

    @torch.inference_mode()
    def step(self, work, padding=0):
        """work: [(table, new tokens)] -> the logits of each request's new tokens."""
        tokens, slots, positions = [], [], []
        for table, new in work:
            start = table.length
            self.cache.copy_blocks(table.append(self.pool, len(new)))
            tokens += new
            slots += table.slots(start, len(new))
            positions += range(start, start + len(new))
        width = max(len(table.blocks) for table, _ in work)
        step = PagedStep(
            torch.tensor(slots + [-1] * padding),
            torch.tensor([table.blocks + [0] * (width - len(table.blocks)) for table, _ in work]),
            [len(new) for _, new in work],
            [table.length for table, _ in work],
            torch.tensor(positions + [0] * padding),
        )
        self.cache.begin(step)
        logits = self.model(torch.tensor(tokens + [0] * padding), cache=self.cache)
        return logits[: len(tokens)].split([len(new) for _, new in work])


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)  # the soft cap's softmax is in float32


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 16, 64])
@pytest.mark.parametrize("seed", range(8))
def test_any_mix_of_chunks_and_decodes_equals_each_request_alone(seed, block_size, monkeypatch):
    rng = random.Random(seed * 100 + block_size)
    monkeypatch.setattr(paged_plan, "BATCH_SPREAD", rng.choice((0.0, 0.0, BATCH_SPREAD)))  # 0: any lengths together
    counts = rng.choice(((0, 1, 1, 1), (0, 1, 1, 1, 1, 1, 2, 9), (1, 2, 9, 99)))
    model = make_model(seed, **random_config(rng))
    texts = [
        [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, block_size, rng.randint(1, 40))))] for _ in range(5)
    ]
    run = Packed(model, sum(-(-len(t) // block_size) for t in texts), block_size, rng)
    tables, got = [BlockTable(block_size) for _ in texts], [[] for _ in texts]
    while any(table.length < len(text) for table, text in zip(tables, texts)):
        work = []
        for i in rng.sample(range(5), 5):
            left = len(texts[i]) - tables[i].length
            count = min(left, rng.choice(counts) if tables[i].length or rng.random() < 0.5 else left)
            if count:
                work.append((i, texts[i][tables[i].length : tables[i].length + count]))
        if work:
            out = run.step([(tables[i], new) for i, new in work], padding=rng.choice((0, 0, 3)))
            for (i, _), logits in zip(work, out):
                got[i].append(logits)
    for text, logits in zip(texts, got):
        close(torch.cat(logits), alone(model, text))
    assert run.pool.free_count == 0  # to the last block


@pytest.mark.parametrize("prompt", [15, 16, 17])
def test_greedy_decoding_gives_the_same_tokens(prompt):
    """A prompt just below, at and above the block border; float32 on both sides."""
    model, rng = make_model(dtype=torch.float32), random.Random(prompt)
    texts = [[rng.randrange(VOCAB) for _ in range(prompt)] for _ in range(3)]
    run, tables = Packed(model, 9, 16, rng), [BlockTable(16) for _ in texts]
    out = run.step(list(zip(tables, texts)))
    written = [[] for _ in texts]
    for _ in range(20):
        for tokens, logits in zip(written, out):
            tokens.append(int(logits[-1].argmax()))
        out = run.step([(table, tokens[-1:]) for table, tokens in zip(tables, written)])
    for text, tokens in zip(texts, written):
        expected = alone(model, text + tokens)[len(text) - 1 : -1].argmax(-1)
        assert tokens == expected.tolist()


def test_two_tables_share_a_prefix_and_part_by_copy_on_write():
    model, rng = make_model(), random.Random(0)
    prompt = [rng.randrange(VOCAB) for _ in range(10)]
    run, table = Packed(model, 8, 4, rng), BlockTable(4)
    run.step([(table, prompt)])
    twins = [table] + [table.fork(run.pool) for _ in range(2)]
    ends = [[rng.randrange(VOCAB) for _ in range(4)] for _ in twins]
    got = [run.step([(twin, end[i : i + 1]) for twin, end in zip(twins, ends)]) for i in range(4)]
    for i, end in enumerate(ends):
        close(torch.cat([step[i] for step in got]), alone(model, prompt + end)[10:])
    assert run.pool.used_count == 2 + 3 * 2 and run.pool.count(table.blocks[0]) == 3


def test_a_prefix_computed_by_another_request_is_read_from_its_blocks():
    model, rng = make_model(), random.Random(1)
    prompt = [rng.randrange(VOCAB) for _ in range(12)]
    run, first = Packed(model, 8, 4, rng), BlockTable(4)
    run.step([(first, prompt)])
    run.pool.share(first.blocks[:2])
    second = BlockTable(4, first.blocks[:2], 8)
    (logits,) = run.step([(second, [*prompt[8:], 5])])
    close(logits, alone(model, [*prompt, 5])[8:])


def test_swap_out_and_in_is_bit_equal_and_decoding_goes_on():
    model, rng = make_model(dtype=torch.float32), random.Random(2)
    text = [rng.randrange(VOCAB) for _ in range(14)]
    run, table, other = Packed(model, 5, 4, rng, host_blocks=6), BlockTable(4), BlockTable(4)
    host = BlockPool(6, 4)
    host.allocate(1)
    run.step([(table, text[:13])])
    before = run.cache.k[:, table.blocks].clone(), run.cache.v[:, table.blocks].clone()
    old = list(table.blocks)
    run.cache.swap_out(*zip(*table.swap(run.pool, host)))
    run.step([(other, [rng.randrange(VOCAB) for _ in range(20)])])  # takes every block
    assert set(other.blocks) >= set(old)
    other.free(run.pool)
    run.pool.allocate(1)
    run.cache.swap_in(*zip(*table.swap(host, run.pool)))
    assert table.blocks != old
    for store, stored in zip((run.cache.k, run.cache.v), before):
        valid = store[:, table.blocks].flatten(1, 2)[:, :13]
        assert torch.equal(valid, stored.flatten(1, 2)[:, :13])
    (logits,) = run.step([(table, text[13:])])
    close(logits, alone(model, text)[13:])


def test_copies_read_before_they_write():
    cache = PagedCache(make_model().config, 4, 2)
    for block in range(4):
        cache.k[:, block], cache.v[:, block] = block, -block
    cache.copy_blocks([(0, 1), (1, 2), (2, 0)])
    assert cache.k[:, :, 0, 0, 0].tolist() == [[2, 0, 1, 3]] * 2
    assert cache.v[:, :, 1, 1, 3].tolist() == [[-2, 0, -1, -3]] * 2
    cache.copy_blocks([])
    with pytest.raises(ParamsError, match="1 blocks cannot be copied to 2"):
        cache.swap_out([0], [0, 1])


def test_only_the_mapped_slots_are_written():
    model = make_model()
    run, table = Packed(model, 6, 4, random.Random(3), fill=7.5), BlockTable(4)
    run.step([(table, [1, 2, 3, 4, 5])], padding=4)
    written = set(table.slots(0, 5))
    for store in (run.cache.k, run.cache.v):
        flat = store.flatten(1, 2)
        for slot in range(24):
            assert bool((flat[:, slot] == 7.5).all()) == (slot not in written)


def test_padding_tokens_get_zeros_whatever_the_pool_holds():
    cache = PagedCache(make_model().config, 2, 4)
    cache.k.fill_(float("nan"))
    cache.begin(PagedStep(torch.tensor([0, -1, -1]), torch.zeros(1, 1, dtype=torch.int64), [1], [1], torch.zeros(3)))
    q, kv = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    out = cache.attend(make_model().layers[0].attn.layer, q, kv, kv)
    assert torch.equal(out[1:], torch.zeros(2, 4, 8)) and torch.isfinite(out).all()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_broken_request_poisons_nobody_else(softcap, monkeypatch):
    """One request's K and V are NaN; the others, in the same batch, and in blocks it used before, do not notice."""
    monkeypatch.setattr(paged_plan, "BATCH_SPREAD", 0.0)
    model, rng = make_model(dtype=torch.float32, attention_softcap=softcap), random.Random(4)
    run = Packed(model, 12, 4, rng)
    bad, good = BlockTable(4), BlockTable(4)
    run.step([(bad, [1] * 9), (good, [2, 3, 4])])
    for store in (run.cache.k, run.cache.v):
        store[:, bad.blocks] = float("nan")
    broken, logits = run.step([(bad, [1]), (good, [5])])
    assert broken.isnan().all()
    close(logits, alone(model, [2, 3, 4, 5])[3:])
    bad.free(run.pool)
    late = BlockTable(4)
    run.step([(late, [6] * 33)])
    late_logits, logits = run.step([(late, [7]), (good, [6])])
    close(late_logits, alone(model, [6] * 33 + [7])[33:])
    close(logits, alone(model, [2, 3, 4, 5, 6])[4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_memory_equals_the_formula(dtype):
    config = make_model().config
    cache = PagedCache(config, 10, 16, dtype, host_blocks=3)
    assert cache.nbytes == 2 * 2 * 10 * 16 * 2 * 8 * dtype.itemsize == cache_bytes(config, 10, 16, dtype)
    assert cache.host_k.nbytes + cache.host_v.nbytes == cache_bytes(config, 3, 16, dtype)


def test_a_cache_of_another_type_than_the_model():
    model, rng = make_model(dtype=torch.float32), random.Random(5)
    run, table = Packed(model, 4, 8, rng), BlockTable(8)
    run.cache = PagedCache(model.config, 4, 8, torch.bfloat16)
    text = [rng.randrange(VOCAB) for _ in range(20)]
    logits = torch.cat([run.step([(table, text[:9])])[0], *(run.step([(table, [t])])[0] for t in text[9:])])
    assert logits.dtype == torch.float32
    error = (logits - alone(model, text)).norm() / logits.norm()
    assert 0 < error < 0.05


def test_decodes_are_batched_by_length():
    rng = random.Random(6)
    decodes = [(rng.randint(1, 900), row, row) for row in range(64)]
    groups = batches(decodes, whole=False)
    assert sorted(d for group in groups for d in group) == sorted(decodes)
    for group in groups:
        longest = max(length for length, _, _ in group)
        assert min(length for length, _, _ in group) >= BATCH_SPREAD * longest
        assert len(group) == 1 or len(group) * longest <= BATCH_TOKENS
    assert len(batches(decodes, whole=True)) == 1 and batches([], whole=True) == []


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "host_blocks"])
def test_a_bad_size_is_refused(name):
    sizes = {"num_blocks": 4, "block_size": 4, "host_blocks": 0} | {name: -1}
    with pytest.raises(ParamsError, match=name):
        PagedCache(make_model().config, **sizes)
