"""Answers of planner-nano-eyes by transformers, in float32 on a CPU, to compare the runtime with.

    python -m thor_dflash.calib.nano.reference --target models/planner-nano-eyes/target --count 20 \
        --out models/planner-nano-eyes/transformers.json

Needs torch and transformers. Weights are those of the checkpoint, dequantised; the cache is not
rounded, as in a package for the engine `ort`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

from thor_dflash.calib.nano import checkpoint
from thor_dflash.calib.nano.dims import NanoTargetDims, NanoTowerDims
from thor_dflash.calib.nano.pictured_corpus import GRID, prompt_ids
from thor_dflash.calib.nano.vision import SeeingTarget
from thor_dflash.calib.planbench.pictured import heldout_pictured
from thor_dflash.runtime.vision.picture import Picture

LONGEST = 512
"""Most tokens of an answer, as in calib.plan_requests."""


def load(target: Path) -> Qwen3_5ForConditionalGeneration:
    """transformers' model with the weights of a checkpoint."""
    ours = SeeingTarget(NanoTargetDims(), NanoTowerDims())
    checkpoint.load_exported(ours, "model.", target)
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    config["text_config"]["dtype"] = config["vision_config"]["dtype"] = "float32"
    made = Qwen3_5Config(**config, attn_implementation="eager")
    model = Qwen3_5ForConditionalGeneration(made).float().eval()
    state = {f"model.{name}": tensor for name, tensor in ours.state_dict().items()}
    state["lm_head.weight"] = ours.language_model.embed_tokens.weight.detach()
    model.load_state_dict(state, strict=True)
    return model


@torch.no_grad()
def answers(target: Path, count: int) -> list[list[int]]:
    """Greedy answers to the first held-out tasks, with their pictures, without the end token."""
    model, tokenizer = load(target), Tokenizer.from_file(str(target / "tokenizer.json"))
    usable, pad = tokenizer.get_vocab_size(), tokenizer.token_to_id("<|image_pad|>")
    ends = {tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>")}
    found: list[list[int]] = []
    for task in heldout_pictured(count):
        ids = torch.tensor([prompt_ids(tokenizer, task, thinking=True)])
        grid = torch.tensor([[1, GRID.rows, GRID.columns]])
        out = model(
            input_ids=ids,
            mm_token_type_ids=(ids == pad).int(),
            pixel_values=torch.from_numpy(Picture(task.drawn.rgb).patches()),
            image_grid_thw=grid,
            use_cache=True,
        )
        made: list[int] = []
        while len(made) < LONGEST:
            token = int(out.logits[0, -1, :usable].argmax())
            if token in ends:
                break
            made.append(token)
            out = model(
                input_ids=torch.tensor([[token]]),
                past_key_values=out.past_key_values,
                use_cache=True,
            )
        found.append(made)
        print(f"{task.task.name}: {len(made)} tokens", flush=True)
    return found


def main() -> None:
    """Parse the command line and write the answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    found = {"versions": versions, "answers": answers(args.target, args.count)}
    args.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
