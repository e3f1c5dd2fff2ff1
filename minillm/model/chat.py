"""Chat templates: the model's own Jinja text that turns a list of messages into one prompt.

Chapter 00. Templates come with the weights, so they are somebody else's code: they run in Jinja's immutable sandbox,
with the few helpers that Hugging Face templates rely on (`raise_exception`, `strftime_now`, an unescaped `tojson`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import CallBlock
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minillm.errors import PromptError


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks an answer for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (the attribute that jinja2 reads)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def compile_template(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def render(template: str, messages: Sequence[Mapping], **variables) -> str:
    """The prompt for these messages. variables: what else the template may read (bos_token, tools, ...)."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise PromptError('messages must be a list such as [{"role": "user", "content": "Hello"}]')
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise PromptError(f"messages[{i}]={message!r} must be a dict with role and content")
    try:
        return compile_template(template).render(messages=[dict(m) for m in messages], **variables)
    except jinja2.TemplateError as error:
        raise PromptError(f"the chat template refused these messages: {error}") from error
    except Exception as error:  # a template is a program: it can fail in any way
        raise PromptError(f"the chat template failed on these messages: {error!r}") from error
