"""The images of a plan request: decoded, resized, and checked, or refused by their field."""

from __future__ import annotations

import json
from collections.abc import Sequence

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ConfigError, RequestError
from thor_dflash.core.model_dims import VisionDims
from thor_dflash.runtime.text.prompt_segments import EncodedPrompt
from thor_dflash.runtime.text.tokenizer import Tokenizer
from thor_dflash.runtime.vision.decoder import RawSize, read_picture
from thor_dflash.runtime.vision.encoder_cache import EncoderCache
from thor_dflash.runtime.vision.picture import Picture
from thor_dflash.serving.protocol import errors, validation
from thor_dflash.serving.protocol import messages as wire
from thor_dflash.serving.protocol.errors import bad_request


def read_pictures(
    ask: wire.PlanRequest, encoder: EncoderCache | None, tokenizer: Tokenizer, config: ServeConfig
) -> dict[str, Picture]:
    """Return the request's images by their ids. `encoder`: None if the package sees none.

    Raises:
        PlanError: bad_request.
    """
    if not ask.images:
        return {}
    if encoder is None:
        text = "images must be left out: the package has no vision tower"
        raise bad_request(f"{text} (got {len(ask.images)})", "images")
    if len(ask.images) > (most := config.max_images):
        raise bad_request(f"images must be at most {most} (got {len(ask.images)})", "images")
    _check_marks(ask, encoder.vision, tokenizer)
    most = min(config.image_pixels, encoder.most_pixels)
    found: dict[str, Picture] = {}
    for i, image in enumerate(ask.images):
        size = RawSize(width=image.width, height=image.height, step=image.step)
        longest, where = min(image.max_pixels or most, most), f"images[{i}]"
        try:
            found[image.id] = read_picture(
                image.data, image.format, encoder.vision, longest, size, where
            )
        except RequestError as e:
            raise bad_request(errors.refusal(e), "images") from e
        except ConfigError as e:  # the decoder is not installed
            raise bad_request(str(e), "images") from e
    return found


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


def _check_marks(ask: wire.PlanRequest, vision: VisionDims, tokenizer: Tokenizer) -> None:
    """Refuse texts that spell what stands for an image, which would take another's rows."""
    turns = validation.messages_of(ask.prompt, ask.messages)
    text = json.dumps([turns, ask.tools], ensure_ascii=False)
    for mark in map(tokenizer.spelling, vision.reserved):
        if mark and mark in text:
            rule = f"not spell {mark} where there are images"
            raise bad_request(f"messages must {rule} (got it)", "messages")
