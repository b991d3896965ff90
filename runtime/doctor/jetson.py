"""Checks of a Jetson's release, power mode and clocks, and of any machine's memory and disk."""

from __future__ import annotations

import re
from collections.abc import Iterator

from thor_dflash.core.progress import amount
from thor_dflash.runtime.doctor.facts import Cuda, Finding, missing
from thor_dflash.runtime.doctor.local_machine import LocalMachine
from thor_dflash.runtime.engines.cuda.tuning_record import POWER_MODE

RELEASE = "etc/nv_tegra_release"
JETPACKS = {(38, 2): "7.0", (38, 4): "7.1", (39, 2): "7.2"}
"""L4T release -> JetPack. Source: NVIDIA's JetPack archive."""
FIRST = 38
"""First L4T that runs on Thor."""
DEVFREQ = "sys/class/devfreq"
CLOCKS = {"GPU": "gpu", "EMC": "bwmgr"}
"""Clock -> part of the name of its devfreq device."""
CUBINS = 256 << 20
"""Disk space required for compiled kernels, bytes: more than those of one package take."""
DROP_CACHES = "sync && echo 3 | sudo tee /proc/sys/vm/drop_caches"


def is_jetson(machine: LocalMachine) -> bool:
    """Whether this is a Jetson."""
    return bool(machine.text(RELEASE))


def speed(machine: LocalMachine, *, on_cpu: bool = False) -> list[Finding]:
    """What determines a Jetson's speed; empty for another machine. `on_cpu`: as in `jetpack`."""
    if not is_jetson(machine):
        return []
    return [jetpack(machine, on_cpu=on_cpu), power(machine), *clocks(machine)]


def jetpack(machine: LocalMachine, *, on_cpu: bool = False) -> Finding:
    """The release: "# R38 (release), REVISION: 4.0, ...". `on_cpu`: the package to run does not use
    a device, so it runs on any release.
    """
    text = machine.text(RELEASE)
    found = re.search(r"R(\d+)[^,]*,\s*REVISION:\s*(\d+)(?:\.(\d+))?", text)
    if found is None:
        return Finding("jetpack", "warn", f"/{RELEASE} holds {text.splitlines()[0][:80]!r}")
    major, minor = int(found[1]), int(found[2])
    name = JETPACKS.get((major, minor))
    release = f"L4T {major}.{minor}.{found[3] or 0}" + (f", JetPack {name}" if name else "")
    if major < FIRST:
        text, remedy = f"{release}; Thor needs JetPack 7", "flash JetPack 7.1 or later"
        return Finding("jetpack", missing(not on_cpu), text, remedy)
    return Finding("jetpack", "ok", release)


def power(machine: LocalMachine) -> Finding:
    """The power mode."""
    output = machine.run("nvpmodel", "-q").text
    found = POWER_MODE.search(output)
    if found is None:
        text = f"nvpmodel -q printed {' '.join(output.split())[:80]!r}"
        return Finding("power mode", "warn", text, "sudo nvpmodel -q")
    if found[1].upper().startswith("MAXN"):
        return Finding("power mode", "ok", found[1])
    text = f"{found[1]}; slower than MAXN"
    return Finding("power mode", "warn", text, "sudo nvpmodel -m 0")


def clocks(machine: LocalMachine) -> Iterator[Finding]:
    """Whether GPU and memory clocks are held at their maximum."""
    shown = _shown(machine)
    for what in CLOCKS:
        item = f"{what} clock"
        if what not in shown:
            yield Finding(item, "warn", "cannot be read", "sudo jetson_clocks --show")
            continue
        low, now, high = shown[what]
        text = f"{now / 1e6:.0f} MHz of {high / 1e6:.0f}"
        if low < high:
            yield Finding(item, "warn", f"{text}, free to fall to {low / 1e6:.0f}",
                          "sudo jetson_clocks")  # fmt: skip
        else:
            yield Finding(item, "ok", f"{text}, held")


def _shown(machine: LocalMachine) -> dict[str, tuple[int, int, int]]:
    """Lowest, current and highest clock, Hz, by the kernel."""
    found: dict[str, tuple[int, int, int]] = {}
    for what, start in CLOCKS.items():
        for path in machine.paths(f"{DEVFREQ}/*{start}*"):
            words = [machine.text(f"{path}/{name}_freq") for name in ("min", "cur", "max")]
            if all(word.isdecimal() for word in words):
                low, now, high = map(int, words)
                found.setdefault(what, (low, now, high))
    return found


def available(machine: LocalMachine) -> int:
    """Bytes available to programs, the page cache included; 0 if unknown."""
    return _meminfo(machine, "MemAvailable")


def _meminfo(machine: LocalMachine, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", machine.text("proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def memory(machine: LocalMachine, cuda: Cuda) -> Iterator[Finding]:
    """Memory of the machine, and how much of it a board's driver does not offer."""
    free = available(machine)
    text = f"{free / 1e9:.1f} GB available of {_meminfo(machine, 'MemTotal') / 1e9:.1f}"
    cached = [gpu for gpu in cuda.devices if gpu.integrated and gpu.free < 0.8 * free]
    if cached:
        text += f", of which the CUDA driver offers {cached[0].free / 1e9:.1f}: it counts the page "
        yield Finding("memory", "warn", text + "cache as used", DROP_CACHES)
    else:
        yield Finding("memory", "ok", text)


def disk(machine: LocalMachine, cubins: str, *, needed: bool) -> Finding:
    """Disk space for compiled kernels. `needed`: the package to run has such kernels."""
    free, held, state = machine.space(cubins), machine.kernels(cubins), missing(needed)
    remedy = "thor-dflash generate --set engine.cubins=DIR ..."
    if held < 0:
        return Finding("cubins", state, f"{cubins} is not a directory that can be read", remedy)
    text = f"{free / 1e9:.1f} GB free for {cubins}"
    if free < 0:
        text = f"{cubins} cannot be written"
    elif free < CUBINS:
        text, remedy = f"{text}; {CUBINS / 1e6:.0f} MB are needed", f"df -h {cubins}"
    else:
        return Finding("cubins", "ok", text)
    if held:  # perhaps all that are needed, made elsewhere
        return Finding("cubins", "ok", f"{text}; it holds {amount(held, 'kernels')}")
    return Finding("cubins", state, text, remedy)
