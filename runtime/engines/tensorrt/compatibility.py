"""Checks from its description whether an engine can run here, before TensorRT loads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from thor_dflash.core.errors import EngineError
from thor_dflash.package.manifest import FileEntry
from thor_dflash.package.trt_engine import EngineDescription

REBUILD = "build the package here with `thor-dflash build --force`"


@dataclass(frozen=True, slots=True)
class RuntimeFacts:
    """The machine this runs on."""

    tensorrt: str
    """Version of the bindings, which is that of the library."""
    device: str
    capability: tuple[int, int]
    multiprocessors: int
    kernels: str
    """`plugins.tensorrt.node.fingerprint()`."""


def check(plan: EngineDescription, here: RuntimeFacts, file: FileEntry | None) -> None:
    """Refuse an engine made for another machine, version or build.

    Args:
        plan: The engine's description.
        here: This machine.
        file: The manifest's entry for the engine file, whose hash has been checked.

    Raises:
        EngineError: there are mismatches; lists all of them and what to do.
    """
    problems = [*_build(plan, here), *_machine(plan, here)]
    if file is None or file.sha256 != plan.sha256:
        problems.append(
            f"{plan.file} must be the engine that the package describes "
            f"(got {'none' if file is None else file.sha256[:12]}, not {plan.sha256[:12]})"
        )
    if problems:
        raise EngineError(f"{plan.name}: {'; '.join(problems)}; {REBUILD}")


def _build(plan: EngineDescription, here: RuntimeFacts) -> Iterator[str]:
    made = plan.made
    if made.tensorrt != here.tensorrt:
        yield (
            f"TensorRT must be {made.tensorrt}, which the engine was built with "
            f"(got {here.tensorrt})"
        )
    if made.kernels != here.kernels:
        yield (
            "the kernels of thor-dflash must be those the engine was built with, "
            f"{made.kernels[:12]} (got {here.kernels[:12]})"
        )


def _machine(plan: EngineDescription, here: RuntimeFacts) -> Iterator[str]:
    made = plan.made
    if made.capability != here.capability:
        wanted, got = _dotted(made.capability), _dotted(here.capability)
        yield f"compute capability must be {wanted} (got {got})"
    elif made.device != here.device:
        yield f"the device must be {made.device} (got {here.device})"
    elif made.multiprocessors != here.multiprocessors:
        yield (
            f"{made.device} must have {made.multiprocessors} multiprocessors "
            f"(got {here.multiprocessors}; a power mode may switch some off)"
        )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
