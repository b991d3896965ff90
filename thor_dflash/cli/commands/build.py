"""`thor-dflash build`: makes a package from a target and a drafter checkpoint."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from thor_dflash.cli import option_checks
from thor_dflash.config.build import MTP, BuildConfig
from thor_dflash.config.tree import Config
from thor_dflash.core.errors import CheckpointError, ConfigError, PackageError, RequestError
from thor_dflash.core.message_text import show, visible
from thor_dflash.core.progress import Progress, amount
from thor_dflash.core.text_table import columns
from thor_dflash.package.tokenizer_files import (
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    content,
    generation_stops,
    read_json,
    tokenizer_files,
)

if TYPE_CHECKING:
    from thor_dflash.package.manifest import Manifest
    from thor_dflash.runtime.text.tokenizer import Tokenizer

GREETING = "Hello"
NAMED = 8
"""Skipped tensors named in the summary; the manifest names all."""


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Build the package and print its contents.

    Raises:
        ConfigError: the command line sets a key that has no effect on this build.
    """
    from thor_dflash.core.extras import extra

    with extra("build"):
        from thor_dflash.builders.build import build
        from thor_dflash.builders.output.atomic_package import check_out

    _check_used(args, config.build)
    check_out(args.out)  # before the checkpoints are read
    earlier = _earlier(args.out)
    if earlier and not args.force:
        raise ConfigError(f"--out must be a new directory, or go with --force (got {earlier})")
    chats = _chats(args.target)
    drafter: Path | Literal["mtp"] | None = "mtp" if args.drafter == Path(MTP) else args.drafter
    manifest = build(args.target, drafter, args.out, config.build, progress)
    progress.close()
    print(f"{args.out}: {_headline(manifest)}")
    if earlier:
        print(f"replaced {earlier}")
    print(table(manifest))
    if not manifest.tokenizer:
        print(f"no {TOKENIZER} in {args.target}: the package takes and gives token ids alone")
    elif not chats:
        print(f"no chat template in {args.target}: the package answers --tokens and no chat")
    if not manifest.stop_tokens:
        print(f"no eos_token_id in {args.target}: an answer ends at max_tokens, never before")
    _print_further_stop(args.target, manifest)
    if manifest.skipped:
        named = ", ".join(manifest.skipped[:NAMED])
        more = len(manifest.skipped) - NAMED
        rest = f", and {more} more (all in manifest.toml)" if more > 0 else ""
        print(f"skipped tensors: {visible(named)}{rest}")
    if config.build.engine == "tensorrt":
        _print_findings(args.out)


def _print_findings(out: Path) -> None:
    """Say what TensorRT's inspector shows that the graphs do not have."""
    from thor_dflash.builders.tensorrt.inspection import FINDING
    from thor_dflash.builders.tensorrt.package import LOG

    lines = (out / LOG).read_text(encoding="utf-8").splitlines()
    found = [line.removeprefix(FINDING) for line in lines if line.startswith(FINDING)]
    if found:
        print(f"{len(found)} findings in the engines, all in {out / LOG}: {visible(found[0])}")


def _print_further_stop(target: Path, manifest: Manifest) -> None:
    """Say that the tokenizer's end of a turn ends an answer, if the generation config lacks it."""
    stops = generation_stops(target)
    further = [token for token in manifest.stop_tokens if token not in stops]
    if stops and further:
        name = content(read_json(target / TOKENIZER_CONFIG).get("eos_token"))
        print(
            f"an answer ends at {show(name)} ({further[0]}), the eos_token of {TOKENIZER_CONFIG}, "
            f"too: {GENERATION_CONFIG} names only {', '.join(map(str, stops))}"
        )


def _earlier(out: Path) -> str:
    """Describe the package at `out`; "" if there is none."""
    from thor_dflash.package import manifest

    if not manifest.is_package(out):
        return ""
    try:
        found = manifest.read(out)
    except PackageError:
        return f"{out}, a package of another version or a damaged one"
    of = found.sources["target"].directory
    return f"{out}, a package of {found.name or of} of {found.created}: {_headline(found)}"


def _check_used(args: Namespace, config: BuildConfig) -> None:
    option_checks.refuse_tensorrt(args.set, config.engine)
    for key, _ in option_checks.items(args.set):
        if key == "build.draft_ids" and args.drafter is None and config.draft_ids:
            raise ConfigError(f"{key} must go with --drafter (got none)")
        if key == "build.drafts" and args.drafter != Path(MTP):
            raise ConfigError(f"{key} must go with --drafter mtp (got {args.drafter or 'none'})")


def _chats(target: Path) -> bool:
    """Whether a checkpoint has a tokenizer and a chat template.

    Raises:
        PackageError: a session could not read them.
        CheckpointError: the template cannot render a chat.
    """
    from thor_dflash.runtime.text.tokenizer import Tokenizer

    if not tokenizer_files(target):
        return False
    text = Tokenizer.load(target)
    if text.chats:
        for thinking in (True, False):
            _render(text, target, thinking)
    return text.chats


def _render(text: Tokenizer, target: Path, thinking: bool) -> None:
    rule = f"{target}: the chat template must render the message of a user"
    try:
        prompt = text.render([{"role": "user", "content": GREETING}], thinking)
    except RequestError as e:
        raise CheckpointError(f"{rule} (got: {e})") from e
    if GREETING not in prompt:
        raise CheckpointError(f"{rule} (got {show(prompt)} of {show(GREETING)})")


def _headline(manifest: Manifest) -> str:
    size = sum(entry.bytes for entry in manifest.files.values())
    layers = len(manifest.drafter.layers) if manifest.drafter else 0
    drafter = f"drafter of {layers} layers" if layers else "no drafter"
    if manifest.own_drafter == MTP:
        drafter = f"MTP layer, {manifest.drafter.block - 1 if manifest.drafter else 0} drafts"
    return (
        f"{len(manifest.target.layers)} layers, {drafter}, block {manifest.block}, "
        f"engine {manifest.engine}, {len(manifest.files)} files, {amount(size, 'bytes')}"
    )


def table(manifest: Manifest) -> str:
    """Precision and size of every tensor class, aligned."""
    rows = [("tensors", "stored as", "count", "size")]
    for name, kinds in sorted(manifest.quantisation.items()):
        for kind, share in sorted(kinds.items()):
            rows.append((name, kind, str(share.count), amount(share.bytes, "bytes")))
    return "\n".join(columns(rows, left=2, indent="  "))
