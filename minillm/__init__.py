"""minillm: LLM inference, built up one technique at a time and measured at every step.

    from minillm import LLM, SamplingParams
    llm = LLM("tiny")
    print(llm.generate(["Once upon a time"], SamplingParams(max_tokens=64))[0].text)

Names are resolved on first use, so that `import minillm` stays cheap.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "LLM": "minillm.llm",
    "RequestOutput": "minillm.llm",
    "SamplingParams": "minillm.model.sampling",
    "load_model": "minillm.model.weights",
    "load_tokenizer": "minillm.model.tokenizer",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'minillm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
