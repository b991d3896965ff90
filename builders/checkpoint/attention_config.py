"""Reads attention heads and their rope, from nested keys or the older flat ones."""

from __future__ import annotations

from thor_dflash.builders.checkpoint.json_fields import Fields
from thor_dflash.core.model_dims import AttentionDims

ROPE = ("rope_parameters", "rope_scaling")
"""Keys of the objects that describe the rope, the newer first."""


def attention_dims(config: Fields, head_dim: int, *, share: float | None) -> AttentionDims:
    """Read heads and rope.

    `share` is the default for the rotated fraction of a head; with None the config must give it.
    """
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads")
    if heads % kv_heads:
        raise config.wrong("num_attention_heads", f"a multiple of {kv_heads} key/value heads")
    places = _rope(config)
    theta = _agreed(places, "rope_theta")
    return AttentionDims(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=_rotary_dim(places, head_dim, share),
        rope_theta=theta,
    )


def _rope(config: Fields) -> list[Fields]:
    """Return the places that may describe the rope: the configuration and its sections for that.

    Sections of multimodal rope (`mrope_*`) are ignored: for text their three positions are equal,
    which makes it ordinary rope.
    Raises: CheckpointError for any rope that scales positions, and for one per type of layer.
    """
    places = [config]
    for key in ROPE:
        if config.given(key):
            places.append(config.section(key))
            places[-1].expect("rope_type", "default")
            places[-1].expect("type", "default")
            if any(name.endswith("_attention") for name in places[-1].values):
                raise config.wrong(key, "one rope for all layers")
    return places


def _rotary_dim(places: list[Fields], head_dim: int, absent: float | None) -> int:
    """Return the number of rotated dimensions of a head, which must be even."""
    key = "partial_rotary_factor"
    rotary = head_dim * _agreed(places, key, absent)
    if not 0 < rotary <= head_dim or rotary % 2 != 0:
        where = next((place for place in places if place.given(key)), places[0])
        raise where.wrong(key, f"a share that rotates an even part of {head_dim} dimensions")
    return int(rotary)


def _agreed(places: list[Fields], key: str, absent: float | None = None) -> float:
    """Return the number under `key`, which must be equal in every place that has it."""
    given = [place for place in places if place.given(key)]
    if not given:
        if absent is None:
            raise places[-1].wrong(key, "a number")
        return absent
    value = given[0].number(key)
    for place in given[1:]:
        if place.number(key) != value:
            raise place.wrong(key, f"{value} as in {given[0].where}{key}")
    return value
