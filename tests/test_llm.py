"""LLM: what a user types, and every way of typing it wrong."""

import numpy as np
import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import ParamsError, PromptError, UnknownModelError
from minillm.model.generate import generate_naive

GREEDY = SamplingParams(max_tokens=12, temperature=0)
PROMPTS = ["Once upon a time", "The sea", "She had been the mistress of the house from a very early period, and"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", device="cpu", seed=0)


def test_greedy_is_the_naive_loop(llm):
    prompt = llm.tokenizer.encode(PROMPTS[0])
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)  # the naive loop knows no end of text
    assert llm.generate([prompt], params)[0].token_ids == generate_naive(llm.model, prompt, 12)


def test_a_batch_gives_each_prompt_what_it_gets_alone_and_keeps_the_order(llm):
    together = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [o.prompt for o in together] == PROMPTS


def test_rows_leave_the_batch_at_their_own_length(llm):
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (3, 12, 7)]
    outputs = llm.generate(PROMPTS, params)
    assert [len(o.token_ids) for o in outputs] == [3, 12, 7]
    assert {o.finish_reason for o in outputs} == {"length"}
    whole = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert all(w.token_ids[: len(o.token_ids)] == o.token_ids for w, o in zip(whole, outputs))


def test_more_prompts_than_the_batch_holds(llm):
    small = LLM("tiny", device="cpu", max_num_seqs=2)
    assert [o.token_ids for o in small.generate(PROMPTS, GREEDY)] == [
        o.token_ids for o in llm.generate(PROMPTS, GREEDY)
    ]


def test_a_second_call_gives_the_same(llm):
    assert llm.generate(PROMPTS, GREEDY)[1].token_ids == llm.generate(PROMPTS, GREEDY)[1].token_ids


def test_stream_is_generate_in_pieces(llm):
    for prompt in PROMPTS:
        assert "".join(llm.stream(prompt, GREEDY)) == llm.generate([prompt], GREEDY)[0].text


def test_a_single_prompt_needs_no_list(llm):
    ids = llm.tokenizer.encode("The sea")
    assert llm.generate("The sea", GREEDY)[0].token_ids == llm.generate(ids, GREEDY)[0].token_ids


def test_seeds_repeat_and_differ(llm):
    def run(seed, prompts=("The sea",)):
        params = [SamplingParams(max_tokens=12, seed=seed if p == "The sea" else None) for p in prompts]
        return llm.generate(list(prompts), params)[prompts.index("The sea")].token_ids

    assert run(1) == run(1) == run(1, ("Once upon a time", "The sea"))
    assert run(1) != run(2)


def test_n_answers_to_one_prompt(llm):
    output = llm.generate("The sea", SamplingParams(max_tokens=12, n=3, seed=5))[0]
    assert len({tuple(c.token_ids) for c in output.completions}) == 3


def test_stop_strings_and_stop_tokens_cut_the_text(llm):
    plain = llm.generate("Once upon a time", SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))[0]
    stop = plain.text[10:14]
    cut = llm.generate("Once upon a time", SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, stop=stop))[
        0
    ]
    assert cut.text == plain.text[: plain.text.index(stop)] and cut.finish_reason == "stop"
    token = plain.token_ids[5]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, stop_token_ids=[token])
    by_token = llm.generate("Once upon a time", params)[0]
    assert by_token.token_ids == plain.token_ids[: plain.token_ids.index(token) + 1]
    assert by_token.finish_reason == "stop"


def test_a_stop_string_that_completes_at_the_last_allowed_token(llm):
    plain = llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, stop=plain.text[-2:])
    cut = llm.generate("Once upon a time", params)[0]
    assert cut.finish_reason == "stop" and not cut.text.endswith(plain.text[-2:])


def test_end_of_text_stops_unless_ignored(llm):
    first = llm.generate("The sea", GREEDY)[0].token_ids
    ends = LLM("tiny", device="cpu")
    ends.eos_ids = (first[3],)
    stopped = ends.generate("The sea", GREEDY)[0]
    assert stopped.token_ids == first[: first.index(first[3]) + 1] and stopped.finish_reason == "stop"
    on = ends.generate("The sea", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0]
    assert on.token_ids == first and on.finish_reason == "length"


def test_logprobs_are_of_the_model(llm):
    output = llm.generate("The sea", SamplingParams(max_tokens=4, temperature=0, logprobs=2))[0]
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    ids = llm.tokenizer.encode("The sea")
    with torch.inference_mode():
        expected = llm.model(torch.tensor([ids]))[0, -1].log_softmax(-1).max().item()
    assert output.logprobs[0].logprob == pytest.approx(expected, abs=1e-4)
    assert len(output.logprobs[0].top) == 2


def test_metrics_add_up(llm):
    metrics = llm.generate("The sea", GREEDY)[0].metrics
    assert 0 <= metrics.queue <= metrics.ttft <= metrics.e2e
    assert metrics.ttft + metrics.tpot * 11 == pytest.approx(metrics.e2e)


