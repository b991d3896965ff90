"""What quantising costs: planner-nano's BF16 twin against its quantised forms.

python -m thor_dflash.calib.studies.quality --work build/quality --tasks 60

Without --twin it makes one (calib/nano/twin.py). The reference's logits and the report of each form
stay in --work, so that a run that was stopped continues.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from thor_dflash.builders.build import build
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.calib.calibrate.calibrate import calibrate
from thor_dflash.calib.demo import MODEL
from thor_dflash.calib.documents import beginnings
from thor_dflash.calib.draft_vocab import trade
from thor_dflash.calib.draft_vocab.rollouts import Rollouts, roll_out
from thor_dflash.calib.draft_vocab.selection import Candidates, candidates
from thor_dflash.calib.nano import twin
from thor_dflash.calib.planbench import FAMILIES, sample
from thor_dflash.calib.quality import compare, gates, intervals
from thor_dflash.calib.quality.quality_report import QualityReport
from thor_dflash.calib.quality.reference_logits import LiveReference, LogitsFile, store
from thor_dflash.calib.quality.scored_texts import PROSE, parts_of_text
from thor_dflash.calib.quantize import checkpoint
from thor_dflash.calib.quantize.plan import make_plan
from thor_dflash.calib.quantize.statistics import read_statistics
from thor_dflash.calib.studies import script
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.calibrate import CalibrateConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.quality import Gate, QualityConfig
from thor_dflash.config.quantize import QuantizeConfig
from thor_dflash.core import strict_records
from thor_dflash.core.errors import RequestError
from thor_dflash.core.progress import Progress, Silent, choose
from thor_dflash.runtime.session import open_session
from thor_dflash.runtime.text.tokenizer import Tokenizer

DOCUMENTS = 96
"""Training tasks with their canonical answers from which activations are measured."""
ENGINE = EngineConfig(threads=1)
PAIRS = (("mse", "rtn"), ("act", "rtn"), ("act", "mse"), ("nvidia", "mse"), ("FP8", "nvidia"))
"""Forms whose divergence is compared, text by text."""
LIMITS: Mapping[str, Gate] = {
    "mean_kl": (5e-5, 5e-4),
    "top1": (0.99, 0.98),
    "accept_length": (0.95, 0.90),
}
"""planner-nano's own gates, on its own answers, from the first measurement: those of `quality` are
for models whose answers are less determined.
"""


def _nvfp4(method: str) -> QuantizeConfig:
    return strict_records.decode(
        QuantizeConfig,
        {"preset": "all-nvfp4", "method": method, "kv": "none"},
        "quantize",
        RequestError,
    )


DRAFTS = "draft vocabulary"
ROLLOUTS = 360
"""Tasks whose answers choose the draft vocabulary."""
FORMS: Mapping[str, QuantizeConfig | None] = {
    "rtn": _nvfp4("rtn"),
    "mse": _nvfp4("mse"),
    "act": _nvfp4("act"),
    "nvidia": QuantizeConfig(preset="nvidia", kv="none"),
    "FP8": QuantizeConfig(preset="fp8", kv="none"),
    "FP8 cache": None,
    DRAFTS: None,
}
"""Name -> how the twin is quantised; None: not at all."""


@dataclass(frozen=True, slots=True)
class QualityStudy:
    """Where the checkpoints and the results are."""

    work: Path
    target: Path
    drafter: Path
    config: QualityConfig
    progress: Progress

    def package(self, name: str, target: Path, **options: object) -> Path:
        """Build a package, unless it is there."""
        out = self.work / "packages" / name.replace(" ", "-")
        settings = {"kv": "f32", "activations": "f32", **options}
        config = strict_records.decode(BuildConfig, settings, "build", RequestError)
        if not out.is_dir():
            build(target, self.drafter, out, config, Silent())
        return out

    def reference(self) -> LogitsFile:
        """The twin's logits and answers, computed or stored."""
        path = self.work / "reference.npz"
        if not path.is_file():
            package = self.package("BF16", self.target)
            with closing(open_session(package, ENGINE, Silent())) as session:
                text = Tokenizer.load(self.target).encode(PROSE.read_text(encoding="utf-8"))
                parts = parts_of_text("prose", "prose", text, self.config, session.model.limit)
                header = compare.reference_of(session, package, parts, self.config, self.progress)
                partial = path.with_suffix(".partial")
                with partial.open("wb") as file:
                    store(file, LiveReference(session, header), self.progress)
                partial.replace(path)
        return LogitsFile(path)

    def form(self, name: str) -> Path:
        """The package of one form."""
        how = FORMS[name]
        if name == "FP8 cache":
            return self.package(name, self.target, kv="fp8")
        if name == DRAFTS:
            found, rows = self.draft_vocabulary()
            chosen, ids = trade.best(rows), self.work / "draft-ids.json"
            assert chosen is not None, "a list is recommended"
            ids.write_text(json.dumps(found.list_of(chosen.size)), encoding="utf-8")
            return self.package(name, self.target, draft_ids=str(ids))
        assert how is not None
        out = self.work / "checkpoints" / name
        if not out.is_dir():
            statistics = read_statistics(self.statistics()) if how.method == "act" else None
            source = checkpoint.read_source(self.target, None)
            plan = make_plan(source, how, from_quantised=False, statistics=statistics)
            out.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.write(plan, out, Silent())
        return self.package(name, out)

    def statistics(self) -> Path:
        """Activations of the twin on training tasks."""
        path = self.work / "statistics.safetensors"
        if not path.is_file():
            config = CalibrateConfig(threads=1)
            tokens = list(_documents(Tokenizer.load(self.target)))
            longest = read_target(self.target).dims.max_position
            documents = beginnings(tokens, config, longest)
            calibrate(self.target, documents, path, config, self.progress)
        return path

    def draft_vocabulary(self) -> tuple[Candidates, list[trade.TradeOff]]:
        """The ids by the twin's answers to other tasks, and what each size of a list gives."""
        path = self.work / "rollouts.json"
        if not path.is_file():
            package = self.package("BF16", self.target)
            with closing(open_session(package, ENGINE, Silent())) as session:
                made = roll_out(session, ROLLOUTS, self.progress)
            path.write_text(json.dumps(strict_records.encode(made)), encoding="utf-8")
        rollouts = strict_records.load(Rollouts, path, RequestError)
        found = candidates(self.target, rollouts.answers)
        cost = trade.cycle_cost(self.target, self.drafter)
        return found, [trade.trade_off(found, cost, n) for n in trade.sizes(found, cost)]

    def report(self, name: str) -> QualityReport:
        """Compare one form with the twin, or read what an earlier run found."""
        path = self.work / f"{name.replace(' ', '-')}.json"
        if not path.is_file():
            with (
                closing(self.reference()) as reference,
                closing(open_session(self.form(name), ENGINE, Silent())) as session,
            ):
                found = compare.compare(
                    reference, True, session, Path(name), (), self.config, self.progress
                )
            path.write_text(json.dumps(strict_records.encode(found)), encoding="utf-8")
        return strict_records.load(QualityReport, path, RequestError)


