"""The ladder of the README, from one run: `minillm tour --json | python docs/readme_ladder.py`."""

import json
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- ladder: made by docs/readme_ladder.py -->", "<!-- end of ladder -->"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.{1 if seconds < 0.01 else 0}f} ms"


def markdown(data: dict) -> str:
    """One table a workload, then where and with what it was measured."""
    lines = []
    for workload in dict.fromkeys(rung["workload"] for rung in data["rungs"]):
        rungs = [rung for rung in data["rungs"] if rung["workload"] == workload]
        shares = all(rung["bandwidth_share"] is not None for rung in rungs)
        head = ["rung", "chapter", "tokens/s", "gain", "first token", "each token after", "KV"]
        lines += [f"**{workload[0].upper()}{workload[1:]}**", ""]
        lines.append("| " + " | ".join(head + ["read bandwidth"] * shares) + " |")
        lines.append("|---" * (len(head) + shares) + "|")
        for rung in rungs:
            cells = [rung["name"], rung["chapter"], f"{rung['tokens_per_second']:.1f}", f"{rung['speedup']:.2f}x"]
            cells += [milliseconds(rung["ttft"]), milliseconds(rung["tpot"]), f"{rung['kv_bytes'] / 1e6:.1f} MB"]
            cells += [f"{rung['bandwidth_share']:.0%}"] if shares else []
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    alone = f"{data['prompt_tokens']} prompt tokens, {data['new_tokens']} new"
    busy = ", while others used the machine" if data["busy"] else ""
    lines.append(
        f"`make tour` on {data['device']}, threads: {data['threads']}{busy}; {data['model']} in {data['dtype']}. The "
        f"first request: {alone}. KV: what it holds, then room set aside. "
        "Your figures will differ; the ratios are the point. * changes the model: its tokens may be others."
    )
    return "\n".join(lines)


def replaced(readme: str, table: str) -> str:
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


if __name__ == "__main__":
    README.write_text(replaced(README.read_text(encoding="utf-8"), markdown(json.load(sys.stdin))), encoding="utf-8")
