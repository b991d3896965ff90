"""Finds linears that are quantised in their weights only (W4A16).

Their rows must stay as they are, even where a scale for these is stored. Tensors do not tell: only
the JSON files do, each in one or more of three ways. One declaration is enough, should they
differ: rows that are kept cost time, rows that are quantised change results.
Source: NVIDIA/Model-Optimizer modelopt/torch/export/convert_hf_config.py, and the `config_groups`
of compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from thor_dflash.builders.checkpoint.json_fields import Fields
from thor_dflash.core.strict_records import as_list, as_table
from thor_dflash.package.tokenizer_files import present

ALGORITHM = "W4A16"
"""What the names of modelopt's algorithms of this kind begin with."""

BEGINNINGS = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
"""What may stand before a linear's name in a list that does not have the names of the tensors: a
text model that is saved anew has another prefix than its list."""

PATTERN = "re:"
"""Beginning of a target that is a regular expression."""

Table = Mapping[str, object]


def weight_only(directory: Path, config: Fields, stems: Mapping[str, str]) -> set[str]:
    """Return those of the linears `stems` (name as in Matrix -> stored name without `.weight`) that
    a JSON file declares W4A16.
    """
    others = {name: [start + name for start in BEGINNINGS] for name in stems}
    stored = {name: [stem] for name, stem in stems.items()}
    found: set[str] = set()
    for table in _tables(directory, config):
        groups = _groups(table)
        # A pattern may leave out a linear, which it would then match under another prefix.
        named = any(_names(group, [stem]) for group in groups for stem in stems.values())
        for name, spellings in (stored if named else others).items():
            if _by_algorithm(table, [*stored[name], *others[name]]) or _by_group(groups, spellings):
                found.add(name)
    return found


def _tables(directory: Path, config: Fields) -> Iterator[Table]:
    yield as_table(config.values.get("quantization_config")) or {}
    path = directory / "hf_quant_config.json"
    if present(path):
        yield as_table(Fields.read(path).values.get("quantization")) or {}


def _by_algorithm(table: Table, spellings: Sequence[str]) -> bool:
    """Whether the linear's own algorithm (of MIXED_PRECISION), or else that of all, is W4A16."""
    layers = as_table(table.get("quantized_layers")) or {}
    own = next((as_table(layers[name]) for name in spellings if name in layers), None)
    return str((own or table).get("quant_algo")).startswith(ALGORITHM)


def _groups(table: Table) -> list[Table]:
    listed = (as_table(table.get("config_groups")) or {}).values()
    return [group for group in map(as_table, listed) if group and group.get("weights")]


def _by_group(groups: Sequence[Table], spellings: Sequence[str]) -> bool:
    """Whether groups that name the linear, or else those for all, have no type for its rows."""
    found = [group for group in groups if _names(group, spellings)]
    found = found or [group for group in groups if "Linear" in (_targets(group) or ["Linear"])]
    return bool(found) and all(group.get("input_activations") is None for group in found)


def _targets(group: Table) -> list[str]:
    return [target for target in as_list(group.get("targets")) or [] if isinstance(target, str)]


def _names(group: Table, spellings: Sequence[str]) -> bool:
    return any(
        target in spellings
        or (
            target.startswith(PATTERN)
            and any(re.match(target.removeprefix(PATTERN), name) for name in spellings)
        )
        for target in _targets(group)
    )
