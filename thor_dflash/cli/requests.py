"""The prompt and request options of the subcommands generate and profile."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thor_dflash.cli import input_files
from thor_dflash.cli.input_files import (
    in_vocabulary,
    read_chat,
    read_schema,
    read_tokens,
)
from thor_dflash.cli.option_checks import given_keys
from thor_dflash.config.decode import TEMPLATE_EFFORTS, DecodeConfig
from thor_dflash.config.tree import Config
from thor_dflash.core.errors import ConfigError, RequestError
from thor_dflash.core.model_dims import PATCH
from thor_dflash.core.progress import Progress

if TYPE_CHECKING:
    from thor_dflash.package.manifest import Manifest
    from thor_dflash.runtime.session import Request, Session
    from thor_dflash.runtime.session.admission import PackageText
    from thor_dflash.runtime.text.tokenizer import Tokenizer
    from thor_dflash.runtime.vision.picture import Picture

PLACES = 5
"""Most places of a schema that notes name; a schema of no bounds has hundreds."""


@dataclass(slots=True)
class PromptOptions:
    """A chat to render, or token ids as they are."""

    messages: list[dict[str, Any]] | None
    tokens: tuple[int, ...] | None
    schema: dict[str, Any] | None = None
    """JSON schema of the answer after the thinking."""
    drafts: tuple[str, ...] = ()
    """Texts that the answer after the thinking may repeat."""
    images: list[input_files.ImageFile] = field(default_factory=list["input_files.ImageFile"])
    """Format and bytes of each image that the messages show."""
    _pictures: list[Picture] = field(default_factory=list["Picture"])
    _prompt: tuple[int, ...] | None = None

    def prompt(self, package: PackageText, decode: DecodeConfig) -> tuple[int, ...]:
        """The prompt as token ids, made once.

        Raises:
            RequestError: the package cannot read it, or it is too long with its answer.
        """
        if self._prompt is None:
            found = (
                _render(self.messages, package, decode, len(self.images))
                if self.tokens is None
                else in_vocabulary(self.tokens, package.manifest.target.vocab)
            )
            self._pictures = _pictures(self.images, package.manifest)
            more = sum(picture.grid.tokens - 1 for picture in self._pictures)
            package.check_length(len(found) + more, decode.max_tokens)
            self._prompt = found
        return self._prompt

    def request(self, session: Session, config: Config, progress: Progress) -> Request:
        """The request for a session.

        Raises:
            RequestError: the package cannot answer it, or the schema cannot be compiled.
        """
        prompt = self.prompt(session.package_text, config.decode)
        images = session.images(prompt, self._pictures) if self._pictures else None
        if images is not None:
            prompt = images.prompt
        request = _request(prompt, session, config)
        request = replace(request, images=images) if images else request
        if self.drafts:
            request = replace(request, drafts=_encoded(self.drafts, session))
        if self.schema is None:
            return request
        with progress.task("compiling the schema"):
            grammar = session.grammar(self.schema)
            if session.tokenizer is not None:
                # An object that is too wide is refused here; an answer would end where it begins.
                grammar.takes(session.tokenizer.encode("{"))
            return replace(request, grammar=grammar)


def read_prompt(args: Namespace, config: DecodeConfig) -> PromptOptions:
    """Read the prompt and the schema of the command line, before anything is loaded.

    Raises:
        ConfigError: the command line sets a key that has no effect here.
        RequestError: a file or a text is invalid.
    """
    _check_used(args, config)
    _check_thinking(args, config)
    tokens = read_tokens(args.tokens) if args.tokens else None
    schema = _schema(args.schema) if args.schema else None
    if schema is not None and config.ignore_eos:
        raise ConfigError(
            "--schema must go with stop tokens, which end the answer (got decode.ignore_eos true)"
        )
    drafts = tuple(
        input_files.read_prompt("--draft", text, empty=True) for text in args.draft or ()
    )
    if drafts and config.drafter not in ("auto", "lookup"):
        raise ConfigError(f"--draft must go with --drafter auto or lookup (got {config.drafter})")
    images = input_files.read_images(getattr(args, "image", ()), args.prompt, "--prompt")
    messages, shown = _messages(args, len(images))
    return PromptOptions(messages, tokens, schema, drafts, [*images, *shown])


def _encoded(texts: tuple[str, ...], session: Session) -> tuple[tuple[int, ...], ...]:
    if session.tokenizer is None:
        raise RequestError("--draft must go with a package that has a tokenizer (got one without)")
    return tuple(tuple(session.tokenizer.encode(text)) for text in texts)


def unbounded_notes(request: Request) -> list[str]:
    """What in the request's schema lets an answer grow until it is cut off."""
    warnings = request.grammar.warnings if request.grammar else ()
    return [f"an answer may grow without end: {text}" for text in warnings[:PLACES]]


