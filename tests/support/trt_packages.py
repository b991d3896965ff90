"""Turns a package for the CUDA engine into one for the TensorRT engine.

TensorRT is replaced by a stand-in, whose engine files are the programs themselves.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from thor_dflash.builders.tensorrt.deployment_graph import deploy
from thor_dflash.package import launch_program as programs
from thor_dflash.package import manifest as package_manifest
from thor_dflash.package import trt_engine as sidecar
from thor_dflash.package.launch_program import Program
from thor_dflash.package.manifest import Manifest, hash_file
from thor_dflash.package.trt_engine import BuildEnvironment, EngineDescription, PluginCall
from thor_dflash.runtime.engines.tensorrt.compatibility import RuntimeFacts


def planned(out: Path, here: RuntimeFacts) -> Path:
    """Convert the package `out` in place; engines are recorded as built on the machine `here`."""
    found = package_manifest.read(out)
    files = dict(found.files)
    for path in sorted(out.glob(f"*{programs.ENDING}")):
        program = programs.read(out, path.name.removesuffix(programs.ENDING))
        engine = out / f"{program.name}.plan"
        path.rename(engine)
        description = out / f"{program.name}{sidecar.ENDING}"
        description.write_text(sidecar.render(describe(program, engine, here)))
        del files[path.name]
        files |= {p.name: hash_file(p) for p in (engine, description)}
    write(out, replace(found, engine="tensorrt", files=files))
    return out


def describe(program: Program, engine: Path, here: RuntimeFacts) -> EngineDescription:
    """The description (sidecar file) of an engine."""
    deployed = deploy(program)
    return EngineDescription(
        name=program.name,
        file=engine.name,
        sha256=hash_file(engine).sha256,
        profile=0,
        inputs=deployed.inputs,
        outputs=deployed.outputs,
        weights=deployed.weights,
        in_place=deployed.in_place,
        nodes=tuple(
            PluginCall(name=name, op=node.op, fields=node.fields())
            for name, node in deployed.plugins
        ),
        made=made_of(here),
    )


def made_of(here: RuntimeFacts) -> BuildEnvironment:
    """The versions and device that the description of an engine built on this machine records."""
    return BuildEnvironment(
        tensorrt=here.tensorrt,
        capability=here.capability,
        device=here.device,
        multiprocessors=here.multiprocessors,
        kernels=here.kernels,
    )


def write(out: Path, manifest: Manifest) -> None:
    """Write the package's manifest."""
    (out / package_manifest.NAME).write_text(package_manifest.render(manifest))
