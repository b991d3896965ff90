"""`thor-dflash quantize`: makes an NVFP4 and FP8 checkpoint of a BF16 one."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from thor_dflash.config.tree import Config
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.progress import Progress, amount

if TYPE_CHECKING:
    from thor_dflash.calib.quantize.checkpoint import QuantizeReport
    from thor_dflash.calib.quantize.plan import QuantizePlan

NAMED = 4
"""Linears named in a note; quantization_report.json names all."""


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Print the plan; without --plan, then write the checkpoint.

    Raises:
        ConfigError: --out is missing, cannot be written, or its disk is too small.
    """
    from thor_dflash.core.extras import extra

    with extra("build"):
        from thor_dflash.calib.quantize import checkpoint, plan_report
        from thor_dflash.calib.quantize.plan import make_plan
        from thor_dflash.calib.quantize.staged_checkpoint import check_out
        from thor_dflash.calib.quantize.statistics import read_statistics

    out: Path | None = args.out
    if out is None and not args.plan:
        raise ConfigError("--out must be given, or --plan (got neither)")
    if out is not None:
        check_out(out, args.target or args.drafter)
    with progress.task("reading headers"):
        source = checkpoint.read_source(args.target, args.drafter)
        plan = make_plan(
            source,
            config.quantize,
            from_quantised=args.from_quantised,
            statistics=read_statistics(args.statistics) if args.statistics else None,
        )
        text = plan_report.table(plan)
    report = None if args.plan or out is None else checkpoint.write(plan, out, progress)
    progress.close()
    if report is not None:
        print(f"{out}: {amount(len(plan.files), 'files')}, {amount(plan.nbytes, 'bytes')}")
    print(text)
    _print_plan_notes(plan)
    if report is not None:
        _print_report(report)


def _print_plan_notes(plan: QuantizePlan) -> None:
    from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat
    from thor_dflash.builders.checkpoint.target import TargetCheckpoint

    if plan.config.preset == "all-nvfp4" and isinstance(plan.source, TargetCheckpoint):
        print("note: GDN and attention in NVFP4 may cost quality; compare answers before use")
    scaled = plan.config.dialect != "modelopt" or plan.statistics is not None
    if not scaled and WeightFormat.FP8 in plan.kinds.values():
        print("note: vLLM wants input_scale beside modelopt's FP8, which needs --statistics")
    if plan.twice:
        print(f"note: rounded twice, the source is quantised already: {_some(plan.twice)}")
    if plan.dropped:
        print(f"note: scales of the source that are not written: {_some(plan.dropped)}")


def _print_report(report: QuantizeReport) -> None:
    if report.zero:
        print(f"note: all weights are zero: {_some(report.zero)}")
    if report.subnormal:
        print(f"note: the second scale is a subnormal number: {_some(report.subnormal)}")
    if report.flushed:
        count = sum(report.flushed.values())
        print(
            f"note: {count:,} blocks that are not zero have the smallest scale, so their values "
            f"may be lost: {_some(tuple(report.flushed))}"
        )


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f", and {more} more" if more > 0 else "")