def _documents(text: Tokenizer) -> Iterator[tuple[int, ...]]:
    for i in range(DOCUMENTS):
        task, thinking = sample(FAMILIES[i % len(FAMILIES)], f"statistics{i}", "train"), i % 4 != 0
        messages = [{"role": role, "content": content} for role, content in task.messages]
        thought = f"{task.thinking}\n</think>\n\n" if thinking else ""
        answer = f"{thought}{task.plan}<|im_end|>"
        yield tuple(text.encode(text.render(messages, thinking) + answer))


def divergences(reports: Mapping[str, QualityReport]) -> script.Table:
    """A row for each form: how far its next tokens are from the twin's."""
    rows: list[Sequence[object]] = [
        ("form", "linears, MB", "mean KL, own answers", "interval", "thinking", "plan", "prose",
         "same best, thinking, %", "plan, %", "prose, %"),
    ]  # fmt: skip
    first = next(iter(reports.values()))
    rows.append(("BF16", _megabytes(first.reference.weights), *[""] * 8))
    for name, found in reports.items():
        by = {one.label: one for one in found.classes}
        classes = [by[label] for label in ("thinking", "plan", "prose")]
        own = _own(found)
        rows.append(
            (
                name,
                _megabytes(found.candidate.weights),
                f"{own.value:.2g}",
                f"{own.low:.2g} to {own.high:.2g}",
                *(f"{one.kl.value:.2g}" for one in classes),
                *(f"{100 * one.top1.value:.1f}" for one in classes),
            )
        )
    return rows


def plans(reports: Mapping[str, QualityReport]) -> script.Table:
    """A row for each form: its own answers to the tasks."""
    rows: list[Sequence[object]] = [
        ("form", "valid plans", "interval, %", "only the twin", "only this form", "p",
         "accept length", "ratio", "interval"),
    ]  # fmt: skip
    for name, found in reports.items():
        own = found.plans
        assert own is not None, "the twin has a chat template"
        if len(rows) == 1:
            valid = f"{own.valid_reference} of {own.tasks}"
            length = f"{own.accept_length_reference:.2f}"
            span = _span(own.valid_reference, own.tasks)
            rows.append(("BF16", valid, span, "", "", "", length, "", ""))
        ratio = own.accept_ratio
        rows.append(
            (
                name,
                f"{own.valid} of {own.tasks}",
                _span(own.valid, own.tasks),
                own.only_reference,
                own.only_candidate,
                f"{own.p:.2g}",
                f"{own.accept_length:.2f}",
                f"{ratio.value:.3f}" if ratio else "",
                f"{ratio.low:.3f} to {ratio.high:.3f}" if ratio else "",
            )
        )
    return rows


def _span(valid: int, tasks: int) -> str:
    share = intervals.share(valid, tasks)
    return f"{100 * share.low:.1f} to {100 * share.high:.1f}"


