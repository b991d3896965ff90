"""Evaluates planner-nano on held-out tasks: share of valid plans under strict greedy decoding, and
mean accept length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from thor_dflash.calib.nano.drafter import Blocks, NanoDrafter, blocks
from thor_dflash.calib.nano.rollout import RolloutImages, rollout
from thor_dflash.calib.nano.target import CHUNK, NanoTarget, packed_rows
from thor_dflash.calib.nano.tokenizer import CLOSE, prompt_text
from thor_dflash.calib.nano.vision import ImageRows, replaced
from thor_dflash.calib.planbench import FAMILIES, Task, heldout, judge, sample

LONGEST = 768
"""Most tokens of prompt and output together."""
CUT = 10
"""Thinking tokens before the budget's closing text in mode "cut"."""


@dataclass(frozen=True)
class GeneratedAnswer:
    """One generated output."""

    task: Task
    prompt: list[int]
    made: list[int]
    images: RolloutImages | None = None
    """The image of the prompt, if it has one: a batch of one."""


Context = Literal["index", "without images", "time"]
"""Positions of the drafter's context rows: their indices; the same, without the rows of images; the
target's positions in time.
"""


def answers(
    model: NanoTarget, tokenizer: Tokenizer, tasks: list[Task], mode: str
) -> list[GeneratedAnswer]:
    """Decode greedily in mode "on", "off" or "cut" (the prompt ends with the first tokens of the
    canonical thinking and the closing text).
    """
    prompts = [tokenizer.encode(prompt_text(task, mode != "off")).ids for task in tasks]
    if mode == "cut":
        close = tokenizer.encode(CLOSE).ids
        starts = [tokenizer.encode(task.thinking).ids[:CUT] for task in tasks]
        prompts = [p + start + close for p, start in zip(prompts, starts, strict=True)]
    usable = tokenizer.get_vocab_size()
    ends = (tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>"))
    made = rollout(model, prompts, LONGEST, usable, ends)
    return [GeneratedAnswer(*parts) for parts in zip(tasks, prompts, made, strict=True)]


def plan_of(tokenizer: Tokenizer, made: list[int]) -> str:
    """Return the plan text of an output: what follows the thinking, without the end token."""
    text = tokenizer.decode(made, skip_special_tokens=False)
    return text.rsplit("</think>", 1)[-1].removesuffix("<|im_end|>").strip()


def validity(
    tokenizer: Tokenizer,
    found: list[GeneratedAnswer],
    show: int,
    families: Sequence[str] = FAMILIES,
) -> dict[str, float]:
    """Return the share of valid plans per family and overall; print the first ``show`` failures."""
    hits: dict[str, list[bool]] = {family: [] for family in families}
    for answer in found:
        plan = plan_of(tokenizer, answer.made)
        verdict = judge(answer.task, plan)
        hits[answer.task.family].append(verdict.valid)
        if not verdict.valid and show > 0:
            show -= 1
            print(
                f"  {answer.task.name}: {verdict.reason}\n"
                f"    wanted {answer.task.plan[:300]}\n    got    {plan[:300]}"
            )
    rates = {family: sum(h) / max(1, len(h)) for family, h in hits.items()}
    rates["all"] = sum(sum(h) for h in hits.values()) / max(1, len(found))
    return rates


@torch.no_grad()
def accept_lengths(
    target: NanoTarget,
    drafter: NanoDrafter,
    found: list[GeneratedAnswer],
    mask_id: int,
    taps: tuple[int, ...],
    context: Context = "index",
) -> list[float]:
    """Return the committed tokens per verify of each output, including the bonus token, as the
    decode loop would commit them.

    Strict greedy output does not depend on the drafter. So all positions are drafted first, and the
    decode loop is simulated afterwards.
    """
    device = target.embed_tokens.weight.device
    lengths: list[float] = []
    for answer in found:
        whole = answer.prompt + answer.made
        size = (len(whole) + CHUNK - 1) // CHUNK * CHUNK
        ids = torch.zeros(1, size, dtype=torch.long, device=device)
        ids[0, : len(whole)] = torch.tensor(whole)
        pos = torch.arange(size, device=device)[None]
        first, stop = len(answer.prompt) - 1, len(whole) - 1
        anchors = torch.arange(first, stop, device=device)[None]
        x, turn, unseen = target.embed(ids), pos, None
        if answer.images is not None:
            rows, turn = answer.images.rows, answer.images.turn[:, :size]
            x = replaced(x, ImageRows(rows.slot[:, :size], rows.values))
            if context == "without images":
                unseen = rows.slot[:, :size] >= 0
        places = pos
        if unseen is not None:
            places = pos - unseen.cumsum(1)
        elif context == "time":
            places = turn[..., 0] if turn.ndim == 3 else turn
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            _, kept = target(x, packed_rows(pos, turn), False, taps)
        placed = blocks(drafter.dims, ids, places, anchors, mask_id, unseen)
        drafts = draft_tokens(target, drafter, torch.cat(kept, -1), ids, places, anchors, placed)[0]
        offsets = anchors[0][:, None] + torch.arange(1, drafts.shape[1] + 1, device=device)
        right = (drafts == ids[0][offsets.clamp(max=size - 1)]) & (offsets <= stop)
        matched = right.int().cumprod(-1).sum(-1).tolist()
        at, cycles = first, 0
        while at < stop:
            at += matched[at - first] + 1
            cycles += 1
        lengths.append((stop - first) / cycles)
    return lengths


def draft_tokens(
    target: NanoTarget,
    drafter: NanoDrafter,
    taps: Tensor,
    ids: Tensor,
    pos: Tensor,
    anchors: Tensor,
    placed: Blocks,
) -> Tensor:
    """Return the drafts [B, N, 15] of every anchor, 7 of a DFlash2 drafter. The models' weights are
    used as they are, without quantisation.
    """
    device, table = ids.device, target.embed_tokens.weight
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        out = drafter(table, taps, pos, placed, False)
        hidden = out.unflatten(1, (-1, drafter.dims.block))[:, :, 1:]
        if drafter.candidate_selector is not None:
            last = ids.gather(1, anchors)
            return drafter.candidate_selector.walk(hidden, table, last, table.shape[0])
        return F.linear(hidden, table).argmax(-1)


def report(
    target: NanoTarget,
    drafter: NanoDrafter | None,
    tokenizer: Tokenizer,
    count: int,
    taps: tuple[int, ...],
    show: int = 8,
) -> dict[str, dict[str, float]]:
    """Measure validity in the three modes (and on fresh training-split tasks), and accept length
    per family with thinking on and off. Prints and returns the numbers.
    """
    tasks = heldout(count)
    seen = [sample(FAMILIES[i % len(FAMILIES)], f"seen{i}", "train") for i in range(count)]
    found = {mode: answers(target, tokenizer, tasks, mode) for mode in ("on", "off", "cut")}
    result = {"train_split_on": validity(tokenizer, answers(target, tokenizer, seen, "on"), 0)}
    for mode, given in found.items():
        result[f"valid_{mode}"] = validity(tokenizer, given, show if mode == "on" else 0)
    if drafter is not None:
        mask_id = tokenizer.token_to_id("<|audio_start|>")
        for mode in ("on", "off"):
            given = found[mode][:120]
            lengths = accept_lengths(target, drafter, given, mask_id, taps)
            by_family = {
                f: [x for x, a in zip(lengths, given, strict=True) if a.task.family == f]
                for f in FAMILIES
            }
            means = {f: sum(v) / max(1, len(v)) for f, v in by_family.items()}
            tokens = sum(len(a.made) for a in given)
            cycles = sum(len(a.made) / x for a, x in zip(given, lengths, strict=True))
            result[f"accept_{mode}"] = {**means, "all": tokens / cycles}
    for name, numbers in result.items():
        print(name, " ".join(f"{k}={v:.3f}" for k, v in numbers.items()), flush=True)
    return result


def write_report(path: Path, result: dict[str, dict[str, float]]) -> None:
    """Write the numbers as JSON."""
    path.write_text(json.dumps(result, indent=2) + "\n")
