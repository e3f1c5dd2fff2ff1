"""check(...): what passes, what does not, and what the reader is told."""

import contextlib
import inspect
import linecache
import math
import time
from collections import deque
from decimal import Decimal

import pytest
import torch

from minillm.lab import check as check_function
from minillm.lab.check import Case, CheckFailed, Drive, Faster, Hint, NotStarted, Value, examine, find, register
from minillm.lab.compare import describe, mismatch
from minillm.lab.estimates import estimates


def given(x):
    return x[1:]


class GivenCounter:
    """Counts, from one too many."""

    step = 1

    def __init__(self, start=1):
        self.value = start

    def add(self):
        self.value += self.step
        return self.value

    @property
    def double(self):
        return 2 * self.value


@pytest.fixture(scope="module", autouse=True)
def tasks():
    @register("98.counter", title="Debug a class", given=GivenCounter)
    def counter(rng):
        yield Drive(lambda Counter: [Counter().add(), Counter().double], [1, 0], "counter = Counter(); counter.add()")

    @register("98.softmax", title="Softmax", hints=[Hint("over the wrong axis", wrong=lambda x: torch.softmax(x, 0))])
    def softmax(rng):
        for rows in (2, 3, 5):
            x = rng.tensor(rows, 4)
            yield Case((x,), torch.softmax(x.double(), -1))

    half = Hint("half of them", wrong=lambda pair, factor: factor * min(1, pair[0].sum()))

    @register("98.pair", title="A tuple of tensors", hints=[half])
    def pair(rng):
        for factor in (0, 2):
            yield Case(((torch.ones(2), torch.ones(1)), factor), 3.0 * factor)

    @register("98.figures", title="Estimates")
    def figures(rng):
        yield from estimates("figures", {"steps": (56, 0, {57: "one too many"}), "bytes": (7 * 1024, {})})

    @register("98.count", title="Count", points=2, limit_s=0.5)
    def count(rng):
        for _ in range(4):
            items = [rng.randint(0, 9) for _ in range(5)]
            yield Case((items,), sum(items))

    @register("98.stack", title="A class")
    def stack(rng):
        def drive(Stack):
            s = Stack()
            for i in range(3):
                s.push(i)
            return [s.pop(), s.pop()]

        yield Drive(drive, [2, 1], "s = Stack(); push 0, 1, 2; pop, pop", hints=[Hint("a queue", wrong=Queue)])

    @register("98.raises", title="Raises")
    def raises(rng):
        yield Case((-1,), raises=ValueError)

    @register("98.tail", title="Debug", given=given)
    def tail(rng):
        yield Case(([1, 2, 3],), [2, 3, 4])

    @register("98.set", title="A comparison of its own", hints=[Hint("the order", wrong=list)])
    def a_set(rng):
        yield Case(([2, 1],), {1, 2}, compare=lambda got, expected: None if set(got) == expected else "not these")

    @register("98.fast", title="Speed")
    def fast(rng):
        yield Case((3,), 6)
        yield Faster(lambda n: time.sleep(0.004) or 2 * n, (3,), factor=1.5, pairs=3)

    @register("98.gb", title="Estimate")
    def gb(rng):
        yield Value(17.18e9, rtol=0.01)


class Queue:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop(0)


def test_a_pass_prints_one_stable_line(capsys):
    for _ in range(2):
        check_function("98.softmax", lambda x: torch.softmax(x, -1))
    assert capsys.readouterr().out == "✓ 98.softmax  3/3\n" * 2


def test_a_failure_is_one_short_message_with_the_mistake_by_name():
    with pytest.raises(CheckFailed) as caught:
        check_function("98.softmax", lambda x: torch.softmax(x, 0))
    lines = caught.value._render_traceback_()
    assert lines[0] == "✗ 98.softmax  0/3"
    assert lines[1].strip() == "called <lambda>(x=tensor[2, 4])"
    assert "expected" in lines[2]
    assert "got" in lines[2]
    assert lines[3].strip() == "likely: over the wrong axis"
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("answer", [None, ...])
def test_no_answer_is_not_started(answer):
    assert examine("98.softmax", answer).line == "○ 98.softmax  not started"
    with pytest.raises(NotStarted):
        check_function("98.softmax", answer)


def test_a_stub_and_the_code_as_given_are_not_started():
    def stub(x):
        raise NotImplementedError

    class Stack:
        def push(self, item):
            raise NotImplementedError

    def tail(x):
        """Another docstring."""
        return x[1:]  # and a comment

    assert examine("98.softmax", stub).status == "not started"
    assert examine("98.stack", Stack).status == "not started"
    assert examine("98.tail", tail).status == "not started"
    assert examine("98.tail", lambda x: [2, 3]).status == "failed"


