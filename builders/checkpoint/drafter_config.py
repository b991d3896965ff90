"""Reads the sizes from a DFlash or DFlash2 drafter's config.json. Unknown keys are refused by name.

With a misread drafter decoding is still lossless, only slow, so no later check would notice.
"""

from __future__ import annotations

from thor_dflash.builders.checkpoint.attention_config import ROPE, attention_dims
from thor_dflash.builders.checkpoint.json_fields import Fields
from thor_dflash.core.model_dims import (
    DraftConvDims,
    DrafterDims,
    DraftLayerDims,
    SelectorDims,
)
from thor_dflash.core.strict_records import as_list

ARCHITECTURE, SECOND = "DFlashDraftModel", "DFlash2DraftModel"
EXTENSIONS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Keys that DFlash2 has, all of them, and DFlash has not."""
SLIDING, FULL = "sliding_attention", "full_attention"
WIDEST = 2**30
"""Widest window, tokens; a wider one is the same."""

PASSED_OVER = set(
    """
    auto_map dtype torch_dtype transformers_version tie_word_embeddings
    use_cache initializer_range attention_dropout max_window_layers bos_token_id
    eos_token_id pad_token_id quantization_config pretraining_tp _name_or_path
    """.split()
)
"""Keys that are ignored: training, text generation, and quantisation, which the tensors show."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "is_neox_style": (True,),
    "mlp_bias": (False,),
    "sample_from_anchor": (False,),
    "has_own_lm_head": (False,),
    "has_own_embed_tokens": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1.0, 1),
    "input_embedding_scale": (1.0, 1),
    "output_multiplier": (1.0, 1),
    "final_logit_softcapping": (),
    "lilicorr_enabled": (False,),
}
"""Features of other drafters, and the values that switch them off (null always does)."""


def drafter_dims(root: Fields) -> DrafterDims:
    """Return the sizes in a drafter's config.json."""
    flash = root.section("dflash_config") if root.given("dflash_config") else Fields(root.where, {})
    second = _check_architecture(root, flash)
    if root.text("hidden_act") != "silu":
        raise root.wrong("hidden_act", "silu")
    root.expect("attention_bias", False)
    for place in (root, *(root.section(key) for key in ROPE if root.given(key))):
        # Only some implementations of Qwen3 obey this key, so a factor below 1 is ambiguous.
        place.expect("partial_rotary_factor", 1.0, 1)
    block = _either(root, flash, "block_size").integer("block_size", 2)
    hidden = root.integer("hidden_size")
    dims = DrafterDims(
        vocab=root.integer("vocab_size"),
        hidden=hidden,
        intermediate=root.integer("intermediate_size"),
        layers=_layers(root, flash, block),
        attention=attention_dims(root, _head_dim(root), share=1.0),
        eps=root.number("rms_norm_eps"),
        block=block,
        taps=_taps(_either(root, flash, "target_layer_ids")),
        mask_token=_either(root, flash, "mask_token_id").integer("mask_token_id", 0),
        target_layers=_target_layers(root, flash),
        max_position=root.integer("max_position_embeddings"),
        conv=_conv(root, flash, hidden) if second else None,
        selector=_selector(root, flash) if second else None,
    )
    for place in (root, flash):
        _check_keys(place)
    return dims


def _check_architecture(root: Fields, flash: Fields) -> bool:
    """Return whether it is a DFlash2 drafter. Its additions must not be ignored, nor missing: a
    drafter without them still drafts, only worse.
    """
    if root.text("model_type") != "qwen3":
        raise root.wrong("model_type", "qwen3")
    names: tuple[str, ...] = ()
    if root.given("architectures"):
        names = root.words("architectures", (ARCHITECTURE, SECOND))
    for place in (root, flash):
        for key in EXTENSIONS:
            if place.given(key) and SECOND not in names:
                raise root.wrong("architectures", f'["{SECOND}"] where {key} is given')
    if SECOND in names and ARCHITECTURE in names:
        raise root.wrong("architectures", f"{ARCHITECTURE} or {SECOND}, not both")
    return SECOND in names


def _conv(root: Fields, flash: Fields, hidden: int) -> DraftConvDims:
    taps = _either(root, flash, "conv_kernel_size").integer("conv_kernel_size", 2)
    place = _either(root, flash, "conv_group_size")
    group = place.integer("conv_group_size")
    if hidden % group:
        raise place.wrong("conv_group_size", f"a divisor of hidden_size {hidden}")
    return DraftConvDims(taps=taps, group=group)


