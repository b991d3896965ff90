"""Reads the sizes from a Qwen3.5/3.6 text model's config.json. Missing values are not guessed."""

from __future__ import annotations

from thor_dflash.builders.checkpoint.attention_config import attention_dims
from thor_dflash.builders.checkpoint.json_fields import Fields
from thor_dflash.core.model_dims import GdnDims, LayerKind, TargetDims

ARCHITECTURES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
WRAPPER, TEXT = "qwen3_5", "qwen3_5_text"
KINDS: dict[str, LayerKind] = {"linear_attention": "gdn", "full_attention": "attention"}


def target_dims(root: Fields) -> TargetDims:
    """Return the sizes in a config.json, multimodal wrapper or text only."""
    text = text_section(root)
    _check_understood(text)
    return TargetDims(
        vocab=text.integer("vocab_size"),
        hidden=text.integer("hidden_size"),
        intermediate=text.integer("intermediate_size"),
        layers=_layers(text),
        attention=attention_dims(text, text.integer("head_dim"), share=None),
        gdn=_gdn(text),
        eps=text.number("rms_norm_eps"),
        tied=_tied(root, text),
        max_position=text.integer("max_position_embeddings"),
    )


def text_section(root: Fields) -> Fields:
    """Return the text model's keys of a config.json."""
    if root.text("model_type") not in (WRAPPER, TEXT):
        raise root.wrong("model_type", f"{WRAPPER} or {TEXT}")
    if root.given("architectures"):
        root.words("architectures", ARCHITECTURES)
    if root.text("model_type") == TEXT:
        return root
    text = root.section("text_config")
    text.expect("model_type", TEXT)
    return text


def _check_understood(text: Fields) -> None:
    """Refuse unsupported values that change the arithmetic. Absent means the family's default."""
    if text.text("hidden_act") != "silu":
        raise text.wrong("hidden_act", "silu")
    text.expect("attention_bias", False)
    text.expect("attn_output_gate", True)
    text.expect("output_gate_type", "swish", "silu")
    text.expect("num_experts", 0)


def _layers(text: Fields) -> tuple[LayerKind, ...]:
    layers = _listed(text)
    # Graphs read the sequence length (attention) and the accepted count (gdn): a model with layers
    # of only one kind would lack one of the two.
    if len(set(layers)) != len(KINDS):
        raise text.wrong("num_hidden_layers", "enough for both kinds of layer")
    return layers


def _listed(text: Fields) -> tuple[LayerKind, ...]:
    depth = text.integer("num_hidden_layers")
    if text.given("layer_types"):
        words = text.words("layer_types", KINDS)
        if len(words) != depth:
            raise text.wrong("num_hidden_layers", f"{len(words)}, one per entry of layer_types")
        return tuple(KINDS[word] for word in words)
    if not text.given("full_attention_interval"):
        raise text.wrong("layer_types", "given where full_attention_interval is not")
    interval = text.integer("full_attention_interval")
    return tuple("gdn" if (i + 1) % interval else "attention" for i in range(depth))


def _gdn(text: Fields) -> GdnDims:
    key_heads = text.integer("linear_num_key_heads")
    value_heads = text.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise text.wrong("linear_num_value_heads", f"a multiple of {key_heads} key heads")
    return GdnDims(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=text.integer("linear_key_head_dim"),
        value_dim=text.integer("linear_value_head_dim"),
        # With one tap the state would have no convolution tail.
        conv_kernel=text.integer("linear_conv_kernel_dim", 2),
    )


def _tied(root: Fields, text: Fields) -> bool:
    """Whether the head is tied to the embedding. A wrapper's own flag counts, as in transformers,
    which writes files whose text_config has the other value.
    """
    key = "tie_word_embeddings"
    return (root if root.given(key) else text).flag(key)
