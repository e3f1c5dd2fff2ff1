"""LLM: the one class a user starts from.

    llm = LLM("tiny")
    outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))

It turns prompts into token ids, hands them to the engine, and steps the engine until they are answered. Everything
that makes it fast is below: continuous batching (chapter 04), paged blocks (05), the scheduler (06), and the prefix
cache (07), which lives as long as the LLM does, so a second call profits from the first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch

from minillm.cache.paged_kernel import compiled_attention
from minillm.engine.engine import Engine
from minillm.engine.options import EngineOptions
from minillm.engine.outputs import Completion, RequestMetrics, RequestOutput
from minillm.engine.parallel import start_parallel
from minillm.engine.request import RequestGroup
from minillm.engine.speculation import Speculator
from minillm.errors import LogitsError, ParamsError, PromptError, illegal
from minillm.kernels.fused import try_fuse
from minillm.kernels.layers_cpu import compile_decoder
from minillm.model.decoder import Decoder
from minillm.model.generate import check_prompt
from minillm.model.layout import pack_linears
from minillm.model.sampling import SamplingParams
from minillm.model.tokenizer import load_tokenizer
from minillm.model.weights import load_model
from minillm.quant.checkpoints import is_quantized, load_quantized
from minillm.quant.named import check_name, quantize_by_name
from minillm.speculative.make import make_lengths, make_proposer, make_walk
from minillm.speculative.options import SpeculativeOptions, parse

Prompt = str | Sequence[int]


class LLM:
    """model: "tiny", "smollm2-135m", a folder, a .gguf file, a hub id, or "shape:NAME" (random weights).

    dtype: "float32", "bfloat16", "float16" or a torch dtype (default: float32 on a CPU, the checkpoint's on a GPU).
    device: "cpu", "cuda", "cuda:1" ... (default: a GPU if there is one).
    seed: makes runs repeatable for requests that bring no seed of their own.
    max_num_seqs: requests that run at once. max_num_batched_tokens: tokens of one step, over all requests.
    block_size: tokens a KV block. num_blocks: blocks of the pool (default: room for max_num_seqs full contexts, or
    what memory allows). enable_prefix_caching: "off", "hash" or "radix".
    enable_chunked_prefill: long prompts are computed in pieces, beside the decodes of others.
    preemption: what happens to a request whose blocks are needed: "recompute" or "swap" (to host memory).
    policy: "fcfs", first come first served, or "priority" (see the `priority` argument of `generate`):
    urgent requests also take the place of less urgent ones that run.
    attention: "naive" (the formula), "sdpa" (torch's), "triton" (chapter 09's kernels for a GPU), "cpp" (its kernel
    for a CPU), "auto": by device, and by whether decode steps are compiled.
    kv_cache_dtype: bits of keys and values, "int8", "fp8", "int4" or "int2" (chapter 14; default: the model's type).
    quantization: bits of the weights, "int8", "int4", "int3" or "int2", or of both sides of each product, "w8a8" or
    "fp8" (default: as the checkpoint has them).
    compile: what stands between the kernels of a step is taken out (chapter 10): on a CPU all layers run in one call,
    or, for models and caches that this does not know, as graphs that torch.compile takes seconds to make; on a GPU
    as captured graphs of fused kernels. Where that cannot be, `llm.engine.runner` says why.
    speculative: where drafts of the next tokens come from (chapter 16): "ngram", "tiny-distilled" or another model,
    "self-int4", "exit-2", "medusa", "eagle" (chapter 17), or a dictionary of `SpeculativeOptions`. By default it
    switches itself off where it loses.
    tensor_parallel_size: ranks that share every matrix (chapter 18), one GPU each, or processes on a CPU; they end
    with `close()`, with the block of `with LLM(...) as llm`, or with this process. Under torchrun: its ranks.
    more: any other field of `EngineOptions`, such as prefill_first, victim, ageing, headroom, lookahead, patience,
    num_host_blocks, keep_log; what each means stands there.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        enable_prefix_caching: str = "off",
        enable_chunked_prefill: bool = True,
        preemption: str = "recompute",
        policy: str = "fcfs",
        attention: str = "auto",
        kv_cache_dtype: str = "auto",
        quantization: str | None = None,
        compile: bool = False,
        speculative: str | Mapping | SpeculativeOptions | None = None,
        tensor_parallel_size: int = 1,
        seed: int | None = None,
        **more: Any,
    ) -> None:
        for name in more:
            if name not in EngineOptions.__dataclass_fields__:
                others = sorted(set(EngineOptions.__dataclass_fields__) - set(LLM.__init__.__kwdefaults__))
                raise ParamsError(f"LLM has no option {name}; besides those of its signature: {', '.join(others)}")
        if not isinstance(compile, bool):
            raise ParamsError(illegal("compile", compile, "must be True or False"))
        more.setdefault("cuda_graphs", compile and kv_cache_dtype == "auto")  # a captured step reads floats
        options = EngineOptions(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            preemption=preemption,
            policy=policy,
            attention=attention,
            kv_cache_dtype=kv_cache_dtype,
            **more,
        )
        if seed is not None and (not isinstance(seed, Integral) or isinstance(seed, bool)):
            raise ParamsError(illegal("seed", seed, "must be None or a whole number"))
        check_name(quantization)
        wanted = parse(speculative)
        self.parallel = None  # its ranks, if there are several
        if tensor_parallel_size != 1 or isinstance(tensor_parallel_size, bool):
            self.parallel = start_parallel(
                model, tensor_parallel_size, dtype, device, quantization, options, compile=compile, speculative=wanted
            )
            loaded, options = self.parallel.model, self.parallel.options
        else:
            loaded = load_weights(model, dtype, device, quantization)
        try:
            self._assemble(model, loaded, options, compile, wanted, None if seed is None else int(seed))
        except BaseException:  # a draft that does not exist, say: no rank stays behind
            self.close()
            raise

    def _assemble(self, name: str, loaded: Decoder, options: EngineOptions, compile: bool, wanted, seed) -> None:
        """From weights to an engine. name: what they were loaded by. wanted: SpeculativeOptions, or None."""
        if compile:
            try_fuse(loaded)  # on a GPU; elsewhere, and where it fails, the model stays as it is
            if options.attention == "auto" and options.kv_cache_dtype == "auto":
                options = replace(options, attention=compiled_attention(loaded.device, loaded.dtype))
        self.model = compile_decoder(loaded) if compile else pack_linears(loaded)
        self.config = self.model.config
        self.tokenizer = load_tokenizer(name)
        eos_ids = tuple(dict.fromkeys((*self.config.eos_ids, *self.tokenizer.eos_ids)))
        speculator = None
        if wanted is not None:
            proposer = make_proposer(wanted, name, self.model, self.tokenizer, options.max_num_seqs)
            speculator = Speculator(proposer, make_lengths(wanted), make_walk(wanted))
        self.engine = Engine(self.model, options, self.tokenizer, eos_ids, seed, speculator)
        if self.parallel is not None:
            self.parallel.attach(self.engine)

    def close(self) -> None:
        """End the other ranks (tensor_parallel_size above 1); nothing else holds anything. Twice is harmless."""
        if self.parallel is not None:
            self.parallel.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, unless SamplingParams.ignore_eos says otherwise."""
        return self.engine.eos_ids

    @eos_ids.setter
    def eos_ids(self, ids: Sequence[int]) -> None:
        self.engine.eos_ids = tuple(ids)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """One RequestOutput a prompt, in order. params and priority: one for all, or one a prompt.

        priority: lower is more urgent. cache_salt: cached prefixes are shared only under the same salt.
        """
        arrival = time.perf_counter()
        prompts = _as_list(prompts)
        per_prompt = self._params_list(params, len(prompts))
        priorities = self._priorities(priority, len(prompts))
        if not isinstance(cache_salt, str):
            raise ParamsError(illegal("cache_salt", cache_salt, "must be a string"))
        ids = [self._encode(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
        groups: list[RequestGroup] = []
        try:
            for tokens, each, urgency in zip(ids, per_prompt, priorities):
                groups.append(self.engine.add(tokens, each, priority=urgency, salt=cache_salt, arrival=arrival))
            while not all(group.finished for group in groups):
                self.engine.step()
        finally:  # a refused prompt or an interrupt leaves nothing behind
            for group in groups:
                self.engine.abort(group)
        texts = (prompt if isinstance(prompt, str) else None for prompt in prompts)
        return [RequestOutput(t, i, self.engine.completions(g)) for t, i, g in zip(texts, ids, groups)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The text in pieces, as it comes; never half a character, never part of a stop string.

        Streams may be read in any mixture; one that is closed early frees its blocks.
        """
        params = self._params_list(params, 1)[0]
        if params.n != 1:
            raise ParamsError(illegal("n", params.n, "must be 1 for a stream"))
        return self._stream(self._encode(prompt, "prompt"), params, time.perf_counter())

    def _stream(self, ids: list[int], params: SamplingParams, arrival: float) -> Iterator[str]:
        group = self.engine.add(ids, params, arrival=arrival)
        answer = group.requests[0].answer
        try:
            while not group.finished:
                if not answer.unread:
                    self.engine.step()
                if piece := answer.read():
                    yield piece
            if piece := answer.read():  # finished while another stream was read
                yield piece
        finally:
            self.engine.abort(group)

    def chat(self, messages: Sequence[dict], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation, [{"role": "user", "content": "..."}, ...], under the model's own chat template."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        output = self.generate([self.tokenizer.encode(text, add_special_tokens=False)], params)[0]
        output.prompt = text
        return output

    def _encode(self, prompt: Prompt, name: str) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError(f"{name} is empty: it must hold at least one character")
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, (list, tuple)) or getattr(prompt, "ndim", 0) > 0:
            ids = [_number(token) for token in prompt]
        else:
            raise PromptError(illegal(name, prompt, "must be a string or a list of token ids"))
        check_prompt(ids, self.config, name)
        return ids

    @staticmethod
    def _params_list(params, count: int) -> list[SamplingParams]:
        params = SamplingParams() if params is None else params
        if not isinstance(params, (SamplingParams, list, tuple)):
            raise ParamsError(illegal("params", params, "must be a SamplingParams, or a list of one a prompt"))
        many = [params] * count if isinstance(params, SamplingParams) else list(params)
        if len(many) != count:
            raise ParamsError(f"params has {len(many)} entries for {count} prompts: give one, or one a prompt")
        for entry in many:
            if not isinstance(entry, SamplingParams):
                raise ParamsError(illegal("params", entry, "must be a SamplingParams, or one a prompt"))
        return many

    @staticmethod
    def _priorities(priority, count: int) -> list[int]:
        many = list(priority) if isinstance(priority, (list, tuple)) else [priority] * count
        if len(many) != count:
            raise ParamsError(f"priority has {len(many)} entries for {count} prompts: give one, or one a prompt")
        for entry in many:
            if not isinstance(entry, Integral) or isinstance(entry, bool):
                raise ParamsError(illegal("priority", entry, "must be a whole number; lower is more urgent"))
        return [int(entry) for entry in many]


def load_weights(model: str, dtype, device, quantization: str | None) -> Decoder:
    """The model in its bits: quantised here by name, or as its folder holds it."""
    if not is_quantized(model):
        return quantize_by_name(load_model(model, dtype=dtype, device=device), quantization)
    if quantization is not None:
        raise ParamsError(illegal("quantization", quantization, f"must be None: {model} is quantised already"))
    return load_quantized(model, dtype=dtype, device=device, packed=True)


def _as_list(prompts) -> list[Prompt]:
    """A single string or a single list of token ids becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)) and getattr(prompts, "ndim", 0) < 1:  # an array or tensor is welcome
        raise PromptError(illegal("prompts", prompts, "must be a string, or a list of strings or of token ids"))
    if len(prompts) == 0:
        raise PromptError("prompts is empty: give at least one prompt")
    return [prompts] if isinstance(_number(prompts[0]), (int, float)) else list(prompts)


def _number(token):
    """A NumPy or torch scalar as Python's own number; anything else as it is."""
    return token.item() if getattr(token, "ndim", None) == 0 else token


__all__ = ["LLM", "Completion", "LogitsError", "RequestMetrics", "RequestOutput", "SamplingParams"]
