"""The images of a plan request: decoded, resized, and checked, or refused by their field."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ConfigError, RequestError
from thor_dflash.core.message_text import show
from thor_dflash.core.model_dims import PATCH
from thor_dflash.runtime.text.prompt_segments import EncodedPrompt
from thor_dflash.runtime.text.tokenizer import Tokenizer
from thor_dflash.runtime.vision.decoder import RawSize, check_size, read_picture
from thor_dflash.runtime.vision.encoder_cache import EncoderCache
from thor_dflash.runtime.vision.picture import PatchGrid, Picture, PixelLimits
from thor_dflash.serving.protocol import errors, validation
from thor_dflash.serving.protocol import messages as wire
from thor_dflash.serving.protocol.errors import bad_request

KEPT_BYTES = 64 << 20
"""Memory for pixels that requests may name: 72 images of 640 x 480."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRules:
    """What a server takes of images."""

    pixels: PixelLimits
    """Of resized images."""
    largest: int
    """Most pixels of a resized image that a graph takes: resizing keeps narrow images a token wide,
    whatever the limit."""
    most: int
    """Images of a request."""
    marks: tuple[str, ...]
    """Texts that stand for an image: in a message they would take another's rows."""


def rules_of(
    encoder: EncoderCache | None, tokenizer: Tokenizer, config: ServeConfig
) -> ImageRules | None:
    """Return what a server of a package takes; None: it sees no images."""
    if encoder is None:
        return None
    vision = encoder.vision
    limits = PixelLimits(vision.shortest, vision.longest)
    return ImageRules(
        pixels=limits.under(min(config.image_pixels, encoder.most_pixels)),
        largest=encoder.most_pixels,
        most=config.max_images,
        marks=tuple(filter(None, map(tokenizer.spelling, vision.reserved))),
    )


class RecentPictures:
    """Pictures that clients sent lately, which a later request may name instead of sending them
    again. Thread-safe.
    """

    def __init__(self, budget: int = KEPT_BYTES) -> None:
        self._budget = budget
        self._bytes = 0
        self._pictures: OrderedDict[tuple[str, str], Picture] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, scope: str, picture: Picture) -> bool:
        """Keep a picture of the client `scope`. Returns whether it is new."""
        key = scope, picture.digest.hex()
        with self._lock:
            if old := self._pictures.pop(key, None):
                self._bytes -= old.pixels.nbytes
            self._pictures[key] = picture
            self._bytes += picture.pixels.nbytes
            while self._bytes > self._budget:
                self._bytes -= self._pictures.popitem(last=False)[1].pixels.nbytes
        return old is None

    def find(self, scope: str, sha256: str) -> Picture | None:
        """Return a kept picture of the client `scope`."""
        with self._lock:
            return self._pictures.get((scope, sha256))


def read_pictures(
    ask: wire.PlanRequest, rules: ImageRules | None, kept: RecentPictures, scope: str
) -> dict[str, Picture]:
    """Return the request's images by the names that its messages show them under.

    Args:
        rules: None if the model sees none.
        kept: Holds the images of earlier requests of the client `scope` with the same cache_scope,
            and those of this one.

    Raises:
        PlanError: bad_request.
    """
    named = dict(validation.named_images(ask))
    if not ask.images and not named:
        return {}
    rules = _checked(ask, rules, len(ask.images) + len(named))
    found = {image.id: _read(image, f"images[{i}]", rules) for i, image in enumerate(ask.images)}
    owner = json.dumps([scope, ask.cache_scope])
    for sha256, where in named.items():
        if (picture := kept.find(owner, sha256)) is None:
            rule = "that of an image that this client has sent lately: send it again"
            raise bad_request(f"{where} must be {rule} (got {show(sha256)})", where)
        found[sha256] = picture
    for picture in found.values():
        kept.add(owner, picture)
    return found


