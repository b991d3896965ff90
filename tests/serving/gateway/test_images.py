"""Images in OpenAI's requests: sent on as bytes, read from one directory, never fetched."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.gateway.openai_api import NOBODY, Caller, plan_request, read
from thor_dflash.serving.gateway.replies import error
from thor_dflash.serving.protocol.errors import bad_request
from thor_dflash.serving.protocol.messages import PlanRequest


def asks(caller: Caller = NOBODY, **fields: Any) -> PlanRequest:
    """What a server is asked for by a body."""
    return plan_request(read(json.dumps(fields).encode()), caller)


def fault(caller: Caller = NOBODY, **fields: Any) -> str | None:
    """The field at fault in a body that is refused."""
    with pytest.raises(PlanError) as caught:
        asks(caller, **fields)
    assert caught.value.code == "bad_request"
    return caught.value.field


PNG = "data:image/png;base64,iVBORw0KGgo="


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def shown(*parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [{"type": "text", "text": "See."}, *parts]}]}


def test_images_are_sent_as_bytes_in_their_order() -> None:
    plan = asks(**shown(image(PNG), image("data:image/jpg;base64,/9j/", detail="low")))
    assert plan.messages
    content = plan.messages[0].content
    assert [getattr(part, "image", "text") for part in content] == ["text", "image0", "image1"]
    assert [i.format for i in plan.images] == ["png", "jpeg"]
    assert plan.images[0].data == b"\x89PNG\r\n\x1a\n"
    assert [i.max_pixels for i in plan.images] == [0, 1 << 18]


@pytest.mark.parametrize(
    "url",
    ["http://a/b.png", "https://a/b.png", "ftp://a/b.png", "/etc/passwd", "file:///etc/passwd",
     "data:image/gif;base64,AAAA", "data:text/html;base64,AAAA", "data:image/png;base64,A",
     "data:image/png;base64,\u00e9", ""],
)  # fmt: skip
def test_nothing_is_fetched(url: str) -> None:
    assert fault(**shown(image(url))) == "messages[0].content[1].image_url"


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_only_users_show_images(role: str) -> None:
    field = "messages[0].content[1].image_url"
    assert fault(**shown(image(PNG), role=role)) == field


def test_files_come_from_below_one_directory(tmp_path: Path) -> None:
    root = tmp_path / "shown"
    (root / "in").mkdir(parents=True)
    (root / "in/a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "linked").symlink_to(tmp_path)
    (root / "folder.png").mkdir()
    os.mkfifo(root / "pipe.png")
    (root / "a.txt").write_bytes(b"x")
    caller = Caller(image_dir=str(root))

    assert (
        asks(caller, **shown(image(f"file://{root}/in/a.png")))
        .images[0]
        .data.startswith(b"\x89PNG")
    )
    for name in (
        "link.png", "linked/secret.png", "../secret.png", "in/../../secret.png", "folder.png",
        "pipe.png", "a.txt", "none.png", "%2e%2e/secret.png", "",
    ):  # fmt: skip
        field = fault(caller, **shown(image(f"file://{root}/{name}")))
        assert field == "messages[0].content[1].image_url", name


def test_a_server_s_refusal_names_the_image_as_it_was_sent() -> None:
    chat = read(json.dumps(shown(image(PNG), {"type": "text", "text": "x"}, image(PNG))).encode())
    sent = error(bad_request("images[1].data must be a png file", "images[1].data"), chat)["error"]
    assert sent["param"] == "messages[0].content[3].image_url"
    assert sent["message"].startswith(sent["param"])