@pytest.mark.parametrize("length", [1, 511, 512])
def test_prompts_up_to_the_context_are_answered(llm, length):
    output = llm.generate([[5] * length], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0]
    assert len(output.token_ids) == min(4, 513 - length) and output.finish_reason == "length"


def test_chat_uses_the_template(llm):
    output = llm.chat([{"role": "user", "content": "Who are you?"}], GREEDY)
    assert "Who are you?" in output.prompt and output.token_ids


BAD_PROMPTS = {
    "empty string": ("", "prompt 0 is empty"),
    "empty list": ([[]], "prompt 0 is empty"),
    "no prompts": ([], "prompts is empty"),
    "too long": ([[1] * 513], "513 tokens"),
    "outside the vocabulary": ([[1, 2048]], "token id=2048"),
    "negative id": ([[-1]], "token id=-1"),
    "not an id": ([[1.5]], "token id=1.5"),
    "second of two": (["fine", ""], "prompt 1 is empty"),
    "None": ([None], "prompt 0=None"),
    "no prompt": (None, "prompts=None"),
    "a number": (5, "prompts=5"),
    "a dict": ({"prompt": "a"}, "prompts="),
    "a generator": ((text for text in ["a"]), "prompts=<generator"),
    "a tensor without an axis": (torch.tensor(3), "prompts=tensor"),
    "a bool": ([True], "token id=True"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts_raise_one_clear_error(llm, name):
    prompts, message = BAD_PROMPTS[name]
    with pytest.raises(PromptError, match=message):
        llm.generate(prompts, GREEDY)
    assert llm.generate("The sea", GREEDY)[0].token_ids  # the next call is unharmed


@pytest.mark.parametrize("kind", [np.array, torch.tensor, lambda ids: [np.int64(i) for i in ids], tuple])
def test_token_ids_of_other_types_are_token_ids(llm, kind):
    ids = llm.tokenizer.encode("The sea")
    expected = llm.generate([ids], GREEDY)[0].token_ids
    assert llm.generate(kind(ids), GREEDY)[0].token_ids == expected
    assert llm.generate([kind(ids)], GREEDY)[0].token_ids == expected


def test_bad_options_raise_one_clear_error(llm):
    with pytest.raises(ParamsError, match="2 entries for 1 prompts"):
        llm.generate("The sea", [GREEDY, GREEDY])
    with pytest.raises(ParamsError, match="must be a SamplingParams"):
        llm.generate("The sea", [{"max_tokens": 3}])
    for params in (5, {"max_tokens": 3}, SamplingParams):
        with pytest.raises(ParamsError, match=r"^params="):
            llm.generate("The sea", params)
    for option in ({"seed": "x"}, {"seed": 1.5}, {"seed": True}, {"device": "xpu"}, {"device": 1.5}, {"device": ""}):
        name = next(iter(option))
        with pytest.raises(ParamsError, match=f"^{name}="):
            LLM("tiny", **{"device": "cpu", **option})
    with pytest.raises(ParamsError, match="max_num_seqs=0"):
        LLM("tiny", max_num_seqs=0)
    with pytest.raises(ParamsError, match=r"LLM has no option agein; besides .*: ageing, .*prefill_first, victim"):
        LLM("tiny", agein=3)
    for option in ({"victim": "youngest"}, {"ageing": 0}, {"num_host_blocks": 4}, {"lookahead": 4}):
        with pytest.raises(ParamsError, match=f"^{next(iter(option))}="):
            LLM("tiny", **option)
    with pytest.raises(ParamsError, match="n=2"):
        llm.stream("The sea", SamplingParams(n=2))
    with pytest.raises(UnknownModelError, match="did you mean tiny"):
        LLM("tinny")


def test_a_bad_row_does_not_harm_the_others(llm):
    good = llm.generate(PROMPTS[:2], GREEDY)
    broken = LLM("tiny", device="cpu")
    plain = broken.model.logits
    broken.model.logits = lambda hidden: _spoil_last_row(plain(hidden))
    outputs = broken.generate([*PROMPTS[:2], "x"], GREEDY)
    assert [o.token_ids for o in outputs[:2]] == [o.token_ids for o in good]
    assert outputs[2].finish_reason == "abort" and outputs[2].token_ids == []


def _spoil_last_row(logits):
    if logits.shape[0] == 3:
        logits[-1] = float("nan")
    return logits


def test_every_engine_option_can_be_given_to_the_llm(llm):
    more = {
        "prefill_first": True,
        "victim": "fewest_tokens",
        "ageing": 8,
        "headroom": 2,
        "lookahead": 3,
        "patience": 4,
    }
    more |= {"num_host_blocks": 5, "keep_log": True}
    other = LLM("tiny", device="cpu", num_blocks=40, preemption="swap", enable_prefix_caching="hash", **more)
    assert {name: getattr(other.engine.options, name) for name in more} == more
    assert other.generate("The sea", GREEDY)[0].token_ids == llm.generate("The sea", GREEDY)[0].token_ids
    assert other.engine.scheduler.log
