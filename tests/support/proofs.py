"""Freezes what this tree does, and compares two such records: proof that a change is harmless.

    python tests/support/proofs.py write OUT.json [--only package,help,wire,tokens,cubins,bench]
    python tests/support/proofs.py compare BEFORE.json AFTER.json

`write` makes every proof but `bench`, which needs a GPU and must be named; OUT.json keeps what it
has of other proofs. `compare` prints each difference by name, and returns 1 if one matters: bytes
whose normalised form is equal do not, nor do times.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from difflib import unified_diff
from pathlib import Path
from struct import unpack_from
from tempfile import TemporaryDirectory
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import thor_dflash
from thor_dflash.cli.main import main as command_line

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "models" / "planner-nano"
CLI = ("env", "COLUMNS=100", f"PYTHONPATH={ROOT}", sys.executable, __file__, "cli")
THREADS, PATIENCE_S, ABSENT = 2, 120, "(absent)"
VOLATILE = re.compile(r".*_(ms|s|mb|mhz)|tok_s|version|package_sha256|device|percentiles|energy_j")
"""Fields of replies that differ from run to run, with all that they hold."""
REQUESTS = r"""
hello |
ping | | "x_robot": {"arm": 1} | "token": "none is needed" | "v": 2 | "id": "" | "id": ["1"]
health |
drop | | "op": 5
plan | "thinking": "off" | "thinking": "off", "max_tokens": 20 | "stream": "text", "id": "a"
plan | "stream": "steps", "json_schema": SCHEMA | "thinking_budget": 9, "max_tokens": 5
plan | WHOLE, "stream": "all", "return": ["thinking", "tokens", "timings"]
plan | WHOLE, "stream": "steps", "accept_mode": "relaxed_thinking"
plan | "metadata": {"a": [1, null]}, "deadline_ms": 900000
plan | "deadline_ms": 100, "on_deadline": "error", "max_tokens": 300
plan | "session": "arm", "generation": 5, "max_tokens": 5 | "session": "arm", "generation": 4
prefix.put | "prefix_id": "p", "system": SYSTEM | "prefix_id": "q", "system": "x", "persist": true
prefix.list |
plan | TASK, "prefix_id": "p", "thinking": "off" | "prefix_id": "r"
prefix.drop | "prefix_id": "p" | "prefix_id": "q" | "prefix_id": "q" | "prefix_id": 5
validate | TASK, "json_schema": SCHEMA | "prompt": "x", "messages": [] | "prompt": " "
validate | "json_schema": {"type": 5} | "json_schema": {"type": "array"} | "json_schema": []
validate | "json_schema": {"properties": {"a": {"unevaluatedItems": false, "format": "idn"}}}
cancel | "target": "nobody" |
plan | "prompt": null | "prompt": 5 | "messages": [] | "id": 5 | "priority": 10 | "preempt": null
plan | "max_token": 5 | "max_tokens": 99999 | "stream": true | "stream": "some" | "stop": ["a"]
plan | "json_schema": {"properties": 5} | "response_format": {"type": "x"} | "return": ["all"]
plan | "messages": [{"role": "robot"}] | "messages": [{}] | TASK, "prompt": "x"
@ping | | "data": [] | "options": null | "endpoint": ["ping"] | "endpoint": "kill"
@health | "data": null
@plan | "data": {"prompt": "Bring it.", "thinking": "off"}, "api_token": "none is needed"
@plan | "data": {"prompt": "x", "stream": "steps"} | "data": {"prompt": "x", "max_token": 5}
stats |
"""
"""Lines of an operation (@: of GR00T's dialect) and fields, sent in JSON and in msgpack."""
SCHEMA = '{"type": "object", "properties": {"goal": {"type": "string", "maxLength": 9}}}'
RAW = (
    b"", b"[]", b"{", b"\xff", b"\x81\xa2op", b"\x81\xa2op\xc4\x04ping", b"\x81\x05\x05",
    b"\x82\xa2op\xa4ping\xa2id\xd4\x01\x02", b'{"op": "ping", "id": "\\ud800"}',
    b'{"op": "ping", "v": 1.0}', b'{"op": "plan", "prompt": "x", "max_tokens": 2e0}',
    b'{"op": "plan", "prompt": "x", "metadata": {"a": ' + 99 * b"[" + 99 * b"]" + b"}}",
    b'{"op": "drain"}', b'{"op": "plan", "prompt": "x"}', b'{"op": "shutdown"}',
)  # fmt: skip
"""Bodies sent as they are; the last three end a server."""


def sha(data: bytes | str) -> str:
    """Return a hash, short enough to read."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:24]


def called(*arguments: object) -> str:
    """Run the command line in a new process; return what it prints."""
    command = [*CLI, *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def build(where: Path) -> None:
    """Build planner-nano, and a package of the 27B without weights."""
    from thor_dflash.builders.synthetic import write_synthetic
    from thor_dflash.config.build import BuildConfig

    source = ("--target", NANO / "target", "--drafter", NANO / "drafter")
    for engine in ("ort", "cuda"):
        called("build", "--engine", engine, *source, "--out", where / engine)
    (where / "27b").mkdir()
    write_synthetic("qwen3.6-27b", where / "27b", BuildConfig(engine="cuda"), (1, 32))


def package(where: Path) -> dict[str, Any]:
    """Return the hash of every file of the packages, and that of its normalised form: without the
    format's version, with one key for operators, a manifest without the hashes of such files.
    """
    record: dict[str, Any] = {}
    for path in sorted(where.glob("*/**/*.*")):
        exact = normalised = path.read_bytes()
        if path.name.endswith(".program.json"):
            table = json.loads(exact)
            steps = table["steps"]
            table = {k: v for k, v in table.items() if k not in ("format", "version")}
            normalised = json.dumps({**table, "steps": steps}).encode()
        elif path.name == "manifest.toml":
            exact = re.sub(rb"\A# .*\n|^created = .*\n", b"", exact, flags=re.MULTILINE)
            table = tomllib.loads(exact.decode()) | {"format": 0}
            table["files"] |= {n: 0 for n in table["files"] if n.endswith(".program.json")}
            normalised = json.dumps(table).encode()
        both = {"exact": sha(exact), "normalised": sha(normalised)}
        record[path.relative_to(where).as_posix()] = both
    return record


def launches(where: Path, device: Any) -> Iterator[tuple[str, Path, Any]]:
    """Return operator, source and launch of what the packages, and other kinds of weights, need."""
    from support.kernel_runner import packed, site_of
    from support.sites_27b import sites

    from thor_dflash.core.tensors import DType
    from thor_dflash.plugins import OPS
    from thor_dflash.plugins.contract import Attributes
    from thor_dflash.plugins.launch import CallSite, Shaped
    from thor_dflash.plugins.registry import KERNELS

    calls = [(o.name, packed(site_of(o, a, x), {})[0]) for o in OPS for _, a, x in sites(o.name)]
    for path in where.rglob("*.program.json"):
        program, shapes = json.loads(path.read_text(encoding="utf-8")), dict[str, Shaped]()
        for table in ("weights", "values", "inputs", "outputs"):
            for name, value in program[table].items():
                shape = tuple(33280 if isinstance(n, str) else n for n in value["shape"])
                shapes[name] = Shaped(DType(value["dtype"]), shape)
        for step in program["steps"]:
            ports = {port: shapes[name] for port, name in step["ports"].items()}
            calls.append(
                (
                    step["op"],
                    CallSite(KERNELS[step["op"]].op, Attributes(step["attributes"]), ports),
                )
            )
    for op, site in calls:
        for launch in KERNELS[op].launches(site, device):
            yield op, KERNELS[op].source(launch).resolve(), launch


def machine_code(image: bytes) -> Iterator[str]:
    """Return the instructions of a cubin, which also holds the names of types and constants."""
    table, size, count = *unpack_from("<Q", image, 40), *unpack_from("<HH", image, 58)
    for i in range(count):
        _, _, flags, _, start, nbytes = unpack_from("<IIQQQQ", image, table + i * size)
        if flags & 4:  # SHF_EXECINSTR
            yield sha(image[start : start + nbytes])


def cubins(where: Path) -> dict[str, Any]:
    """Return the hashes of cubins by operator, kernel and constants, and how many have each."""
    from support.kernel_usage import reported

    from thor_dflash.plugins.cuda import compile as compiler
    from thor_dflash.plugins.launch import H100, THOR

    def compiled(source: Path, defines: Any, arch: str) -> tuple[list[str], dict[str, str]]:
        made = compiler.compile_source(source, dict(defines), arch)
        usage = reported(made.log)
        code = sorted(machine_code(made.image)), sorted(map(astuple, usage.values()))
        return [*usage], {"exact": sha(made.image), "normalised": sha(repr(code))}

    record: dict[str, Any] = {}
    for device, arch in ((H100, "sm_90"), (THOR, "sm_110")):
        names: dict[tuple[Path, Any, str], set[str]] = {}
        for op, source, launch in launches(where, device):
            defines = tuple(sorted(launch.defines.items()))
            name = " ".join((op, launch.kernel, *(f"{k}={v}" for k, v in defines)))
            names.setdefault((source, defines, arch), set()).add(name)
        other = {path.resolve() for path in compiler.ROOT.rglob("*.cu")} - {n[0] for n in names}
        names |= {(source, (), arch): set() for source in other}  # those of measurements
        with ThreadPoolExecutor(THREADS) as pool:
            made = [*pool.map(compiled, *zip(*names, strict=True))]
        named = zip(names.values(), made, strict=True)
        record[arch] = {"by name": {n: both for keys, (own, both) in named for n in keys or own}}
        for kind in ("exact", "normalised"):
            record[arch][f"all, {kind}"] = Counter(sorted(both[kind] for _, both in made))
    return record


def help_texts(where: Path) -> dict[str, str]:
    """Return the help of the command line, and of each of its subcommands."""
    top = called("--help")
    verbs = re.findall(r"^    ([a-z]+)\b", top, re.MULTILINE)
    return {"": top} | {verb: called(verb, "--help") for verb in verbs}


def requests() -> Iterator[tuple[str, list[bytes]]]:
    """Return the bodies to send, with names; those of one name at once."""
    import msgspec

    task = json.loads((NANO / "heldout.jsonl").read_text(encoding="utf-8").split("\n")[0])
    given = {"SCHEMA": SCHEMA, "SYSTEM": json.dumps(task["messages"][0]["content"])}
    given["TASK"] = f'"messages": {json.dumps(task["messages"])}'
    given["WHOLE"] = given["TASK"] + ', "thinking_budget": 200, "max_tokens": 400'
    every: list[tuple[dict[str, Any], ...]] = []
    for line in REQUESTS.strip().splitlines():
        op, *others = line.split(" |")
        first = {"endpoint": op[1:]} if op[0] == "@" else {"op": op, "id": "1"}
        for other in others:
            own = json.loads(re.sub("|".join(given), lambda m: given[m[0]], f"{{{other}}}"))
            usual = {"prompt": "Bring the cup."} if op == "plan" and "messages" not in own else {}
            every.append(({**first, **usual, **own},))
    plan, cancel = {"op": "plan", "prompt": "Bring it."}, {"op": "cancel", "target": "1"}
    every += [({**plan, "id": "1"}, {**other, "id": "2"}) for other in (plan, cancel)]
    for name, encode in (("json", msgspec.json.encode), ("msgpack", msgspec.msgpack.encode)):
        for at, some in enumerate(every):
            yield f"{name} {at:02} {json.dumps(some)[1:90]}", [encode(one) for one in some]
    yield from ((f"raw {at:02} {body[:60]!r}", [body]) for at, body in enumerate(RAW))


def masked(value: Any, hidden: bool = False) -> Any:
    """Return a reply with placeholders for what differs from run to run."""
    if isinstance(value, dict):
        return {k: masked(v, hidden or bool(VOLATILE.fullmatch(k))) for k, v in value.items()}
    if isinstance(value, list):
        return [masked(one, hidden) for one in value]
    if isinstance(value, str) and not hidden:
        return re.sub(r"\b[0-9a-f]{32}\b|\b0x[0-9a-f]{9,}|\d[\d.,]*(?= ms)", "<>", value)
    return "<>" if hidden and value is not None else value


def exchanged(socket: Any, bodies: list[bytes]) -> list[Any]:
    """Send some requests at once; return all replies, those of one request after another."""
    import msgspec

    for body in bodies:
        socket.send_multipart([b"", body])
    replies: list[Any] = []
    while sum(reply.get("type") != "chunk" for reply in replies) < len(bodies):
        assert socket.poll(1000 * PATIENCE_S), f"no answer to {bodies}"
        body = socket.recv_multipart()[-1]
        codec = "json" if body.startswith(b"{") else "msgpack"
        reply = (msgspec.json if codec == "json" else msgspec.msgpack).decode(body)
        replies.append({"codec": codec, **masked(reply)})
    return sorted(replies, key=lambda reply: (str(reply.get("id")), reply.get("seq", 0)))


def wire(where: Path) -> dict[str, Any]:
    """Return the replies of a mock server and of one with planner-nano to the same requests."""
    import zmq

    record: dict[str, Any] = {}
    live = f"--package {where}/ort -s engine.threads={THREADS}"
    for kind, source in (("mock", "--mock --mock-cycle-ms 10"), ("live", live)):
        bind = f"ipc://{where}/{kind}"
        command = f"serve {source} -s serve.thinking_budget=24 -s serve.max_tokens=24"
        command += f" --allow-admin --bind {bind} --prefix-dir {where}/{kind}.kept"
        with (
            subprocess.Popen([*CLI, *command.split()], stderr=subprocess.PIPE, text=True) as server,
            zmq.Context() as context,
            context.socket(zmq.DEALER) as socket,
        ):
            try:
                assert any(" ready after " in line for line in server.stderr or ()), command
                socket.connect(bind)
                record[kind] = {name: exchanged(socket, bodies) for name, bodies in requests()}
                record[kind]["exit status"] = server.wait(PATIENCE_S)
            finally:
                server.kill()
    return record


def tokens(where: Path) -> dict[str, str]:
    """Return what planner-nano answers to the held-out tasks, and in how many cycles."""
    from thor_dflash.calib.studies.heldout import plan
    from thor_dflash.calib.studies.script import tasks
    from thor_dflash.config.engine import EngineConfig
    from thor_dflash.core.progress import Silent
    from thor_dflash.runtime.session import open_session

    record: dict[str, str] = {}
    session = open_session(where / "ort", EngineConfig(threads=THREADS), Silent())
    for task in tasks():
        done = plan(session, task, thinking=True, plain=False)
        ids, cycles = done.tokens, done.report.spec.cycles
        record[task.name] = f"{done.report.finish} {sha(repr(ids))} {len(ids)} ids {cycles} cycles"
    session.close()
    return record


def bench(where: Path) -> dict[str, float]:
    """Return the figures of the 27B with random weights on this machine's GPU."""
    shape = "bench --shape qwen3.6-27b --random-weights --engine cuda --json"
    rows = json.loads(called(*shape.split()))
    return {f"{at:03} {row['name']}, {row['unit']}": row["value"] for at, row in enumerate(rows)}


PROOFS = {"package": package, "help": help_texts, "wire": wire, "tokens": tokens,
          "cubins": cubins, "bench": bench}  # fmt: skip


def write(out: Path, names: list[str]) -> int:
    """Make proofs of this tree and add them to a file."""
    assert Path(thor_dflash.__file__).parent.parent == ROOT, "thor_dflash must be of this checkout"
    git = ("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    commit = subprocess.run(git, stdout=subprocess.PIPE, text=True).stdout.strip()
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    names.sort(key=[*PROOFS].index)
    with TemporaryDirectory() as directory:
        if {*names} - {"help", "bench"}:
            build(Path(directory))
        for name in names:
            start = time.monotonic()
            record = PROOFS[name](Path(directory))
            seconds = round(time.monotonic() - start, 1)
            print(f"{name}: {seconds} s", flush=True)
            found[name] = {"commit": commit, "seconds": seconds, "record": record}
            out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Return the parts of a record, with names."""
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    if isinstance(parts, dict) and parts and "normalised" not in parts:
        for key, part in parts.items():
            yield from leaves(part, f"{path}: {key}")
    else:
        yield path, value


def harmless(path: str, one: Any, other: Any) -> bool:
    """Whether a difference does not matter. Of cubins it is their multiset that matters, so that
    operators and kernels may get other names, and more constants.
    """
    if isinstance(one, dict) and isinstance(other, dict) and "normalised" in one:
        return bool(one["normalised"] == other.get("normalised"))
    renamed = path.startswith("cubins") and "by name" in path and ABSENT in (one, other)
    return renamed or "all, exact" in path or path.startswith("bench")


def shown(one: Any, other: Any) -> str:
    """Return a difference as text: of numbers with their ratio, of a text those of its lines."""
    if isinstance(one, float) and isinstance(other, float) and one:
        return f"{one:.6g} -> {other:.6g}, {other / one:.3f}x"
    if isinstance(one, str) and isinstance(other, str) and "\n" in one:
        return "\n".join(unified_diff(one.splitlines(), other.splitlines(), lineterm="", n=0))
    return f"{one!r:.300} -> {other!r:.300}"


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print each difference of the proofs in both records; return 1 if one matters."""
    wrong = 0 if before.keys() & after.keys() else 1
    for proof in PROOFS:
        if proof not in before or proof not in after:
            print(f"{proof}: NOT COMPARED, as it is not in both")
            continue
        old, new = (dict(leaves(one[proof]["record"], proof)) for one in (before, after))
        pairs = {path: (old.get(path, ABSENT), new.get(path, ABSENT)) for path in old | new}
        differ = {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}
        for path, pair in (pairs if proof == "bench" else differ).items():
            fine = harmless(path, *pair)
            print("  " if fine else "! ", path, ": ", shown(*pair), sep="")
            wrong += not fine
        print(f"{proof}: {len(differ)} of {len(pairs)} differ")
    print(f"differences that matter: {wrong}")
    return min(wrong, 1)


def main(arguments: list[str]) -> int:
    """Run a command; `cli` is the project's own command line, for this script itself."""
    match arguments:
        case ["cli", *others]:
            return command_line(others)
        case ["write", out, *only] if not only or (only[0] == "--only" and len(only) == 2):
            usual = [name for name in PROOFS if name != "bench"]
            return write(Path(out), only[1].split(",") if only else usual)
        case ["compare", before, after]:
            return compare(*(json.loads(Path(name).read_bytes()) for name in (before, after)))
        case _:
            print(__doc__)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