def test_an_answer_that_needs_an_unfinished_one_is_blocked():
    def double(x):
        raise NotImplementedError

    ledger = {"98.double": ("not started", {"double"})}
    verdict = examine("98.count", lambda items: double(items), ledger)
    assert verdict.status == "blocked"
    assert "98.double" in verdict.message


def test_a_half_written_answer_is_wrong_not_unstarted():
    seen = []

    def half(items):
        seen.append(1)
        if len(seen) > 2:
            raise NotImplementedError
        return sum(items)

    verdict = examine("98.count", half)
    assert (verdict.status, verdict.passed, verdict.total) == ("failed", 2, 4)


def test_inputs_are_copies_and_changing_them_is_no_way_to_pass():
    def empties(items):
        total = sum(items)
        items.clear()
        return total

    assert "argument 1 in place" in examine("98.count", empties).message
    assert "in place" in examine("98.softmax", lambda x: x.copy_(torch.softmax(x, -1))).message
    assert examine("98.softmax", lambda x: torch.softmax(x.clone(), -1)).status == "passed"


def test_a_tensor_in_a_tuple_is_an_argument_too_and_a_hint_that_is_right_there_is_not_said():
    def adds(pair, factor):
        pair[0].add_(pair[1])
        return factor * pair[0].sum() * 0.75

    verdict = examine("98.pair", adds)
    assert "argument 1 in place" in verdict.message
    assert verdict.hint == ""  # at factor 0 half of them is right as well


def test_no_hint_whose_mistake_gives_the_right_value():
    assert "likely" not in examine("98.set", lambda items: items.reverse() or list(reversed(items))).message


def test_a_value_that_the_checks_comparison_does_not_know_ends_in_a_message():
    verdict = examine("98.set", lambda items: [[1], [2]])
    assert verdict.status == "failed"
    assert "got [[1], [2]], which cannot be compared: TypeError: unhashable" in verdict.message


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda x: torch.softmax(x, -1)[0], "expected shape [2, 4], got shape [4]"),
        (lambda x: torch.softmax(x, -1) * math.nan, "nan"),
        (lambda x: torch.softmax(x, -1).mean(), "expected shape"),
        (lambda x: (torch.softmax(x, -1) * 0).long(), "got dtype int64"),
        (lambda x: torch.softmax(x, -1).half(), "expected"),
        (lambda x: 2 * torch.softmax(x, -1), "2 x too large"),
        (lambda x: -torch.softmax(x, -1), "negative"),
        (lambda x: torch.softmax(x, -1).T, "swapped"),
        (lambda x: torch.softmax(x, -1) + 1, "off by +1"),
        (lambda x: None, "is there a `return`"),
        (lambda x: "tensor", "expected a tensor"),
        (lambda x, y: x, "TypeError"),
        (lambda x: x.reshape(77), "RuntimeError"),
    ],
)
def test_wrong_tensors(answer, text):
    verdict = examine("98.softmax", answer)
    assert verdict.status == "failed"
    assert text in verdict.message


def test_an_exception_shows_the_readers_own_line():
    def broken(items):
        total = 0
        return total / 0

    message = examine("98.count", broken).message
    assert "ZeroDivisionError: division by zero" in message
    assert "return total / 0" in message
    assert "examine.py" not in message


def test_loops_exits_and_deep_recursion_end_in_a_message():
    def loops(items):
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    def exits(items):
        raise SystemExit

    def recurses(items):
        return recurses(items)

    assert "does not end" in examine("98.count", loops).message
    assert "SystemExit" in examine("98.count", exits).message
    assert "RecursionError" in examine("98.count", recurses).message


def test_classes_are_answers_too():
    class Stack(Queue):
        def pop(self):
            return self.items.pop()

    assert examine("98.stack", Stack).status == "passed"
    assert "likely: a queue" in examine("98.stack", Queue).message


def test_an_expected_exception():
    def refuse(x):
        raise ValueError("no")

    assert examine("98.raises", refuse).status == "passed"
    assert "to be raised" in examine("98.raises", lambda x: x).message
    assert "got ZeroDivisionError" in examine("98.raises", lambda x: x / 0).message


@pytest.mark.parametrize("answer", [17.2e9, 17_179_869_184, torch.tensor(17.2e9), torch.tensor([17.2e9])])
def test_estimates_pass_within_the_tolerance(answer):
    assert examine("98.gb", answer).status == "passed"


