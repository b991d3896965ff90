"""`thor-dflash build`: two checkpoints to a package."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from thor_dflash.config import Config
from thor_dflash.progress import Progress, amount

if TYPE_CHECKING:
    from thor_dflash.manifest import Manifest

NAMED = 8
"""Skipped tensors named in the summary; the manifest names all."""


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Build the package and say what is in it."""
    from thor_dflash.extras import extra

    with extra("build"):
        from thor_dflash.builders.build import build
        from thor_dflash.builders.staging import check_out

    check_out(args.out)  # before the checkpoints are read
    manifest = build(args.target, args.drafter, args.out, config.build, progress)
    progress.close()
    print(f"{args.out}: {_headline(manifest)}")
    print(table(manifest))
    if manifest.skipped:
        named = ", ".join(manifest.skipped[:NAMED])
        more = len(manifest.skipped) - NAMED
        rest = f", and {more} more (all in manifest.toml)" if more > 0 else ""
        print(f"skipped tensors: {named}{rest}")


def _headline(manifest: Manifest) -> str:
    size = sum(entry.bytes for entry in manifest.files.values())
    layers = len(manifest.drafter.layers) if manifest.drafter else 0
    drafter = f"drafter of {layers} layers" if layers else "no drafter"
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
    wide = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        f"  {a:<{wide[0]}}  {b:<{wide[1]}}  {c:>{wide[2]}}  {d:>{wide[3]}}" for a, b, c, d in rows
    )
