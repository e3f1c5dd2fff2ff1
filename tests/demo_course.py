"""A course of one small chapter, 99, written into a temporary folder: what the tests of the lab build and grade."""

from pathlib import Path

CHAPTER = """# %% [markdown]
# # 99 Demo

# %%
import matplotlib.pyplot as plt

from minillm.lab import explore, pick, plots, predict, predictions, reveal

n = pick(100, 10)
predict("99.n", 90, "B")

# %%
reveal("99.n", 100)
predictions()

# %%
plots.scaling([1, 10, 100], {"naive": [1e-3, 1e-1, 10]}, "tokens", "s", "time")
plt.show()


# %% tags=["nbval-ignore-output"]
def draw(ax, length, heads):
    ax.plot([0, length], [0, heads])


explore(draw, length=(1, 10), heads=[1, 2], static=[dict(length=2), dict(length=8)])
"""

SOLUTION = '''# %% [markdown]
# # Exercise 99

# %%
from minillm.lab import check

# %% [markdown]
# ## Twice


# %%
def double(x):
    """Twice x."""
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION


# %%
check("99.double", double)

# %% [markdown]
# ## Estimate it

# %%
### BEGIN SOLUTION
size = 2 * 16
### END SOLUTION

# %%
check("99.size", size)

# %% tags=["solution-only"]
print("only in the solution")


# %%
def last(items):
    """Debug it: the last item."""
    ### BEGIN SOLUTION
    return items[-1]
    ### END SOLUTION
    ### BEGIN GIVEN
    # return items[len(items)]
    ### END GIVEN


# %%
check("99.last", last)


# %%
def quadruple(x):
    """Four times x, by `double`."""
    ### BEGIN SOLUTION
    return double(double(x))
    ### END SOLUTION


# %%
check("99.quadruple", quadruple)
'''

CHECKS = """
from minillm.lab.check import Case, Hint, Value, register


@register("99.double", title="Double", points=2, hints=[Hint("once is not twice", wrong=lambda x: x)])
def double(rng):
    for _ in range(6):
        x = rng.randint(2, 99)
        yield Case((x,), 2 * x)


@register("99.size", title="Size")
def size(rng):
    yield Value(32, rtol=0.01, hints=[Hint("the factor 2 is missing", wrong=16)])


def given(items):
    return items[len(items)]


@register("99.last", title="Last", given=given, limit_s=1.5)
def last(rng):
    for n in range(1, 5):
        items = [rng.randint(0, 9) for _ in range(n)]
        yield Case((items,), items[-1], hints=[Hint("the index is past the end", wrong=given)])


@register("99.quadruple", title="Quadruple", points=3)
def quadruple(rng):
    for _ in range(4):
        x = rng.randint(2, 99)
        yield Case((x,), 4 * x)
"""

WRONG = """
WRONG = {
    "99.double": {
        "once": ("def double(x): return x", "once is not twice"),
        "thrice": (("2 * x", "3 * x"), "expected"),
        "nothing": (("return 2 * x", "2 * x"), "is there a `return`"),
        "raises": ("def double(x): return x / 0", "ZeroDivisionError"),
    },
    "99.size": {
        "no factor 2": (16, "factor 2"),
        "bits": (256, "bits"),
        "text": ("'32'", "expected a number"),
        "a tenth": (3.2, "10 x too small"),
    },
    "99.last": {
        "first": (("items[-1]", "items[0]"), "expected"),
        "past": (("items[-1]", "items[len(items) + 0]"), "past the end"),
        "pops": (("items[-1]", "items.pop()"), "in place"),
        "loops": ("def last(items):\\n    while True:\\n        pass", "does not end"),
    },
    "99.quadruple": {
        "twice": (("double(double(x))", "double(x)"), "2 x too small"),
        "by double": (("return 2 * x", "return x"), "4 x too small"),
        "none": ("def quadruple(x): return None", "is there a `return`"),
        "text": ("def quadruple(x): return str(4 * x)", "expected a number"),
    },
}
"""


def write_course(root: Path) -> Path:
    """Write the masters, checks and wrong answers of chapter 99 under `root`."""
    for folder, name, text in (
        ("notebooks", "99_demo.py", CHAPTER),
        ("solutions", "99_demo.py", SOLUTION),
        ("checks", "99_demo.py", CHECKS),
        ("wrong_answers", "99_demo.py", WRONG),
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / name).write_text(text, encoding="utf-8")
    return root