def unused_schema_notes(request: Request, text: str) -> list[str]:
    """That the schema applied to nothing, if so: a model may stop while it thinks.
    `text`: the answer after the thinking.
    """
    if request.grammar is None or text:
        return []
    return ["the schema applied to nothing: no answer came after the thinking"]


def _schema(path: Path) -> dict[str, Any]:
    from thor_dflash.runtime.grammar.schema import read

    read(schema := read_schema(path))  # most faults need no compiler, which needs the package
    return schema


def _check_used(args: Namespace, config: DecodeConfig) -> None:
    """Refuse a key of the command line without effect. A configuration file may hold it for other
    answers.
    """
    given = given_keys(args)
    for section, names, used, need in (
        ("relaxed", ("rule", "k", "margin"), config.accept == "relaxed",
         "--accept relaxed (got accept strict)"),
        ("budget", ("close", "reply", "message", "ratio", "soften"), _limits(config),
         "a budget or an effort (got none)"),
        ("budget", ("ratio", "soften"), config.budget.close == "soft",
         "--thinking-close soft (got close hard)"),
        ("sampling", ("top_p", "top_k", "min_p", "seed", "acceptance"),
         config.sampling.temperature > 0, "--temperature above 0 (got 0)"),
    ):  # fmt: skip
        for name in names if not used else ():
            changed = _value(config, section, name) != _value(DecodeConfig(), section, name)
            if changed and (key := f"decode.{section}.{name}") in given:
                raise ConfigError(f"{key} must go with {need}")


def _check_thinking(args: Namespace, config: DecodeConfig) -> None:
    """Refuse settings of thinking, of its budget and of acceptance that contradict each other."""
    given = given_keys(args)
    budgeted = given & {"decode.budget.tokens", "decode.budget.effort"}
    off = args.tokens is None and config.thinking == "off"
    if off and budgeted and _limits(config):
        raise ConfigError("a thinking budget must go with decode.thinking on (got off)")
    relaxed = "decode.accept" in given and config.accept == "relaxed"
    if relaxed and args.tokens is None and not _thinks(config):
        got = "off" if off else "decode.budget.effort none"
        raise ConfigError(f"decode.accept relaxed must go with decode.thinking on (got {got})")
    if "decode.thinking" in given and budgeted and config.thinking == "on" and not _thinks(config):
        raise ConfigError("decode.thinking must be off with decode.budget.effort none (got on)")


def _limits(config: DecodeConfig) -> bool:
    """Whether the thinking gets a budget."""
    return config.budget.tokens >= 0 or config.budget.effort not in ("", "none")


def _value(config: DecodeConfig, section: str, name: str) -> object:
    return getattr(getattr(config, section), name)


def _pictures(images: list[input_files.ImageFile], manifest: Manifest) -> list[Picture]:
    """Decode and resize images for a package."""
    if not images:
        return []
    from thor_dflash.runtime.vision.decoder import read_picture
    from thor_dflash.runtime.vision.picture import PixelLimits

    if (vision := manifest.vision) is None:
        raise RequestError("--image must go with a package that has a vision tower (got none)")
    most = max(manifest.image_patches) * PATCH**2
    limits = PixelLimits(vision.shortest, vision.longest).under(most)
    try:
        return [read_picture(data, kind, limits) for kind, data in images]
    except RequestError as e:
        raise RequestError(f"--image: {e}") from e


