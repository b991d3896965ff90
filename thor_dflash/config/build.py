"""The configuration section of `thor-dflash build`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from thor_dflash.config.bounds import LARGEST, Count, Positive
from thor_dflash.config.tensorrt import TensorRTConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.message_text import show

BLOCK = 16
"""Rows of a block if neither the configuration nor a drafter has it."""
MTP = "mtp"
"""The drafter that is a layer of the target's checkpoint."""
CAPACITY = 8192
"""Default context, tokens."""
LONGEST_NAME = 100
"""Longest name of a model, characters."""
CLOSING_MESSAGE = (
    "Considering the limited time by the user, I have to give the solution based on the thinking "
    "directly now.\n</think>\n\n"
)
"""The message that closes thinking at its budget. Source: the model card of Qwen3.6-27B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardConfig:
    """The model card of a package: the lengths that the model's makers recommend, in tokens. 0
    means by rule ([policies](../guide/policies.md)).
    """

    # By rule: max_tokens is 32768 or the longest the model was made for if that is less; complex is
    # 81920 likewise; reply is an eighth of max_tokens but at most 4096. With think = max_tokens -
    # reply: low is an eighth of think, medium is half, high is all of it; max is complex - reply;
    # x_high is half way between high and max. Source: Lucebox model_card.cpp and its table of
    # families.
    max_tokens: Count = 0
    """Longest answer, thinking included."""
    complex: Count = 0
    """Longest answer to a hard problem."""
    reply: Count = 0
    """Tokens reserved for closing message and reply when thinking has a budget."""
    low: Count = 0
    """Thinking of the effort low; the next four likewise."""
    medium: Count = 0
    high: Count = 0
    x_high: Count = 0
    max: Count = 0
    close: str = CLOSING_MESSAGE
    """Message that closes thinking at its budget. Must hold `</think>` once, followed by at most a
    blank line if grammars are to be used."""
    source: str = ""
    """Where these numbers come from."""

    def __post_init__(self) -> None:
        if self.close.count("</think>") != 1:
            raise ConfigError(f"build.card.close must hold </think> once (got {show(self.close)})")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """How `thor-dflash build` makes a package from checkpoints."""

    engine: Literal["ort", "cuda", "tensorrt"] = "ort"
    """Engine that the package is for; ort is ONNX Runtime on the CPU, for tests."""
    block: Count = 0
    """Rows of the verify block; 0: the drafter's, or 16 without a drafter. Rows above the drafter's
    hold what a text has behind its drafts, for engines ort and cuda."""
    drafts: Positive = 3
    """Tokens that an MTP layer drafts for a block, each by a step of its own; only with drafter
    mtp."""
    chunk: Count = 0
    """Rows of a prefill step; 0: 64 on ort, else 512."""
    chunks: tuple[Positive, ...] = ()
    """Other sizes of a prefill step, rows; []: 256, 128, 64 and 32 on cuda, 128 on tensorrt, none
    on ort. A server chooses among all sizes by the measured time of a step
    ([serving](../guide/serving.md)): larger ones read a prompt faster, but delay a cancel and keep
    prefixes in larger pieces. A prompt's last step uses the smallest size that holds the rest."""
    kv: Literal["auto", "f32", "bf16", "fp8"] = "auto"
    """Element type of the target's KV cache; auto: f32 on ort, else fp8."""
    activations: Literal["auto", "f32", "bf16"] = "auto"
    """Element type to which the graph rounds between layers ([numerics](../design/numerics.md));
    f32 does not round. auto: f32 on ort, else bf16, the only type that our kernels support."""
    saves: Literal["records", "states"] = "records"
    """What is kept of a block's GDN steps until the commit: `records` to replay, or `states`, one
    per row ([policies](../guide/policies.md))."""
    capacity: Count = 0
    """Default context of a session, tokens; 0: 8192, or the longest the model was made for if that
    is less."""
    widths: tuple[Annotated[int, Meta(ge=4, le=LARGEST)], ...] = ()
    """Narrower blocks that a session may choose, rows. Must be multiples of 4 to give the same
    tokens: ONNX Runtime computes some functions four elements at a time."""
    draft_ids: str = ""
    """JSON file with the ids that the drafter may propose, ascending, for cuda and tensorrt an even
    number of them; its head then reads only those rows. "": all ids. Source: EAGLE-3's reduced
    draft vocabulary."""
    vision: Literal["auto", "on", "off"] = "auto"
    """Whether the package reads images: auto if the checkpoint holds a vision tower, which then
    must be whole and have its preprocessor_config.json. See [images](../guide/images.md)."""
    image_patches: tuple[Positive, ...] = ()
    """Sizes of the vision graph, patches of 16 x 16 pixels; an image takes the smallest that holds
    it. []: 1280 (640 x 480 and a little more) and 4096 (1024 x 1024), or the most that the model
    resizes to if that is less."""
    name: str = ""
    """What clients call the model (`hello`, `/v1/models`), at most 100 printable characters; "": as
    the target's directory, without its path."""
    card: CardConfig = field(default_factory=CardConfig)
    tensorrt: TensorRTConfig = field(default_factory=TensorRTConfig)

    def __post_init__(self) -> None:
        if self.block == 1:
            raise ConfigError("build.block must be 0 or >= 2 (got 1)")
        if len(set(self.chunks)) < len(self.chunks):
            raise ConfigError(f"build.chunks must be >= 1, each once (got {list(self.chunks)})")
        if len(set(self.widths)) < len(self.widths) or any(width % 4 for width in self.widths):
            raise ConfigError(
                f"build.widths must be multiples of 4, each once (got {list(self.widths)})"
            )
        if len(self.name) > LONGEST_NAME or not self.name.isprintable():
            rule = f"at most {LONGEST_NAME} printable characters"
            raise ConfigError(f"build.name must be {rule} (got {show(self.name)})")
