"""The engine under `check`: run each case on the answer, compare, and find the likely mistake.

The reader's function gets deep copies, so it can neither change what is compared nor be credited for changing its
input; each case is stopped at a time limit; an exception is shown with the reader's own line. All chapters.
"""

import copy
import inspect
import signal
import statistics
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from minillm.lab.answers import codes_of, first_line, last_frame, reader_line, same_body
from minillm.lab.cases import Case, Rng
from minillm.lab.compare import describe, is_array, mismatch
from minillm.lab.hints import generic_hint


@dataclass
class Result:
    """The outcome over all cases. `unwritten`: the function that raised NotImplementedError, if not the answer."""

    status: str
    passed: int = 0
    total: int = 0
    detail: list[str] = field(default_factory=list)
    hint: str = ""
    unwritten: str = ""


class OutOfTime(BaseException):
    """The time limit; a BaseException, so that `except Exception` in a reader's loop does not swallow it."""


@contextmanager
def time_limit(seconds: float):
    """Stop Python code after `seconds`. Works in the main thread on Linux and macOS; elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_):
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # repeats, in case a bare `except:` catches the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def examine_cases(task, answer: Any) -> Result:
    """Run every case of a task. `task` has id, cases, hints, given, limit_s."""
    cases = list(task.cases(Rng(task.id)))  # before the answer runs: nothing it does can reach what is expected
    total = len(cases)
    if answer is None or answer is ... or (task.given is not None and same_body(answer, task.given)):
        return Result("not started", 0, total)
    passed, failures = 0, []
    for case in cases:
        if case.faster_than is not None and failures:
            continue  # speed counts only after correctness
        got, problem = run_case(case, answer, task.limit_s)
        if problem is None:
            passed += 1
        else:
            failures.append((case, got, problem))
        if isinstance(got, OutOfTime):
            break
    if not failures:
        return Result("passed", passed, total)
    case, got, problem = failures[0]
    if passed == 0 and isinstance(got, NotImplementedError) and not got.args:  # torch raises it with a text
        raiser = last_frame(got).f_code
        mine = raiser in codes_of(answer)
        return Result("not started", 0, total, unwritten="" if mine else raiser.co_name)
    detail = [case.call if case.is_value else show_call(case, answer), problem]
    hint = likely_mistake(task, failures) or generic_hint(got, case.expected, case.secret)
    return Result("failed", passed, total, detail, hint)


def run_case(case: Case, answer: Any, limit_s: float) -> tuple[Any, str | None]:
    """(what the answer gave or raised, what is wrong with it or None)."""
    if case.is_value:
        got = answer
    elif case.run is None and not callable(answer):
        return answer, f"expected a function, got {describe(answer)}"
    else:
        args, kwargs = clone((case.args, case.kwargs))
        try:
            with time_limit(limit_s):
                if case.faster_than is not None:
                    return None, too_slow(case, answer)
                got = case.run(answer) if case.run else answer(*args, **kwargs)
        except KeyboardInterrupt:
            raise
        except OutOfTime as error:
            return error, f"stopped after {limit_s:g} s: is there a loop that does not end?"
        except BaseException as error:  # also SystemExit: an answer must not end the kernel
            if case.raises and isinstance(error, case.raises):
                return error, None
            wanted = f"expected {case.raises.__name__}, got " if case.raises else "raised "
            return error, f"{wanted}{type(error).__name__}: {first_line(error)}{reader_line(error, answer)}"
        if case.raises:
            return got, f"expected {case.raises.__name__} to be raised, got {describe(got)}"
        if not case.may_mutate and (changed := mutated(case, args, kwargs)):
            return got, f"your function changed its argument {changed} in place; leave the inputs as they were"
    return got, difference(case, got)


def difference(case: Case, got: Any) -> str | None:
    """What is wrong with the value, or None."""
    try:
        if case.compare:
            return case.compare(got, case.expected)
        return mismatch(got, case.expected, case.rtol, case.atol, case.dtype)
    except Exception as error:  # a value of a kind that the comparison does not know
        return f"got {describe(got)}, which cannot be compared: {type(error).__name__}: {first_line(error)}"


def too_slow(case: Case, answer: Any) -> str | None:
    """Time answer and naive version in alternation; compare the median of the paired ratios with the factor."""
    ratios = []
    for i in range(case.pairs + 1):
        seconds = {}
        for function in (answer, case.faster_than):
            args, kwargs = clone((case.args, case.kwargs))
            start = time.perf_counter()
            function(*args, **kwargs)
            seconds[function] = time.perf_counter() - start
        if i:  # the first pair warms up
            ratios.append(seconds[case.faster_than] / seconds[answer])
    ratio = statistics.median(ratios)
    if ratio >= case.factor:
        return None
    return f"right, but {ratio:.2f} x the speed of the naive version; {case.factor:g} x is asked for"


def likely_mistake(task, failures) -> str:
    """The text of the hint that explains the most failed cases; the first one wins a tie."""
    best, most = "", 0
    hints = [*failures[0][0].hints, *task.hints]
    for hint in hints:
        count = sum(explains(hint, case, got, task.limit_s) for case, got, _ in failures)
        if count > most and explains(hint, *failures[0][:2], task.limit_s):
            best, most = hint.text, count
    return best


def explains(hint, case: Case, got: Any, limit_s: float) -> bool:
    """Does the mistake of this hint give what the reader's answer gave, and is that wrong here?

    Where it is right, as in a case that failed for an argument changed in place, the hint says nothing.
    """
    try:
        if hint.when is not None:
            return bool(hint.when(got, case.expected, case))
        if hint.wrong is None or case.faster_than is not None:
            return False
        args, kwargs = clone((case.args, case.kwargs))
        with time_limit(limit_s):
            wrong = hint.wrong if case.is_value else case.run(hint.wrong) if case.run else hint.wrong(*args, **kwargs)
    except (Exception, OutOfTime) as error:
        return isinstance(got, BaseException) and type(error) is type(got)
    if isinstance(got, BaseException) or difference(case, wrong) is None:  # where the mistake does not show
        return False
    return mismatch(got, wrong, case.rtol, case.atol) is None


def clone(value: Any) -> Any:
    """A deep copy; a tensor with a history, which refuses to be copied, is cut from it first."""
    if is_array(value) and hasattr(value, "detach"):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (list, tuple):
        return type(value)(clone(item) for item in value)
    if type(value) is dict:
        return {key: clone(item) for key, item in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def mutated(case: Case, args: tuple, kwargs: dict) -> str:
    """The position or name of an argument that the call has changed, or an empty text."""
    pairs = [(str(i + 1), a, b) for i, (a, b) in enumerate(zip(args, case.args))]
    pairs += [(repr(key), kwargs[key], case.kwargs[key]) for key in kwargs]
    for name, after, before in pairs:
        if (is_array(before) or type(before) in (list, tuple, dict, set)) and mismatch(after, before, 0.0, 0.0):
            return name
    return ""


def show_call(case: Case, answer: Any) -> str:
    """The call as the reader would type it, with parameter names where the signature tells them."""
    if case.call:
        return f"called {case.call}"
    name = getattr(answer, "__name__", type(answer).__name__)
    try:
        names = list(inspect.signature(answer).bind(*case.args, **case.kwargs).arguments)[: len(case.args)]
    except (TypeError, ValueError):
        names = []
    shown = [describe(a) if i >= len(names) else f"{names[i]}={describe(a)}" for i, a in enumerate(case.args)]
    shown += [f"{key}={describe(value)}" for key, value in case.kwargs.items()]
    return f"called {name}({', '.join(shown)})"
