"""Rewrite a GGUF file in another block format: the matrices made again, all else copied.

Chapter 11. What llama.cpp's `llama-quantize` does, with the encoders of `formats.py`; a file made here is what the
benchmark gives to llama.cpp, so that both engines read the same kind of block.
"""

from __future__ import annotations

from pathlib import Path

import torch

from minillm.quant.formats import known, quantize_blocks


def requantize(source: str | Path, target: str | Path, name: str) -> Path:
    """Every matrix of `source` whose rows are whole blocks becomes `name`; the others are stored as they were."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize

    form, reader, target = known(name), GGUFReader(source), Path(target)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":  # the writer's own
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        rows = tensor.data
        if len(tensor.shape) == 2 and tensor.shape[0] % form.weights == 0:  # GGUF names the row length first
            values = torch.from_numpy(dequantize(rows, tensor.tensor_type).copy())
            raw = quantize_blocks(values, name).numpy()
            writer.add_tensor(tensor.name, raw, raw_dtype=GGMLQuantizationType[name])
        else:
            writer.add_tensor(tensor.name, rows, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
