"""Makes modelopt.json and compressed_tensors.json: hashes of what the published quantisers write
for one small random model.

Run in an environment with torch, nvidia-modelopt 0.47.0, compressed-tensors 0.20.0 and transformers
5.24.0 (a CPU is enough):
    PYTHONPATH=tests python tests/goldens/quantize/make.py
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import modelopt.torch.quantization as mtq
import safetensors
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from modelopt.torch.export import export_hf_checkpoint
from support.checkpoints import GEOMETRIES, write_target
from transformers import Qwen3_5ForCausalLM

HERE = Path(__file__).parent
GEOMETRY, SEED = "heads27b", 3
NVFP4 = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
FP8 = {"num_bits": (4, 3)}
IN_NVFP4 = ("gate_proj", "up_proj", "down_proj", "lm_head")
IN_FP8 = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj")


def recipe() -> list[dict[str, object]]:
    """NVIDIA's for this family: NVFP4 weights in the MLP and the head, FP8 in the rest."""
    rules: list[dict[str, object]] = [{"quantizer_name": "*", "enable": False}]
    named = [(f"*{name}*weight_quantizer", NVFP4) for name in IN_NVFP4]
    named += [(f"*{n}*{what}_quantizer", FP8) for n in IN_FP8 for what in ("weight", "input")]
    return rules + [{"quantizer_name": n, "cfg": cfg, "enable": True} for n, cfg in named]


def with_modelopt(source: Path, out: Path) -> dict[str, object]:
    """Every exported tensor: type, shape, SHA-256 of its bytes; and hf_quant_config.json."""
    model = Qwen3_5ForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    mtq.quantize(model, {"quant_cfg": recipe(), "algorithm": "max"}, lambda m: m(ids))
    model.config.architectures = ["Qwen3_5ForCausalLM"]
    with torch.no_grad():
        export_hf_checkpoint(model, export_dir=out)
    stored = safetensors.deserialize((out / "model.safetensors").read_bytes())
    tensors = {
        name: [row["dtype"], row["shape"], hashlib.sha256(row["data"]).hexdigest()]
        for name, row in sorted(stored)
    }
    return {"tensors": tensors, "config": json.loads((out / "hf_quant_config.json").read_text())}


def with_compressed_tensors(source: Path) -> dict[str, str]:
    """The FP8 codes and scales of each linear of attention, one scale per row, in float32."""
    model = Qwen3_5ForCausalLM.from_pretrained(source, dtype=torch.float32)
    args = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    found: dict[str, str] = {}
    for name, w in model.state_dict().items():
        if "self_attn" in name and name.endswith("_proj.weight"):
            scale, zero = calculate_qparams(w.amin(1, keepdim=True), w.amax(1, keepdim=True), args)
            codes = quantize(w, scale, zero, args, dtype=torch.float8_e4m3fn)
            for part, value in (("", codes.view(torch.uint8)), ("_scale", scale)):
                found[name + part] = hashlib.sha256(value.numpy().tobytes()).hexdigest()
    return found


def main() -> None:
    """Writes the files beside this script."""
    with tempfile.TemporaryDirectory() as held:
        source = write_target(Path(held) / "source", GEOMETRIES[GEOMETRY], SEED)
        made = with_modelopt(source, Path(held) / "out")
        rows = with_compressed_tensors(source)
    for name, value in (("modelopt", made), ("compressed_tensors", rows)):
        text = json.dumps(value, indent=1, sort_keys=True)
        (HERE / f"{name}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