def _messages(
    args: Namespace, images: int
) -> tuple[list[dict[str, Any]] | None, list[input_files.ImageFile]]:
    """The chat of the command line, its images after its text, or of a file, with the images that
    it names; None if token ids are given.
    """
    if args.prompt is not None:
        text = input_files.read_prompt("--prompt", args.prompt)
        parts = [{"type": "text", "text": text}, *[{"type": "image"}] * images]
        return [{"role": "user", "content": parts if images else text}], []
    return read_chat(args.messages) if args.messages else (None, [])


def _render(
    messages: object, package: PackageText, decode: DecodeConfig, images: int
) -> tuple[int, ...]:
    if package.tokenizer is None:
        raise RequestError(
            "the prompt must be given as --tokens (got a package without a tokenizer)"
        )
    options, limit = _options(decode, package.tokenizer), package.limit
    text = package.tokenizer.render(messages, _thinks(decode), options=options, pictures=images)
    # Do not encode a long text, which may take minutes, if its lower bound is already too long.
    if len(text) > limit and (least := package.tokenizer.least(text)) > limit:
        raise RequestError(
            f"the prompt must be <= {limit} tokens, the context of {package.capacity} less "
            f"one block (got {least} or more)"
        )
    return tuple(package.tokenizer.encode(text))


def _options(decode: DecodeConfig, text: Tokenizer) -> dict[str, object]:
    """Variables of the chat template that the configuration sets."""
    options: dict[str, object] = {}
    if decode.preserve_thinking != "auto":
        if "preserve_thinking" not in text.options:
            raise RequestError(
                "decode.preserve_thinking must be auto, the chat template does not read it "
                f"(got {decode.preserve_thinking})"
            )
        options["preserve_thinking"] = decode.preserve_thinking == "on"
    if effort := _template_effort(decode, text):
        options["reasoning_effort"] = effort
    return options


def _template_effort(decode: DecodeConfig, text: Tokenizer | None) -> str | None:
    """The effort as the chat template has it, if it reads one and one is given."""
    if text is None or "reasoning_effort" not in text.options:
        return None
    return TEMPLATE_EFFORTS.get(decode.budget.effort)


def _thinks(decode: DecodeConfig) -> bool:
    """Whether the prompt opens a thinking block; with the effort `none` it does not."""
    none = decode.budget.effort == "none" and decode.budget.tokens < 0
    return decode.thinking == "on" and not none


def _request(prompt: tuple[int, ...], session: Session, config: Config) -> Request:
    from thor_dflash.runtime.session import Request
    from thor_dflash.runtime.text.tokenizer import open_at_end

    own, drafter = session.manifest.own_drafter, config.decode.drafter
    if drafter in ("dflash", "mtp") and drafter != own:
        raise RequestError(
            f"decode.drafter must be auto, lookup or {own}, the package's (got {drafter})"
        )
    stop = () if config.decode.ignore_eos else session.manifest.stop_tokens
    answer, tokenizer = config.decode.max_tokens, session.tokenizer
    thinks = tokenizer is not None and open_at_end(tokenizer, prompt)
    # Only the context limits thinking that has no budget.
    context = session.model.limit - len(prompt) if thinks else 0
    budget = config.decode.budget
    if _template_effort(config.decode, tokenizer):
        budget = replace(budget, effort="")
    return Request(
        prompt=prompt,
        max_tokens=max(answer, context),
        max_answer=answer,
        stop=frozenset(stop),
        drafter=drafter,
        budget=budget,
        relaxed=config.decode.relaxed if config.decode.accept == "relaxed" else None,
        gate=config.decode.gate == "on",
        draft=config.decode.draft,
        sampling=config.decode.sampling.seeded(),  # one seed for all runs of a profile
    )
