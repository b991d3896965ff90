"""The description of a loaded package for `hello`: what it is, and what requests may ask of it."""

from __future__ import annotations

from thor_dflash.config.serving import ServeConfig
from thor_dflash.package import manifest as package_manifest
from thor_dflash.runtime.session import Session
from thor_dflash.runtime.text.tokenizer import Tokenizer
from thor_dflash.serving.planner import answer_rule
from thor_dflash.serving.protocol.replies import ModelReply

FEATURES = (
    *("stream", "deadline", "preempt", "prefix", "json_schema", "skills", "thinking_budget"),
    *("reuse", "sampling", *answer_rule.FEATURES),
)
"""What every package has."""


def relaxes(session: Session, config: ServeConfig) -> bool:
    """Whether thinking may be accepted relaxed."""
    own = session.manifest.own_drafter
    return own != "none" and config.drafter in ("auto", own)


def looks_up(config: ServeConfig) -> bool:
    """Whether a request's `drafts` are used."""
    return config.drafter in ("auto", "lookup")


def describe(
    session: Session, tokenizer: Tokenizer, config: ServeConfig, golden: str | None
) -> ModelReply:
    """Describe a session that is served; `golden`: hash of its self-test's tokens, if it ran."""
    m = session.manifest
    files = m.files.get("tokenizer.json")
    optional = {
        "relaxed_thinking": relaxes(session, config),
        "drafts": looks_up(config),
        "persist": bool(config.prefix_dir),
        "tools": tokenizer.takes_tools,
        "forced": config.allow_forced,
        "images": m.vision is not None,
    }
    return ModelReply(
        model=m.model,
        engine=m.engine,
        quantisation={
            name: {kind: share.bytes for kind, share in kinds.items()}
            for name, kinds in m.quantisation.items()
        },
        package_sha256=package_manifest.sha256(m),
        tokenizer_sha256=files.sha256 if files else None,
        golden_sha256=golden,
        max_context=session.model.limit,
        block=session.model.block,
        prefill_chunk=session.model.chunk,
        features=(*FEATURES, *(name for name, has in optional.items() if has)),
    )
