"""From options to a proposer. Chapters 16 and 17.

Whatever is loaded here runs beside the target: its weights and its cache are memory that the target does not get.
"""

from __future__ import annotations

from importlib import import_module

from minillm.errors import ParamsError, illegal
from minillm.model.decoder import Decoder
from minillm.model.layout import pack_linears
from minillm.model.tokenizer import Tokenizer, load_tokenizer
from minillm.model.weights import load_model
from minillm.quant.named import check_name, quantize_by_name
from minillm.speculative.adaptive import AdaptiveLength, FixedLength
from minillm.speculative.draft_model import DraftModel, check_same_vocabulary
from minillm.speculative.early_exit import first_layers
from minillm.speculative.medusa import typical
from minillm.speculative.ngram import NGram
from minillm.speculative.options import SpeculativeOptions
from minillm.speculative.proposer import Proposer
from minillm.speculative.verify import Walk

TRAINED = {"medusa": "minillm.speculative.medusa", "eagle": "minillm.speculative.eagle"}  # each has a `make`


def make_proposer(
    options: SpeculativeOptions, name: str, model: Decoder, tokenizer: Tokenizer | None, sequences: int
) -> Proposer:
    """name: what the target was loaded by. model: the target. sequences: how many requests run at once."""
    method = options.method
    if method == "ngram":
        return NGram(options.ngram)
    plain = getattr(model, "model", model)  # of a compiled target the layers that it was made of
    if options.layers is not None:
        return DraftModel(first_layers(plain, options.layers), sequences)
    if options.bits is not None:
        check_name(options.bits)
        copy = quantize_by_name(load_model(name, dtype=model.dtype, device=model.device), options.bits)
        return DraftModel(pack_linears(copy), sequences)
    if method in TRAINED:
        try:
            module = import_module(TRAINED[method])
        except ModuleNotFoundError:
            raise ParamsError(illegal("speculative", method, "this chapter is not there yet")) from None
        return module.make(options, name, plain, sequences)
    draft = load_model(method, dtype=model.dtype, device=model.device)
    check_same_vocabulary(model.config, draft.config, tokenizer, load_tokenizer(method))
    return DraftModel(pack_linears(draft), sequences)


def make_lengths(options: SpeculativeOptions) -> AdaptiveLength | FixedLength:
    return AdaptiveLength(options.num_tokens) if options.adaptive else FixedLength(options.num_tokens)


def make_walk(options: SpeculativeOptions) -> Walk | None:
    return typical() if options.acceptance == "typical" else None
