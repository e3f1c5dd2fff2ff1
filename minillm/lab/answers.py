"""Looking at a reader's answer from outside: its code, its name, the names it uses, the line on which it raised.

All chapters.
"""

import ast
import dis
import functools
import inspect
import linecache
import textwrap
import traceback
import types
from typing import Any

_WRAPPED = (property, staticmethod, classmethod)


def codes_of(answer: Any) -> set[types.CodeType]:
    """The code objects of a function, a class, an object or a collection of them, inner functions included."""
    if isinstance(answer, functools.partial):
        answer = answer.func
    if isinstance(answer, dict | list | tuple):
        return set().union(*map(codes_of, answer.values() if isinstance(answer, dict) else answer))
    if isinstance(answer, property):
        return set().union(*(codes_of(f) for f in (answer.fget, answer.fset) if f))
    answer = inspect.unwrap(getattr(answer, "__func__", answer))
    if hasattr(answer, "__code__"):
        stack, found = [answer.__code__], set()
        while stack:
            code = stack.pop()
            found.add(code)
            stack += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        return found
    owner = answer if isinstance(answer, type) else type(answer)
    if owner.__module__ in ("builtins", "torch", "numpy"):
        return set()
    members = [m for m in vars(owner).values() if callable(m) or hasattr(m, "__func__") or isinstance(m, property)]
    return set().union(*(codes_of(m) for m in members if not isinstance(m, type)))


def names_of(answer: Any) -> set[str]:
    """The names under which other answers would call this one."""
    if isinstance(answer, list | tuple):
        return set().union(*map(names_of, answer))
    name = getattr(answer, "__name__", "")
    return {name} if name and name.isidentifier() else set()


def global_names(answer: Any) -> set[str]:
    """The global names that the answer's code reads."""
    return {
        step.argval
        for code in codes_of(answer)
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def same_body(answer: Any, given: Any) -> bool:
    """Is the answer still the code that the reader was given? Comments, docstring and annotations do not count.

    Of a class, the methods that are written in it are compared, and its plain attributes.
    """
    try:
        return _body(answer) == _body(given)
    except (OSError, TypeError, SyntaxError, AttributeError):  # a lambda, an object, something without source
        return False


def _body(thing: Any) -> Any:
    """What `same_body` compares. A class goes method by method: Python cannot always find the source of a whole one
    that was defined in a notebook."""
    if not isinstance(thing, type):
        return _function_body(thing)
    parts = {}
    for name, member in vars(thing).items():
        functions = codes_of(member) if callable(member) or isinstance(member, _WRAPPED) else set()
        if any(not code.co_filename.startswith("<string>") for code in functions):  # those are a dataclass's own
            wrapped = (member.fget, member.fset) if isinstance(member, property) else (member,)
            parts[name] = [_function_body(getattr(f, "__func__", f)) for f in wrapped if f]
        elif not functions and not (name.startswith("__") and name.endswith("__")):
            parts[name] = repr(member)
    return parts


def _function_body(function: Any) -> str:
    tree = ast.parse(textwrap.dedent(function if isinstance(function, str) else inspect.getsource(function)))
    body = tree.body[0].body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    arguments = tree.body[0].args  # a default may be the bug
    defaults = [value for value in (*arguments.defaults, *arguments.kw_defaults) if value is not None]
    return "\n".join(ast.dump(node) for node in [*defaults, *body])


def last_frame(error: BaseException):
    return list(traceback.walk_tb(error.__traceback__))[-1][0]


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]


def reader_line(error: BaseException, answer: Any) -> str:
    """The deepest line of the reader's own code in the traceback, as text."""
    files = {code.co_filename for code in codes_of(answer)}
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if frame.f_code.co_filename in files or frame.f_globals.get("__name__") == "__main__":
            text = linecache.getline(frame.f_code.co_filename, number, frame.f_globals).strip()
            return f"\n  in {frame.f_code.co_name}, line {number}: {text}" if text else f"\n  line {number}"
    return ""
