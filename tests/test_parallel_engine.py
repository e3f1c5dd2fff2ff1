"""LLM(tensor_parallel_size=2) with real processes over gloo: same tokens, clean ends, and a dead rank by name.

A launch takes seconds, so one serves many tests: `llm` is made once, and killed by the last test of this file.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.engine.engine import Engine
from minillm.engine.options import EngineOptions
from minillm.engine.parallel import INLINE, check_mix, decode, encode, load_rank, receive, send
from minillm.errors import ParamsError
from minillm.measure.parallel_bench import llama_like, measure
from minillm.model.weights import load_model
from minillm.parallel.groups import PeerLost, run_threads
from minillm.parallel.launch import RankError, Ranks, World, rank_device
from minillm.parallel.weights import shard_bytes
from minillm.quant.named import quantize_by_name
from minillm.speculative.options import parse

ROOT = Path(__file__).parents[1]
PROMPTS = ["It was a fine morning, and the family", "It was a fine morning, and the ship", "The sea", "He said"]
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
OPEN: list[LLM] = []
SETTINGS = dict(device="cpu", dtype="float32", block_size=4, enable_prefix_caching="radix", max_num_batched_tokens=32)


def running(pid: int) -> bool:
    """Alive, and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def expected():
    with LLM("tiny", device="cpu", dtype="float32") as one:
        return [out.token_ids for out in one.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def llm():
    made = LLM("tiny", tensor_parallel_size=2, speculative={"method": "ngram", "adaptive": False}, **SETTINGS)
    OPEN.append(made)
    yield made
    made.close()


@pytest.fixture
def alone():
    """A process is a rank of one parallel model at a time."""
    for made in OPEN:
        made.close()


def test_the_same_tokens_as_on_one_rank_cold_and_from_the_prefix_cache(llm, expected):
    for cached in (False, True):
        outputs = llm.generate(PROMPTS, GREEDY)
        assert [out.token_ids for out in outputs] == expected
        assert any(out.metrics.cached_tokens for out in outputs) is cached or not cached


def test_drafts_are_accepted_on_all_ranks(llm, expected):
    before = llm.engine.speculator.stats.accepted
    assert [out.token_ids for out in llm.generate(PROMPTS, GREEDY)] == expected
    again = llm.generate([[5, 6, 7, 8] * 6], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))[0]
    with LLM("tiny", device="cpu", dtype="float32") as one:
        wanted = one.generate([[5, 6, 7, 8] * 6], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))[0]
    assert again.token_ids == wanted.token_ids
    assert llm.engine.speculator.stats.accepted > before


def test_sampling_several_answers_and_a_stream(llm):
    params = SamplingParams(max_tokens=8, temperature=0.9, seed=3, n=3)
    with LLM("tiny", device="cpu", dtype="float32") as one:
        wanted = [c.token_ids for c in one.generate(PROMPTS[:1], params)[0].completions]
        text = "".join(one.stream(PROMPTS[2], GREEDY))
    assert [c.token_ids for c in llm.generate(PROMPTS[:1], params)[0].completions] == wanted
    assert "".join(llm.stream(PROMPTS[2], GREEDY)) == text


def test_every_rank_holds_half(llm):
    config = llm.config
    assert (config.num_heads, config.num_kv_heads, config.intermediate_size) == (4, 1, 256)
    assert llm.engine.runner.cache.k.shape[3] == 1


def test_a_bad_request_harms_nobody(llm, expected):
    with pytest.raises(ValueError, match="token id"):
        llm.generate([[10**6]], GREEDY)
    assert [out.token_ids for out in llm.generate(PROMPTS, GREEDY)] == expected


def test_a_second_parallel_model_in_this_process_is_refused(llm):
    with pytest.raises(ParamsError, match="close the other parallel model first"):
        LLM("tiny", tensor_parallel_size=2, device="cpu")


def test_a_rank_killed_in_the_middle_of_an_answer_is_named_within_seconds(llm):
    """The last test of `llm`."""
    (pid,) = llm.parallel.ranks.pids()
    timer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
    timer.start()
    start = time.monotonic()
    try:
        with pytest.raises(RankError, match=rf"rank 1 of 2 \(process {pid}\) died: SIGKILL"):
            while time.monotonic() - start < 60:
                llm.generate(PROMPTS, GREEDY)
    finally:
        timer.cancel()
    assert time.monotonic() - start < 0.5 + 10
    assert not running(pid) and not torch.distributed.is_initialized()
    with pytest.raises(RankError, match="make a new LLM"):
        llm.generate(PROMPTS, GREEDY)
    llm.close()


