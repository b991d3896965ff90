"""Images in requests of TDP/1: what the model sees of them, and what is refused by its field."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from support.seeing_model import frame, seeing_session

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import PlanError
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.session import Request
from thor_dflash.runtime.vision.picture import Picture
from thor_dflash.serving.client.options import Options
from thor_dflash.serving.client.retry import encode
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.protocol import codec, validation
from thor_dflash.serving.protocol.messages import PlanRequest, Result

CONFIG = ServeConfig(thinking="off", max_tokens=12, max_images=2)
THIN = {"width": 6400, "height": 32}
TEXT = {"type": "text", "text": "What is on the table? "}


class Lent(SessionBackend):
    """A backend that leaves its session, which the tests share, open."""

    def close(self) -> None:
        pass


@pytest.fixture
def backend() -> SessionBackend:
    return Lent(seeing_session(), CONFIG)


def raw(name: str, pixels: Array, **more: Any) -> dict[str, Any]:
    height, width, _ = pixels.shape
    size = {"width": width, "height": height}
    return {"id": name, "format": "rgb8", "data": pixels.tobytes(), **size, **more}


def asked(*images: dict[str, Any], **more: Any) -> dict[str, Any]:
    parts = [TEXT, *({"type": "image", "image": image["id"]} for image in images)]
    return {"messages": [{"role": "user", "content": parts}], "images": list(images), **more}


def planned(
    backend: SessionBackend, table: dict[str, Any], how: codec.Codec = codec.JSON
) -> Result:
    """The result of a request that has been through a codec."""
    request = how.decode(how.encode(table), PlanRequest)
    validation.check(request)
    run = backend.start(backend.prepare(request, None), None)
    while not run.done:
        run.step()
    return run.result(None)


@pytest.mark.parametrize("how", [codec.JSON, codec.MSGPACK], ids=lambda how: how.name)
def test_the_answer_is_that_of_a_session_shown_the_picture(
    backend: SessionBackend, how: codec.Codec
) -> None:
    session, pixels = seeing_session(), frame(3)
    assert session.tokenizer
    messages = [{"role": "user", "content": [TEXT, {"type": "image"}]}]
    ids = session.tokenizer.encode(session.tokenizer.render(messages, False, pictures=1))
    images = session.images(ids, [Picture(pixels)])
    assert images
    stop = frozenset(session.manifest.stop_tokens)
    request = Request(prompt=images.prompt, max_tokens=12, stop=stop, images=images)
    want = [t for chunk in session.generate(request) for t in chunk.tokens]
    table = {**asked(raw("cam0", pixels)), "return": ["tokens", "text"]}
    result = planned(backend, table, how)
    assert list(result.tokens or ()) == want
    assert result.images
    seen = result.images[0]
    assert (seen.id, seen.width, seen.height, seen.tokens) == ("cam0", 96, 64, 6)
    assert seen.sha256 == Picture(pixels).digest.hex()
    assert result.usage.prompt_tokens == len(images.prompt)


def test_rows_and_formats_of_pixels_are_the_same_picture(backend: SessionBackend) -> None:
    pixels = frame(4)
    padded = np.pad(pixels.reshape(64, -1), ((0, 0), (0, 12)), constant_values=77)
    given = [
        raw("a", pixels),
        raw("b", pixels[:, :, ::-1], format="bgr8"),
        {**raw("c", pixels), "data": padded.tobytes(), "step": 300},
    ]
    digests = {planned(backend, asked(one)).images[0].sha256 for one in given}  # type: ignore[index]
    assert len(digests) == 1


BAD = {
    "unused": (lambda: {**asked(), "images": [raw("a", frame(1))]}, "images"),
    "unknown": (lambda: asked(raw("a", frame(1))) | {"images": []}, "messages"),
    "twice": (lambda: asked(raw("a", frame(1)), raw("a", frame(2))), "images"),
    "too many": (lambda: asked(*(raw(n, frame(1)) for n in "abc")), "images"),
    "short": (lambda: asked({**raw("a", frame(1)), "data": b"x"}), "images"),
    "no size": (lambda: asked({"id": "a", "format": "rgb8", "data": b"x"}), "images"),
    "no jpeg": (lambda: asked({"id": "a", "format": "jpeg", "data": b"x"}), "images"),
    "narrow": (lambda: asked(raw("a", frame(1, 4, 64))), "images"),
    "beyond every graph": (
        lambda: asked({"id": "a", "format": "mono8", "data": bytes(6400 * 32)} | THIN),
        "images",
    ),
    "no base64": (lambda: asked({**raw("a", frame(1)), "data": "@"}), "images[0].data"),
    "with prompt": (lambda: {"prompt": "x", "images": [raw("a", frame(1))]}, "images"),
    "system": (
        lambda: {
            "messages": [{"role": "system", "content": [{"type": "image", "image": "a"}]}],
            "images": [raw("a", frame(1))],
        },
        "messages",
    ),
    "spelt": (
        lambda: {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "<|image_pad|>"},
                        {"type": "image", "image": "a"},
                    ],
                }
            ],
            "images": [raw("a", frame(1))],
        },
        "messages",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_shown_is_refused_by_its_field(backend: SessionBackend, name: str) -> None:
    make, field = BAD[name]
    with pytest.raises(PlanError) as error:
        planned(backend, make())
    assert (error.value.code, error.value.field) == ("bad_request", field)


def test_a_package_without_a_tower_refuses_images() -> None:
    from support.constrained_model import session

    with pytest.raises(PlanError) as error:
        planned(Lent(session(), CONFIG), asked(raw("a", frame(1))))
    assert error.value.field == "images"


def test_a_cancel_may_wait_for_the_tower(
    backend: SessionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeing_session().model
    encode = model.encode

    def slow(picture: Picture) -> Array:
        time.sleep(0.3)
        return encode(picture)

    monkeypatch.setattr(model, "encode", slow)
    planned(backend, asked(raw("a", frame(77))))
    assert backend.rates.bound_ms() >= 600


def test_a_server_says_that_it_sees(backend: SessionBackend) -> None:
    assert "images" in backend.about.features


@pytest.mark.parametrize("how", [codec.JSON, codec.MSGPACK], ids=lambda how: how.name)
def test_clients_send_the_bytes(how: codec.Codec) -> None:
    table = asked(raw("a", frame(1)))
    request = how.decode(how.encode(table), PlanRequest)
    sent = how.decode(encode(request, Options(codec=how)).body, PlanRequest)
    assert sent.images == request.images