def _own(found: QualityReport) -> intervals.Interval:
    """Mean divergence on the reference's own answers."""
    texts = [one for one in found.texts if one.label != "prose"]
    sums = [one.kl * one.tokens for one in texts]
    made = intervals.ratio_of_sums(sums, [one.tokens for one in texts])
    assert made is not None, "there are answers"
    return made


def _megabytes(weights: Mapping[str, int]) -> float:
    """Of the target's linears: drafter, embedding and small tensors are the same in all forms."""
    kinds = ("_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
    own = {n: size for n, size in weights.items() if not n.startswith("drafter.")}
    size = sum(size for n, size in own.items() if n.partition(",")[0].endswith(kinds))
    return round(size / 1e6, 2)


def comparisons(reports: Mapping[str, QualityReport]) -> script.Table:
    """For pairs of forms: the ratio of their divergences, over the same texts."""
    rows: list[Sequence[object]] = [("form", "against", "texts", "ratio of mean KL", "interval",
                                     "better")]  # fmt: skip
    kinds: Mapping[str, Callable[[str], bool]] = {
        "own answers": lambda label: label != "prose",
        "prose": lambda label: label == "prose",
    }
    for one, other in PAIRS:
        if one not in reports or other not in reports:
            continue
        for name, wanted in kinds.items():
            a, b = ([t for t in reports[n].texts if wanted(t.label)] for n in (one, other))
            counts = [float(t.tokens) for t in a]
            ratio = intervals.ratio_of_ratios(
                [t.kl * t.tokens for t in a], counts, [t.kl * t.tokens for t in b], counts
            )
            if ratio is None:
                continue
            better = "yes" if ratio.high < 1 else "no, worse" if ratio.low > 1 else "not shown"
            span = f"{ratio.low:.3f} to {ratio.high:.3f}"
            rows.append((one, other, name, f"{ratio.value:.3f}", span, better))
    return rows


def verdicts(reports: Mapping[str, QualityReport]) -> script.Table:
    """A row for each form: what the gates say, with planner-nano's own limits where it has some."""
    names = (*LIMITS, "plans", "cache_kl")
    heads = [gates.TITLES[name] for name in names]
    rows: list[Sequence[object]] = [("form", *heads, "verdict")]
    for name, found in reports.items():
        measured = {gate.name: gate.verdict for gate in found.gates}
        own = [one for one in found.texts if one.label != "prose"]
        ratio = found.plans.accept_ratio if found.plans else None
        assert ratio is not None, "the twin has a drafter"
        values = {
            "mean_kl": _own(found).value,
            "top1": sum(t.top1 * t.tokens for t in own) / sum(t.tokens for t in own),
            "accept_length": ratio.value,
        }
        for gate, value in values.items():
            measured[gate] = gates.verdict(gate, value, LIMITS[gate])
        cells = [measured[gate] for gate in names]
        worst = next(v for v in ("fail", "warn", "pass") if v in cells)
        rows.append((name, *cells, worst))
    return rows


def sizes(rows: Sequence[trade.TradeOff]) -> script.Table:
    """A row for each size of a draft vocabulary; the recommended one is marked."""
    table: list[Sequence[object]] = [
        ("ids", "covers all, %", "thinking, %", "plan, %", "cycle, %", "accept length, %", "speed",
         "")
    ]  # fmt: skip
    chosen = trade.best(rows)
    for row in rows:
        shares = (f"{100 * row.coverage[label].share:.2f}" for label in ("all", "thinking", "plan"))
        gain, loss = f"{-100 * row.gain:.2f}", f"{-100 * row.loss:.2f}"
        mark = "recommended" if row is chosen else ""
        table.append((row.size, *shares, gain, loss, f"{row.speed:.4f}", mark))
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables of docs/performance."""
    parser = script.parser(__doc__, package=False)
    parser.add_argument("--twin", type=Path, help="BF16 target (default: made in --work)")
    parser.add_argument("--drafter", type=Path, default=MODEL / "drafter")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tasks", type=script.count, default=120)
    args = parser.parse_args(argv)
    target: Path = args.twin or args.work / "twin"
    if args.twin is None and not target.is_dir():
        twin.write(MODEL / "target", target)
    config = QualityConfig(tasks=args.tasks, max_tokens=512, window=512)
    study = QualityStudy(args.work, target, args.drafter, config, choose(sys.stderr))
    reports = {name: study.report(name) for name in FORMS if name != DRAFTS}
    _, listed = study.draft_vocabulary()
    if trade.best(listed):
        reports[DRAFTS] = study.report(DRAFTS)
    study.progress.close()
    tables = {
        "divergence": divergences(reports),
        "plans": plans(reports),
        "better": comparisons(reports),
        "gates": verdicts(reports),
        "draft vocabulary": sizes(listed),
    }
    script.show(tables.items(), as_json=args.json)


if __name__ == "__main__":
    sys.exit(script.run(main))