# One launch of four ranks: worker functions for `Ranks`.


def follow_until_told(world: World, fail_at: int) -> None:
    """All-reduce again and again; rank 2 fails in round `fail_at`."""
    from minillm.parallel.groups import all_reduce

    for number in range(10**6):
        if number == fail_at and world.rank == 2:
            raise MemoryError("no room on this rank")
        all_reduce(torch.ones(8), world.group)


def test_of_four_ranks_the_one_that_failed_first_is_named(alone):
    ranks = Ranks(4, follow_until_told, 5)
    try:
        pids = ranks.pids()
        start = time.monotonic()
        with pytest.raises(RankError, match=r"rank 2 of 4 .* failed: MemoryError: no room on this rank"):
            try:
                follow_until_told(ranks.world, 5)
            except RuntimeError as error:
                raise ranks.blame(error) from None
        assert time.monotonic() - start < 10
        assert not any(map(running, pids))
    finally:
        ranks.close(kill=True)


def test_a_rank_that_hangs_is_found_by_the_time_out(alone):
    ranks = Ranks(2, follow_until_told, -1, seconds=2.0)
    try:
        (pid,) = ranks.pids()
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(RankError, match=rf"no answer in time.* 1 \(process {pid}\)"):
            try:
                follow_until_told(ranks.world, -1)
            except PeerLost as error:
                raise ranks.blame(error, patience=1.0) from None
        assert time.monotonic() - start < 10 and not running(pid)
    finally:
        ranks.close(kill=True)


def test_a_draft_that_is_not_there_leaves_no_rank_behind(alone):
    with pytest.raises(ValueError, match="unknown model 'no-such-draft'"):
        LLM("tiny", tensor_parallel_size=2, device="cpu", speculative="no-such-draft")
    assert not torch.distributed.is_initialized() and not torch.multiprocessing.active_children()


def test_a_rank_takes_the_memory_of_its_slice_and_the_probe_measures_what_it_says(alone):
    """Own memory of a fresh process while it loads its half of 53 MB: the formula's, and one slice more at most."""
    results = measure(2, [4096, 65536], [(128, 2)], 1024, repeats=2)
    taken, formula = results[1]["memory"]
    config = llama_like(1024)
    assert formula == shard_bytes(config, 2, 4, 1)
    assert taken == 0 or 0.9 * formula < taken < formula + 4 * config.vocab_size * config.hidden_size + (4 << 20)
    for result in results:
        assert result["allreduce"].keys() == {4096, 65536} and min(result["allreduce"].values()) > 0
        step = result["steps"][128, 2]
        assert 0 < step["comm"] < step["cut"]
    assert results[0]["steps"][128, 2]["alone"] > 0


SCRIPT = """
import signal
import sys
from minillm import LLM, SamplingParams

def main():
    llm = LLM("tiny", device="cpu", dtype="float32", tensor_parallel_size=2)
    print("text:", repr(llm.generate(["The sea"], SamplingParams(max_tokens=6, temperature=0))[0].text), flush=True)
    if llm.parallel.ranks:
        print("pids:", *llm.parallel.ranks.pids(), flush=True)
    if "interrupt" in sys.argv:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may come ignored, from a shell's background job
        print("ready", flush=True)
        while True:
            llm.generate(["The sea"] * 8, SamplingParams(max_tokens=64, ignore_eos=True))

GUARD main()
"""


