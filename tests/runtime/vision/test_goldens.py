"""Images through the whole runtime equal transformers: patches, tower, positions, logits.

goldens/images/README.md tells how the goldens are made.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.checkpoints import GEOMETRIES, read_safetensors, write_target

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.session import Session, open_session
from thor_dflash.runtime.vision.decoder import RawSize, read_picture
from thor_dflash.runtime.vision.picture import Picture, PixelLimits
from thor_dflash.runtime.vision.prompt_images import PromptImages

GOLDEN = Path(__file__).parents[2] / "goldens" / "images" / "seeing.f32.npz"
SAME = 1e-4
"""Largest difference from transformers, relative to its largest value."""
CHUNK = 16
BLOCK = 16


@pytest.fixture(scope="module")
def want() -> dict[str, NDArray[Any]]:
    with np.load(GOLDEN) as file:
        return dict(file)


@pytest.fixture(scope="module")
def session(want: dict[str, NDArray[Any]], tmp_path_factory: pytest.TempPathFactory) -> Session:
    held = tmp_path_factory.mktemp("seeing")
    target = write_target(held / "target", GEOMETRIES["seeing"], int(want["seed"]), "f32")
    config = BuildConfig(capacity=384, chunk=CHUNK, block=BLOCK)
    build(target, None, held / "package", config, Silent())
    return open_session(held / "package", EngineConfig(threads=1), Silent())


@pytest.fixture(scope="module")
def pictures(want: dict[str, NDArray[Any]], session: Session) -> list[Picture]:
    vision = session.manifest.vision
    assert vision is not None
    found: list[Picture] = []
    for i in range(len(want["grids"])):
        pixels = want[f"picture{i}"]
        height, width, _ = pixels.shape
        size = RawSize(width=width, height=height)
        limits = PixelLimits(vision.shortest, vision.longest)
        found.append(read_picture(pixels.tobytes(), "rgb8", limits, size))
    return found


def placed(session: Session, prompt: NDArray[Any], pictures: list[Picture]) -> PromptImages:
    """The golden's prompt, with one mark per picture as a template writes it."""
    token = 241
    once = [int(t) for i, t in enumerate(prompt) if not (i and t == token == prompt[i - 1])]
    images = session.images(once, pictures)
    assert images is not None
    return images


def distance(got: NDArray[Any], want: NDArray[Any]) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def test_the_checkpoint_is_the_goldens(want: dict[str, NDArray[Any]], tmp_path: Path) -> None:
    target = write_target(tmp_path, GEOMETRIES["seeing"], int(want["seed"]), "f32")
    stored = {n: w for f in target.glob("*.safetensors") for n, w in read_safetensors(f).items()}
    sums = [np.abs(w.astype(np.float64)).sum() for n, w in sorted(stored.items()) if n[:3] != "mtp"]
    assert sum(sums) == want["fingerprint"]


def test_patches_are_those_of_transformers(
    want: dict[str, NDArray[Any]], pictures: list[Picture]
) -> None:
    grids = [[picture.grid.rows, picture.grid.columns] for picture in pictures]
    assert grids == want["grids"].tolist()
    digests = [hashlib.sha256(picture.patches().tobytes()).hexdigest() for picture in pictures]
    assert digests == want["patches"].tolist()


def test_the_tower_is_transformers(
    want: dict[str, NDArray[Any]], session: Session, pictures: list[Picture]
) -> None:
    rows = np.concatenate([session.model.encode(picture) for picture in pictures])
    assert distance(rows, want["rows"]) < SAME


def test_positions_are_transformers(
    want: dict[str, NDArray[Any]], session: Session, pictures: list[Picture]
) -> None:
    images = placed(session, want["prompt"], pictures)
    np.testing.assert_array_equal(images.positions, want["positions"])
    assert images.shift == want["positions"].max() + 1 - len(want["prompt"])


def test_logits_behind_images_are_transformers(
    want: dict[str, NDArray[Any]], session: Session, pictures: list[Picture]
) -> None:
    """The prompt is prefilled in steps that end inside images, the text is read by verify."""
    images = placed(session, want["prompt"], pictures)
    logits = text_logits(session, images, len(want["logits"]))
    assert distance(logits, want["logits"]) < SAME


def text_logits(session: Session, images: PromptImages, rows: int) -> NDArray[Any]:
    """Logits of the last rows of a prompt; all but `rows` of it are prefilled."""
    model, prompt = session.model, images.prompt
    model.state.reset()
    model.write_images(images)
    for start in range(0, len(prompt) - rows, CHUNK):
        part = prompt[start : min(start + CHUNK, len(prompt) - rows)]
        for number in images.missing(part):
            session.encoder.read(images, number, model.encode)
        model.prefill(part, observe=False)
    found: list[NDArray[Any]] = []
    while model.state.length < len(prompt):
        part = prompt[model.state.length : model.state.length + BLOCK]
        model.write_tokens(part)
        model.verify()
        found.append(model.read("logits")[: len(part)])
        model.state.commit(len(part))
    return np.concatenate(found)
