"""Arrows point down: a module imports only what earlier parts of the course built."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "minillm"

# From the bottom up. A module may import from its own layer and from those before it.
LAYERS = [
    {"errors"},
    {"model"},
    {"kernels"},  # tensors in, tensors out
    {"quant"},  # replaces linears, by kernels where there are any
    {"cache"},  # keeps K and V in quant's integers (chapter 14), attends by kernels (chapter 09)
    {"speculative", "parallel", "compress", "adapters"},
    {"measure"},
    {"engine"},
    {"llm"},
    {"serve"},
    {"lab"},
    {"cli"},
]
# Heavy or optional packages, and the only places that may import them when they are themselves imported.
AT_IMPORT = {
    "matplotlib": {"lab"},
    "ipywidgets": {"lab"},
    "IPython": {"lab"},
    "jupytext": set(),
    "transformers": set(),
    "triton": {"kernels"},  # in the modules that define kernels; see test_kernel_modules_are_imported_in_functions
    "typer": {"cli"},
    "rich": {"cli"},
    "pickle": set(),
}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if "assets" not in p.parts)


def part(name: str) -> str:
    """minillm.cache.contiguous -> cache."""
    return name.split(".")[1] if "." in name else ""


def layer(name: str) -> int:
    for index, names in enumerate(LAYERS):
        if name in names:
            return index
    raise AssertionError(f"minillm.{name} has no layer: add it to LAYERS in {Path(__file__).name}")


def imports(path: Path, only_top: bool) -> set[str]:
    """Names imported by a file: anywhere, or only by statements that run when it is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = top_level(tree) if only_top else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def top_level(tree: ast.AST):
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from top_level(child)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_from_below(path):
    here = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if here == "__init__":
        return
    for name in imports(path, only_top=False):
        if name.startswith("minillm.") and part(name) not in ("__version__", ""):
            assert layer(part(name)) <= layer(here), f"{path.name} imports {name}, which stands above it"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_packages_are_imported_where_they_are_used(path):
    here = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for name in imports(path, only_top=True):
        allowed = AT_IMPORT.get(name.split(".")[0])
        assert allowed is None or here in allowed, f"{path.name} imports {name} when it is imported"


def test_kernel_modules_are_imported_in_functions():
    """No module needs, when it is imported, one that imports triton at its top: triton exists on Linux alone, and
    whether it interprets must be settled before it is first loaded."""
    dotted = {path: "minillm." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in modules()}
    tops = {path: imports(path, only_top=True) for path in modules()}
    kernels = {dotted[path] for path, names in tops.items() if any(n.split(".")[0] == "triton" for n in names)}
    for path, names in tops.items():
        if dotted[path] not in kernels:
            assert not names & kernels, f"{path.name} imports {names & kernels} when it is imported"


def test_the_decoder_knows_nothing_of_later_chapters():
    text = (PACKAGE / "model" / "decoder.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    names = {n.id.lower() for n in ast.walk(tree) if isinstance(n, ast.Name)}
    names |= {n.attr.lower() for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for word in ("quant", "paged", "block_table", "lora", "all_reduce", "request", "gguf"):
        assert not any(word in name for name in names), f"decoder.py speaks of {word}"


def test_importing_minillm_loads_no_heavy_package():
    code = "import sys, minillm; print(sorted({'torch', 'triton', 'matplotlib', 'transformers'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_the_public_names_resolve():
    import minillm

    for name in minillm.__all__:
        assert getattr(minillm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        minillm.nonsense  # noqa: B018