@contextlib.contextmanager
def script(tmp_path: Path, guard: str, *arguments: str, launcher=()):
    """The script as a process of a group of its own; when the test is over, in whatever way, all of it is ended."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("GUARD", guard), encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, str(path), *arguments]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=env, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            process.terminate()  # torchrun's ranks are no members of its group: it ends them
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


GUARDED = 'if __name__ == "__main__":'


def test_a_script_that_closes_nothing_ends_by_itself(tmp_path):
    with script(tmp_path, GUARDED) as process:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        (pids,) = (line.split()[1:] for line in out.splitlines() if line.startswith("pids:"))
        assert "text: '" in out and not any(running(int(pid)) for pid in pids)


def test_an_interrupt_ends_all_ranks(tmp_path):
    with script(tmp_path, GUARDED, "interrupt") as process:
        lines = [process.stdout.readline() for _ in range(3)]  # the text, the ranks, "ready"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert "KeyboardInterrupt" in err and process.returncode != 0
        assert not any(running(int(pid)) for pid in lines[1].split()[1:])


def test_an_unguarded_script_is_told_what_to_do(tmp_path):
    with script(tmp_path, "if True:") as process:
        _, err = process.communicate(timeout=120)
    assert "RankError: rank 1 of 2" in err and 'if __name__ == "__main__":' in err


def test_torchrun_starts_the_same_script(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with script(tmp_path, "if True:", launcher=launcher) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("text: '") == 1, "rank 0 alone goes on after LLM(...)"


# Without processes.


@pytest.mark.parametrize("extra", [0, 3 * INLINE])
def test_a_plan_arrives_as_it_was_sent(extra):
    engine = Engine(load_model("tiny", device="cpu"), EngineOptions(num_blocks=64, max_num_seqs=8), eos_ids=())
    for i in range(3):
        engine.add(list(range(5, 9 + i + extra // 10)), GREEDY)
    batch = engine.scheduler.schedule()
    batch.copies = [("swap_out", [(1, 2), (3, 4)]), ("copy", [(5, 6)]), ("swap_in", [(7, 8)])]
    numbers = encode(batch, 64, [(9, 10)])
    assert (len(numbers) > INLINE) is (extra > 0)

    def rank_main(group):
        world = World(group, group, torch.device("cpu"))
        return send(2, numbers, world) if group.rank() == 0 else receive(world)[1]

    sent, received = run_threads(rank_main, 2)
    assert torch.equal(sent, received)
    plan = decode(received, torch.device("cpu"), 64)
    assert plan.copies == batch.copies and plan.moves == [(9, 10)]
    assert plan.step.kv_lengths == [entry.end for entry in batch.entries.values()]
    for request, row in zip(batch.entries, plan.step.block_tables.tolist()):
        assert row[: len(request.table.blocks)] == request.table.blocks
    with pytest.raises(ValueError, match="block table"):
        decode(received, torch.device("cpu"), 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(tensor_parallel_size=3), r"tensor_parallel_size=3: must divide the 8 query heads.*1, 2, 4, 8"),
        (dict(tensor_parallel_size=0), "at least 1"),
        (dict(tensor_parallel_size=True), "at least 1"),
        (dict(tensor_parallel_size=2, compile=True), "combined with compile=True"),
        (dict(tensor_parallel_size=2, cuda_graphs=True), "combined with cuda_graphs=True"),
        (dict(tensor_parallel_size=2, kv_cache_dtype="int8"), "combined with kv_cache_dtype='int8'"),
        (dict(tensor_parallel_size=2, speculative="self-int4"), "combined with speculative='self-int4'"),
        (dict(tensor_parallel_size=2, speculative="exit-2"), "combined with speculative='exit-2'"),
        (dict(tensor_parallel_size=2, speculative="medusa"), "combined with speculative='medusa'"),
        (dict(tensor_parallel_size=2, quantization="w8a8"), "combined with quantization='w8a8'"),
        (dict(tensor_parallel_size=2, quantization="int5"), "quantization='int5'"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(settings, message, monkeypatch):
    monkeypatch.setattr("minillm.engine.parallel.Ranks", lambda *a, **k: pytest.fail("processes were started"))
    with pytest.raises(ParamsError, match=message):
        LLM("tiny", device="cpu", **settings)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_model_is_rounded_as_on_one_rank(quantization):
    """The integers are those of the whole model; what is left is the 16-bit products of the fast kernels."""
    ids = torch.arange(100, 132)
    with torch.inference_mode():
        whole = quantize_by_name(load_model("tiny", "float32", "cpu"), quantization, kernel="unpack")(ids)

    def rank_main(group):
        return load_rank(World(group, group, torch.device("cpu")), "tiny", "float32", quantization)(ids)

    for logits in run_threads(rank_main, 2):
        assert ((logits - whole).abs().max() / whole.abs().max()).item() < 0.05


def test_drafts_that_do_not_run_the_target_are_welcome():
    for method in ("ngram", "tiny-draft"):
        check_mix(2, EngineOptions(), False, parse(method))


def test_each_rank_has_a_gpu_of_its_own():
    assert rank_device(torch.device("cuda"), 3) == torch.device("cuda:3")
    assert rank_device(torch.device("cpu"), 3) == torch.device("cpu")