def count_tokens(ask: wire.Validate, rules: ImageRules | None) -> dict[str, int]:
    """Return the tokens of images by their names; none is decoded.

    Raises:
        PlanError: bad_request.
    """
    if named := next(validation.named_images(ask), None):
        raise bad_request(f"{named[1]} must be left out: its size is not looked up", named[1])
    if not ask.images:
        return {}
    rules, found = _checked(ask, rules, len(ask.images)), dict[str, int]()
    for i, image in enumerate(ask.images):
        try:
            check_size(image.width, image.height, "width")
        except RequestError as e:
            raise bad_request(f"images[{i}].{e}", f"images[{i}].width") from e
        limits = rules.pixels.under(image.max_pixels) if image.max_pixels else rules.pixels
        width, height = limits.resized(image.width, image.height)
        found[image.id] = PatchGrid(height // PATCH, width // PATCH).tokens
    return found


def _checked(
    ask: wire.PlanRequest | wire.Validate, rules: ImageRules | None, count: int
) -> ImageRules:
    """Refuse a request by the number of its images, or by its texts."""
    if rules is None:
        text = "images must be left out: the package has no vision tower"
        raise bad_request(f"{text} (got {count})", "images")
    if count > rules.most:
        raise bad_request(f"images must be at most {rules.most} (got {count})", "images")
    _check_marks(ask, rules.marks)
    return rules


def _read(image: wire.ImageInput, where: str, rules: ImageRules) -> Picture:
    size = RawSize(width=image.width, height=image.height, step=image.step)
    limits = rules.pixels.under(image.max_pixels) if image.max_pixels else rules.pixels
    try:
        picture = read_picture(image.data, image.format, limits, size)
    except RequestError as e:
        text = f"{where}.{errors.refusal(e)}"
        raise bad_request(text, f"{where}.{e.field}") from e
    except ConfigError as e:  # the decoder is not installed
        raise bad_request(str(e), f"{where}.format") from e
    height, width, _ = picture.pixels.shape
    if width * height > rules.largest:
        field, rule = f"{where}.data", f"of at most {rules.largest} pixels after resizing"
        text = f"{field} must be {rule}, as build.image_patches has it (got {width} x {height})"
        raise bad_request(text, field)
    return picture


def with_pictures(
    prompt: EncodedPrompt, encoder: EncoderCache | None, pictures: Sequence[Picture]
) -> EncodedPrompt:
    """Return the prompt with the tokens of its images.

    Raises:
        PlanError: bad_request, the template shows another number of images.
    """
    if not pictures or encoder is None:
        return prompt
    try:
        return prompt.with_images(encoder, pictures)
    except RequestError as e:
        raise bad_request(errors.refusal(e), "images") from e


def image_results(
    pictures: Mapping[str, Picture], encode_ms: Mapping[bytes, float]
) -> tuple[wire.ImageResult, ...] | None:
    """Describe a request's images; `encode_ms`: of those that the tower ran for, by digest."""
    return (
        tuple(
            wire.ImageResult(
                id=name,
                sha256=picture.digest.hex(),
                width=picture.pixels.shape[1],
                height=picture.pixels.shape[0],
                tokens=picture.grid.tokens,
                encode_ms=encode_ms.get(picture.digest, 0.0),
                cached=picture.digest not in encode_ms,
            )
            for name, picture in pictures.items()
        )
        or None
    )


def _check_marks(ask: wire.PlanRequest | wire.Validate, marks: Sequence[str]) -> None:
    """Refuse texts that spell what stands for an image."""
    for field, text in _texts(ask):
        if mark := next((mark for mark in marks if mark in text), None):
            raise bad_request(f"{field} must not spell {mark} where there are images", field)


def _texts(ask: wire.PlanRequest | wire.Validate) -> Iterator[tuple[str, str]]:
    """Every text of a prompt, with its field."""
    for i, message in enumerate(ask.messages or ()):
        where = f"messages[{i}]"
        if isinstance(message.content, str):
            yield f"{where}.content", message.content
        else:
            for j, part in enumerate(message.content):
                if isinstance(part, wire.TextPart):
                    yield f"{where}.content[{j}].text", part.text
        yield f"{where}.reasoning_content", message.reasoning_content or ""
        yield f"{where}.tool_calls", json.dumps(message.tool_calls, ensure_ascii=False)
    for name in ("tools", "chat_template_kwargs"):
        yield name, json.dumps(getattr(ask, name, None), ensure_ascii=False)