def _selector(root: Fields, flash: Fields) -> SelectorDims:
    def place(key: str) -> Fields:
        return _either(root, flash, key)

    scale, cap = "output_multiplier", "final_logit_softcapping"
    return SelectorDims(
        rank=place("selector_rank").integer("selector_rank"),
        top_k=place("selector_top_k").integer("selector_top_k"),
        multiplier=place(scale).number(scale) if place(scale).given(scale) else 1.0,
        softcap=_softcap(place(cap), cap),
    )


def _softcap(place: Fields, key: str) -> float:
    """Return the bound; 0 and null mean none."""
    off = not place.given(key) or place.values[key] in (0, 0.0)
    return 0.0 if off else place.number(key)


def _check_keys(fields: Fields) -> None:
    """Refuse a key that was neither read nor ignored, unless its value switches its feature off."""
    for key in fields.values:
        if key not in fields.read_keys | PASSED_OVER:
            fields.expect(key, *NEUTRAL.get(key, ()))


def _either(root: Fields, flash: Fields, key: str) -> Fields:
    """Return the object with the key: dflash_config, or the top level in older checkpoints."""
    if not (root.given(key) and flash.given(key)):
        return flash if flash.given(key) else root
    if root.values[key] != flash.values[key]:
        raise root.wrong(key, f"{flash.values[key]} as in dflash_config")
    return flash


def _head_dim(root: Fields) -> int:
    if root.given("head_dim"):
        return root.integer("head_dim")
    hidden, heads = root.integer("hidden_size"), root.integer("num_attention_heads")
    if hidden % heads:
        raise root.wrong("head_dim", f"given where {heads} heads do not divide {hidden}")
    return hidden // heads


def _layers(root: Fields, flash: Fields, block: int) -> tuple[DraftLayerDims, ...]:
    kinds = _kinds(root, root.integer("num_hidden_layers"))
    window = _window(root, block, SLIDING in kinds)
    causal = _causal(root, flash, kinds)
    return tuple(
        DraftLayerDims(causal=c, window=window if kind == SLIDING else 0)
        for c, kind in zip(causal, kinds, strict=True)
    )


def _kinds(root: Fields, depth: int) -> tuple[str, ...]:
    if not root.given("layer_types"):
        if root.given("use_sliding_window") and root.flag("use_sliding_window"):
            raise root.wrong("layer_types", "given where use_sliding_window is true")
        return (FULL,) * depth
    kinds = root.words("layer_types", (SLIDING, FULL))
    if len(kinds) != depth:
        raise root.wrong("num_hidden_layers", f"{len(kinds)}, one per entry of layer_types")
    return kinds


def _window(root: Fields, block: int, slides: bool) -> int:
    on, _ = root.get("use_sliding_window"), root.get("sliding_window")
    if not slides:
        return 0
    # HF's Qwen3Config drops the window unless the flag is true: a window without it is ambiguous.
    if on is not True:
        raise root.wrong("use_sliding_window", f"true where layer_types has {SLIDING}")
    # At least a block, so that all slots of a block are in the window, causal or not. Windows are
    # int32; WIDEST is more than any context that fits in memory.
    return min(root.integer("sliding_window", block), WIDEST)


def _causal(root: Fields, flash: Fields, kinds: tuple[str, ...]) -> tuple[bool, ...]:
    """Causality, given for all layers or for each; by default only sliding layers are causal.

    Source: z-lab/dflash model.py, and vLLM qwen3_dflash.py `_dflash_layer_causal`.
    """
    places = [(root, "is_causal"), (root, "causal"), (flash, "is_causal"), (flash, "causal")]
    given = [(place, key) for place, key in places if place.given(key)]
    if not given:
        return tuple(kind == SLIDING for kind in kinds)
    flags = [_flags(place, key, len(kinds)) for place, key in given]
    for (place, key), flag in zip(given, flags, strict=True):
        if flag != flags[0]:
            raise place.wrong(key, f"as {given[0][0].where}{given[0][1]} gives")
    return tuple(flag is True for flag in flags[0])


def _flags(place: Fields, key: str, depth: int) -> list[object]:
    value = place.get(key)
    flags: list[object] = [value] * depth if isinstance(value, bool) else as_list(value) or []
    if len(flags) != depth or any(type(flag) is not bool for flag in flags):
        raise place.wrong(key, f"true, false or a list of {depth} of them")
    return flags


def _taps(fields: Fields) -> tuple[int, ...]:
    taps = fields.integers("target_layer_ids")
    if not taps or len(set(taps)) != len(taps):
        raise fields.wrong("target_layer_ids", "one or more different layers")
    return taps


def _target_layers(root: Fields, flash: Fields) -> int:
    place = _either(root, flash, "num_target_layers")
    return place.integer("num_target_layers") if place.given("num_target_layers") else 0
