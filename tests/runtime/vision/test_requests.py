"""Images in requests of TDP/1: what the model sees of them, and what is refused by its field."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from PIL import Image
from support.image_files import file_of
from support.image_requests import BAD, SHOWN, TEXT, asked, raw, showing
from support.seeing_model import frame, seeing_package, seeing_session

from thor_dflash.cli.input_files import read_chat
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ConfigError, ModelFault, PlanError
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.doctor import package as doctor
from thor_dflash.runtime.measure.image_bench import measure_image
from thor_dflash.runtime.session import Request
from thor_dflash.runtime.vision.picture import Picture
from thor_dflash.serving.client.options import Options
from thor_dflash.serving.client.retry import encode
from thor_dflash.serving.planner import self_test
from thor_dflash.serving.planner.backend import Backend
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.planner.request_images import RecentPictures, read_pictures
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.protocol import codec, validation
from thor_dflash.serving.protocol.messages import PlanRequest, Result, Validate

CONFIG = ServeConfig(thinking="off", max_tokens=12, max_images=2)


class Lent(SessionBackend):
    """A backend that leaves its session, which the tests share, open."""

    def close(self) -> None:
        pass


@pytest.fixture
def backend() -> SessionBackend:
    return Lent(seeing_session(), CONFIG)


def planned(backend: Backend, table: dict[str, Any], how: codec.Codec = codec.JSON) -> Result:
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


def test_images_of_results_go_with_their_calls(tmp_path: Path) -> None:
    """Templates show no ids, so results are put into the order of the calls, with their images."""
    calls = [{"id": name, "function": {"name": "camera", "arguments": "{}"}} for name in "ab"]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Look twice."},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    sent = [
        {"role": "tool", "tool_call_id": name, "content": [TEXT, {"type": "image", "image": name}]}
        for name in "ba"
    ]
    frames = {name: frame(i) for i, name in enumerate("ab")}
    table = {
        "messages": [*turns, *sent],
        "images": [raw(name, pixels) for name, pixels in frames.items()],
    }
    assert validation.image_names(codec.convert(table, PlanRequest)) == ["a", "b"]
    files = {name: file_of(Image.fromarray(pixels)) for name, pixels in frames.items()}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        sent["ba".index(name)]["content"] = [TEXT, {"type": "image", "file": name}]
    (tmp_path / "chat.json").write_text(json.dumps([*turns, *sent]))
    read, shown = read_chat(tmp_path / "chat.json")
    assert [turn.get("tool_call_id") for turn in read[2:]] == ["a", "b"]
    assert [data for _, data in shown] == list(files.values())


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


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_shown_is_refused_by_its_field(backend: SessionBackend, name: str) -> None:
    make, field = BAD[name]
    either: list[Backend] = [backend, MockBackend(CONFIG)]
    for each in either[: 1 if name == "beyond every graph" else 2]:
        with pytest.raises(PlanError) as error:
            planned(each, make())
        assert (error.value.code, error.value.field) == ("bad_request", field)
        assert error.value.message.startswith(field)


@pytest.mark.parametrize("mock", [False, True])
def test_an_image_that_was_sent_is_named_by_its_digest(
    backend: SessionBackend, *, mock: bool
) -> None:
    it = MockBackend(CONFIG) if mock else backend
    sent = planned(it, asked(raw("a", frame(8, 256, 256))))
    assert sent.images
    again = planned(it, named := showing(sent.images[0].sha256))
    assert again.images
    assert again.images[0] == structs.replace(
        sent.images[0], id=sent.images[0].sha256, cached=True, encode_ms=0.0
    )
    assert again.usage.prompt_tokens == sent.usage.prompt_tokens
    assert mock or again.text == sent.text
    request = codec.convert(named, PlanRequest)
    scoped = structs.replace(request, cache_scope="another")
    for what, client in ((request, "another client"), (scoped, "")):
        with pytest.raises(PlanError) as error:
            it.prepare(what, None, client)
        assert error.value.field == f"{SHOWN}.image.sha256"


@pytest.mark.parametrize("mock", [False, True])
def test_tokens_are_counted_by_sizes_alone(backend: SessionBackend, *, mock: bool) -> None:
    it = MockBackend(CONFIG) if mock else backend
    frames = [raw("a", frame(1, 300, 200)), raw("b", frame(2, 96, 64), max_pixels=2048)]
    table = asked(*frames)
    sizes = [
        {k: v for k, v in f.items() if k in ("id", "width", "height", "max_pixels")} for f in frames
    ]
    given = {"messages": table["messages"], "images": sizes}
    count = it.validate(codec.convert(given, Validate))["prompt_tokens"]
    prepared = it.prepare(codec.convert(table | {"thinking": "on"}, PlanRequest), None)
    assert count == len(prepared.prompt)
    for wrong, field in (
        (given | {"images": [sizes[0], sizes[1] | {"width": 3}]}, "images[1].width"),
        ({"messages": showing("0" * 64)["messages"]}, f"{SHOWN}.image.sha256"),
    ):
        with pytest.raises(PlanError) as error:
            it.validate(codec.convert(wrong, Validate))
        assert error.value.field == field


def test_thousands_of_images_are_refused_at_once() -> None:
    """The I/O thread checks them: its time must not grow with the square of their number."""
    count, data = 20_000, {"format": "png", "data": b""}
    table = asked(*({"id": f"{i}", **data} for i in range(count)))
    request = codec.convert(table, PlanRequest)
    began = time.process_time()
    validation.check(request)
    assert time.process_time() - began < 2, "it would take seven seconds"
    with pytest.raises(PlanError) as error:
        MockBackend(CONFIG).read_images(request)
    assert error.value.field == "images"


def test_what_was_sent_long_ago_is_forgotten() -> None:
    kept, pictures = (
        RecentPictures(2 * 256 * 256 * 3),
        [Picture(frame(i, 256, 256)) for i in range(3)],
    )
    assert [kept.add("", p) for p in (*pictures[:2], pictures[0], pictures[2])] == [
        True, True, False, True,
    ]  # fmt: skip
    found = [kept.find("", p.digest.hex()) for p in pictures]
    assert found == [pictures[0], None, pictures[2]]


def test_a_mock_says_what_it_was_sent() -> None:
    mock, pixels = MockBackend(ServeConfig(thinking="off")), frame(3, 288, 256)
    table = asked(raw("front", pixels), raw('"\\', frame(4, 640, 480)))
    plain, first, second = (planned(mock, t) for t in (asked(), table, table))
    assert first.plan
    assert plain.plan
    digest = Picture(pixels).digest.hex()
    assert f'2 images (front 288x256 sha256 {digest[:16]}; "\\ 640x480' in first.plan["goal"]
    assert (first.text, first.plan["steps"]) == (second.text, plain.plan["steps"])
    assert first.images
    assert second.images
    assert first.images[0].sha256 == digest
    assert [i.tokens for i in first.images] == [72, 300]
    assert first.usage.prompt_tokens == plain.usage.prompt_tokens + 372
    assert [i.cached for i in (*first.images, *second.images)] == [False, False, True, True]


def test_without_the_decoder_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    file = {"id": "a", "format": "png", "data": b"\x89PNG\r\n\x1a\n"}
    with pytest.raises(PlanError, match="thor-dflash.images") as error:
        planned(MockBackend(CONFIG), asked(file))
    assert error.value.field == "images[0].format"
    planned(MockBackend(CONFIG), asked(raw("a", frame(1, 256, 256))))


def test_a_package_without_a_tower_refuses_images() -> None:
    request = codec.convert(asked(raw("a", frame(1))), PlanRequest)
    with pytest.raises(PlanError) as error:
        read_pictures(request, None, RecentPictures(), "")
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


def test_deadlines_count_the_tower_until_it_has_run(backend: SessionBackend) -> None:
    backend.rates.cycle(10.0, 4, thinking=True)
    for size in seeing_session().manifest.image_patches:
        backend.rates.encoded(5000.0, size)
    request = codec.convert(asked(raw("a", frame(78)), thinking="auto"), PlanRequest)
    text = codec.convert(asked(thinking="auto"), PlanRequest)
    backend.config = ServeConfig(thinking="auto", thinking_budget=8, max_tokens=12)

    def prepared(what: PlanRequest) -> tuple[bool, float]:
        found = backend.prepare(what, 4000.0)
        return found.thinks, found.min_ms

    assert prepared(text)[0]
    thinks, least = prepared(request)
    assert (thinks, least > 5000) == (False, True)
    planned(backend, asked(raw("a", frame(78))))
    thinks, least = prepared(request)
    assert (thinks, least < 4000) == (True, True)


def test_the_tower_runs_before_the_server_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    session = seeing_session()
    model, encode, seen = session.model, session.model.encode, list[int]()

    def noted(picture: Picture) -> Array:
        seen.append(picture.grid.patches)
        return encode(picture)

    monkeypatch.setattr(model, "encode", noted)
    times = self_test.tower_ms(session)
    assert list(times) == sorted(set(seen)) == sorted(session.manifest.image_patches)
    assert min(times.values()) > 0
    monkeypatch.setattr(model, "encode", lambda picture: np.full((1, 8), np.nan, np.float32))
    with pytest.raises(ModelFault):
        self_test.tower_ms(session)


def test_only_a_new_picture_costs_the_tower() -> None:
    session = seeing_session()
    assert session.encoder
    totals = session.encoder.totals
    images, hits = totals.images, totals.hits
    found = measure_image(session, (64, 64), rounds=1)
    assert (totals.images - images, totals.hits - hits) == (6, 4), "two rounds of three prompts"
    assert min(astuple(found.times)) > 0
    assert found.grid.tokens == 4
    with pytest.raises(ConfigError, match="--image"):
        measure_image(session, (4, 64))


def test_a_server_and_the_doctor_say_that_it_sees(backend: SessionBackend) -> None:
    assert "images" in backend.about.features
    assert "sees images" in doctor.read(seeing_package())[1].text


@pytest.mark.parametrize("how", [codec.JSON, codec.MSGPACK], ids=lambda how: how.name)
def test_clients_send_the_bytes(how: codec.Codec) -> None:
    table = asked(raw("a", frame(1)))
    request = how.decode(how.encode(table), PlanRequest)
    sent = how.decode(encode(request, Options(codec=how)).body, PlanRequest)
    assert sent.images == request.images
