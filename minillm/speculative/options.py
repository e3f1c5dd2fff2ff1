"""Which speculation, by name: what `LLM(speculative=...)` takes, checked before anything is loaded.

Chapters 16 and 17. A name, or a dictionary with the fields below, `method` the only one that must be there.

    "ngram"                       what followed the same tokens before (prompt lookup)
    "self-int8" ... "self-int2"   the target's own copy with fewer bits
    "exit-2"                      the target's first two layers
    "medusa", "eagle"             heads that were trained on the target's features (chapter 17)
    anything else                 a model with the same tokenizer: "tiny-draft", a folder, a hub id
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minillm.errors import ParamsError, illegal
from minillm.quant.named import NAMED

WITH_HEADS = ("medusa", "eagle")


@dataclass(frozen=True)
class SpeculativeOptions:
    """method: as above. num_tokens: the longest draft. adaptive: measure, choose the length, switch off if it loses;
    else every draft is num_tokens long. ngram: the most tokens that prompt lookup compares. tree: Medusa and EAGLE
    draft trees (else chains). heads: the folder where the trainer left Medusa's or EAGLE's (default: the package, or
    else the cache folder). acceptance: "exact", or Medusa's "typical", which CHANGES THE DISTRIBUTION of sampled
    text for more tokens a step; greedy requests are exact under both."""

    method: str
    num_tokens: int = 4
    adaptive: bool = True
    ngram: int = 3
    tree: bool = True
    acceptance: str = "exact"
    heads: str | Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.method, str) or not self.method:
            raise ParamsError(illegal("speculative", self.method, 'must be "ngram", "self-int4", "exit-2", a model'))
        if self.bits is not None and self.bits not in NAMED:
            legal = "must be " + " or ".join(f'"self-{name}"' for name in NAMED)
            raise ParamsError(illegal("speculative", self.method, legal))
        for name in ("num_tokens", "ngram"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ParamsError(illegal(f"speculative {name}", value, "must be a whole number of at least 1"))
        for name in ("adaptive", "tree"):
            if not isinstance(getattr(self, name), bool):
                raise ParamsError(illegal(f"speculative {name}", getattr(self, name), "must be True or False"))
        if self.acceptance not in ("exact", "typical"):
            raise ParamsError(illegal("speculative acceptance", self.acceptance, 'must be "exact" or "typical"'))
        if self.heads is not None:
            if self.method not in WITH_HEADS:
                legal = f"goes with {' and '.join(WITH_HEADS)}, not with {self.method!r}"
                raise ParamsError(illegal("speculative heads", self.heads, legal))
            if not isinstance(self.heads, (str, Path)) or not Path(self.heads).expanduser().is_dir():
                raise ParamsError(
                    illegal("speculative heads", self.heads, "must be a folder that the trainer filled")
                )

    @property
    def layers(self) -> int | None:
        """2 for "exit-2"."""
        found = re.fullmatch(r"exit-(\d+)", self.method)
        return int(found[1]) if found else None

    @property
    def bits(self) -> str | None:
        """ "int4" for "self-int4"."""
        return self.method.removeprefix("self-") if self.method.startswith("self-") else None


def parse(speculative: str | Mapping | SpeculativeOptions | None) -> SpeculativeOptions | None:
    if speculative is None or isinstance(speculative, SpeculativeOptions):
        return speculative
    if isinstance(speculative, str):
        return SpeculativeOptions(speculative)
    if not isinstance(speculative, Mapping):
        raise ParamsError(illegal("speculative", speculative, "must be None, a name, or a dictionary with a method"))
    known = set(SpeculativeOptions.__dataclass_fields__)
    if unknown := sorted(map(str, set(speculative) - known)):
        raise ParamsError(f"speculative has no field {unknown[0]}; it has {', '.join(sorted(known))}")
    if "method" not in speculative:
        raise ParamsError('speculative lacks its method: {"method": "ngram", "num_tokens": 4}')
    return SpeculativeOptions(**speculative)
