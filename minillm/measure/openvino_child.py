"""OpenVINO GenAI's continuous batching, run by a Python that has it, for a parent that has not (`openvino_peer`).

Chapter 04. Called by path, so nothing of minillm is imported here. Reads one JSON object a line, writes one for each:

- first {"model": a folder, "pipelines": {name: OpenVINO's properties}, "scheduler": {setting: value}}: the folder's
  safetensors are converted in float32 and loaded -> {"ready": true}, or {"missing": a package};
- then {"pipeline": name, "work": [[prompt, new tokens], ..]} -> {"seconds": .., "texts": [[token, ..], ..]}.
"""

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print is no answer
    generate = None
    for line in sys.stdin:
        request = json.loads(line)
        if generate is None:
            try:
                generate, answer = prepare(request)
            except ImportError as error:
                answer = {"missing": error.name or str(error)}
        else:
            answer = generate(request["pipeline"], request["work"])
        print(json.dumps(answer), file=answers, flush=True)


def prepare(request: dict) -> tuple:
    """(generate, what to tell the parent)."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai
    from optimum.exporters.openvino import main_export

    folder = os.path.join(request["model"], "openvino")
    plain = {"task": "text-generation-with-past", "convert_tokenizer": False}
    main_export(request["model"], folder, **plain, ov_config=float32())
    scheduler = genai.SchedulerConfig()
    for name, value in request["scheduler"].items():
        setattr(scheduler, name, value)
    pipelines = {
        name: genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        for name, properties in request["pipelines"].items()
    }

    def generate(name: str, work: list) -> dict:
        prompts = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt, _ in work]
        configs = [genai.GenerationConfig(max_new_tokens=n, ignore_eos=True, do_sample=False) for _, n in work]
        start = time.perf_counter()
        results = pipelines[name].generate(prompts, configs)
        return {"seconds": time.perf_counter() - start, "texts": [list(r.m_generation_ids[0]) for r in results]}

    return generate, {"ready": True}


def float32():
    """Weights as they are: the exporter makes large models smaller unless told."""
    from optimum.intel import OVConfig

    return OVConfig(dtype="fp32")


if __name__ == "__main__":
    main()
