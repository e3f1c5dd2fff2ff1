"""From options to a proposer. Chapters 16 and 17.

Whatever is loaded here runs beside the target: its weights and its cache are memory that the target does not get.
"""

from __future__ import annotations

from minillm.model.decoder import Decoder
from minillm.model.layout import pack_linears
from minillm.model.tokenizer import Tokenizer, load_tokenizer
from minillm.model.weights import load_model
from minillm.quant.named import quantize_by_name
from minillm.speculative import eagle, medusa
from minillm.speculative.adaptive import AdaptiveLength, FixedLength
from minillm.speculative.draft_model import DraftModel, check_same_vocabulary
from minillm.speculative.early_exit import first_layers
from minillm.speculative.ngram import NGram
from minillm.speculative.options import SpeculativeOptions
from minillm.speculative.proposer import Proposer
from minillm.speculative.verify import Walk

TRAINED = {"medusa": medusa.make, "eagle": eagle.make}


def make_proposer(
    options: SpeculativeOptions, name: str, model: Decoder, tokenizer: Tokenizer | None, sequences: int
) -> Proposer:
    """name: what the target was loaded by. model: the target. sequences: how many requests run at once."""
    method = options.method
    if method == "ngram":
        return NGram(options.ngram)
    plain = getattr(model, "model", model)  # of a compiled target the layers that it was made of
    if options.layers is not None:
        return DraftModel(first_layers(plain, options.layers, "speculative exit"), sequences)
    if options.bits is not None:
        copy = quantize_by_name(load_model(name, dtype=model.dtype, device=model.device), options.bits)
        return DraftModel(pack_linears(copy), sequences)
    if method in TRAINED:
        return TRAINED[method](options, name, plain, sequences)
    draft = load_model(method, dtype=model.dtype, device=model.device)
    check_same_vocabulary(model.config, draft.config, tokenizer, load_tokenizer(method))
    return DraftModel(pack_linears(draft), sequences)


def make_lengths(options: SpeculativeOptions) -> AdaptiveLength | FixedLength:
    return AdaptiveLength(options.num_tokens) if options.adaptive else FixedLength(options.num_tokens)


def make_walk(options: SpeculativeOptions) -> Walk | None:
    return medusa.typical() if options.acceptance == "typical" else None