@pytest.mark.parametrize("answer", [17.6e9, 16.0, -17.2e9, math.nan, math.inf, True, "17.2e9", [17.2e9, 1], 17.2e9j])
def test_estimates_fail_outside_it(answer):
    assert examine("98.gb", answer).status == "failed"


@pytest.mark.parametrize("steps", [1, 0.1, 14, 28, 560, 58])
def test_no_message_gives_an_estimate_away(steps):
    message = examine("98.figures", lambda: {"steps": steps, "bytes": 7 * 1024}).message
    assert "not the number" in message
    assert "likely" not in message  # a ratio would be the number


def test_an_estimate_is_told_its_named_mistakes():
    assert "one too many" in examine("98.figures", lambda: {"steps": 57, "bytes": 7 * 1024}).message
    message = examine("98.figures", lambda: {"steps": 56, "bytes": 7}).message
    assert "likely" not in message  # 1/1024 is nobody's factor
    assert "1024 against 1" in examine("98.figures", lambda: {"steps": 56, "bytes": 7 * 1024**2}).message


def test_what_holds_the_right_numbers_is_a_list_of_them():
    ways = [[1, 2], (n for n in (1, 2)), {"a": 1, "b": 2}.values(), {1: 0, 2: 0}.keys(), deque([1, 2])]
    assert [mismatch(way, [1, 2]) for way in ways] == [None] * len(ways)
    assert mismatch(deque([1]), [1, 2])
    assert mismatch(Decimal("0.5"), 0.5) is None
    assert mismatch(Decimal("NaN"), 0.5)
    assert mismatch(Decimal("sNaN"), 0.5)


def test_speed_counts_only_after_correctness():
    assert examine("98.fast", lambda n: 2 * n).line == "✓ 98.fast  2/2"
    assert "x the speed" in examine("98.fast", lambda n: time.sleep(0.004) or 2 * n).message
    wrong = examine("98.fast", lambda n: n)
    assert (wrong.passed, wrong.total) == (0, 2)


def test_an_unknown_task_is_one_clear_error():
    with pytest.raises(ValueError, match=r"no task '98.nope'.*98.softmax"):
        find("98.nope")


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (1, True),
        (True, 1),
        (1, "1"),
        ([1, 2], [1, 2, 3]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1}, {"a": 2}),
        (torch.tensor([1.0]), torch.tensor([[1.0]])),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf])),
        (torch.tensor([True]), torch.tensor([1])),
        (torch.zeros(3), torch.tensor([1e-7, 0, 0])),
        (math.nan, 1.0),
        (1.0, math.inf),
        (None, 0),
        (3, {3}),
    ],
)
def test_not_equal(got, expected):
    assert mismatch(got, expected)


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (torch.tensor(3), 3),
        (6.0, 6),
        ((1, 2), [1, 2]),
        (iter([1, 2]), [1, 2]),
        (torch.tensor([1, 2]), [1, 2]),
        (torch.tensor([math.nan, -math.inf]), torch.tensor([math.nan, -math.inf])),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        ([torch.ones(2), 3], [torch.ones(2), 3]),
        ({1, 2}, {2, 1}),
        (torch.ones(2, requires_grad=True), torch.ones(2)),
    ],
)
def test_equal(got, expected):
    assert mismatch(got, expected) is None


def test_messages_hold_no_addresses():
    assert "0x" not in describe(object())
    assert len(describe(list(range(1000)))) < 80


def counter(old="", new="", name="GivenCounter"):
    """The given class, typed again into a notebook: another file name, maybe with an edit."""
    source = inspect.getsource(GivenCounter).replace(old, new)
    file = f"<cell {name} {old} {new}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    space = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), space)
    return space["GivenCounter"]


def test_a_class_as_given_is_not_started_and_an_edited_one_is_judged():
    assert examine("98.counter", counter()).status == "not started"
    assert examine("98.counter", counter("Counts, from", "This counts from")).status == "not started"
    assert examine("98.counter", counter("start=1", "start=0")).status == "passed"
    for old, new in (("+= self", "-= self"), ("2 * ", "3 * "), ("step = 1", "step = 2"), ("def add", "def plus")):
        assert examine("98.counter", counter(old, new)).status == "failed", (old, new)


@pytest.mark.parametrize("name", [None, 5, len])
def test_a_task_that_is_no_name_is_one_clear_error(name):
    with pytest.raises(ValueError, match=r'task must be a name, such as "02.kv_bytes"; got'):
        check_function(name, given)
