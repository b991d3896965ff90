"""A backend without a model, for testing clients of the server: `serve --mock`.

It answers every request with the same plan or, if there are tools, with a call of the first one. A
word is a token, and a cycle commits four tokens. Images are checked, resized and counted as for a
model, and its plan's goal names what it was sent; nothing looks at them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ConfigError, PlanError, RequestError
from thor_dflash.core.extras import extra
from thor_dflash.core.message_text import show
from thor_dflash.core.results import DraftCounts, Speculation, Timings, Usage, rate
from thor_dflash.runtime.decoding.telemetry import NO_REUSE
from thor_dflash.runtime.grammar.tools import ToolUse, call_grammar
from thor_dflash.runtime.text.thinking import TextPiece
from thor_dflash.runtime.text.tool_calls import CallPiece, JsonType, Tool, ToolCallParser
from thor_dflash.serving.planner import answer_rule
from thor_dflash.serving.planner import result as outcome
from thor_dflash.serving.planner.backend import PlanRun, Prepared, StopReason
from thor_dflash.serving.planner.chunk_stream import ChunkWriter
from thor_dflash.serving.planner.formats.nav2 import Nav2Waypoints
from thor_dflash.serving.planner.formats.text_format import TextPlanFormat
from thor_dflash.serving.planner.latency_model import LatencyModel
from thor_dflash.serving.planner.tool_request import tool_use
from thor_dflash.serving.protocol import errors, messages, validation
from thor_dflash.serving.protocol.errors import bad_request
from thor_dflash.serving.protocol.replies import ModelReply, ReuseCounts

if TYPE_CHECKING:
    from thor_dflash.runtime.vision.picture import Picture
    from thor_dflash.serving.planner.mock_images import MockImages

THINKING = "The cup is on the shelf and the robot is free to take it to the table at once. "
GOAL = "cup on table"
PLAN = (
    f'{{"goal": "{GOAL}", "steps": ['
    '{"id": 1, "skill": "goto", "args": {"target": "shelf"}, "on_fail": "retry"}, '
    '{"id": 2, "skill": "pick", "args": {"object": "cup"}, "on_fail": "retry"}, '
    '{"id": 3, "skill": "place", "args": {"object": "cup", "on": "table"}, "on_fail": "replan"}'
    '], "needs_clarification": null}'
)
NO_PICTURES: Mapping[str, Picture] = {}
MARKS = (0xE000, 0xE001)
"""Characters, of the private use area, that stand for the marks around a tool call."""
PER_CYCLE = 4
CHUNK = 64
CONTEXT = 8192


def words(text: str) -> list[str]:
    """Split a text into the mock's tokens: words, each with a space after it."""
    return [word + " " for word in text.split(" ")]


def _tokens(request: messages.PlanRequest | messages.Validate, images: Mapping[str, int]) -> int:
    turns = [request.prompt] if request.messages is None else [m.content for m in request.messages]
    count = 0
    for turn in turns:
        for part in turn if isinstance(turn, tuple) else (messages.TextPart(turn or ""),):
            if isinstance(part, messages.TextPart):
                count += part.text.count(" ") + 1
            else:
                count += images[part.name]
    return count


def _seen(pictures: Mapping[str, Picture]) -> str:
    """What the goal of a plan says about the images, in the order of the request."""
    each = "; ".join(
        f"{name[:16]} {p.pixels.shape[1]}x{p.pixels.shape[0]} sha256 {p.digest.hex()[:16]}"
        for name, p in pictures.items()
    )
    count = f"{len(pictures)} image{'s' * (len(pictures) > 1)}"
    return f" with {count} ({each})" if pictures else ""


def _spec(tokens: int) -> Speculation:
    """Return the statistics of a drafter that is always right."""
    sizes = [min(PER_CYCLE, tokens - at) for at in range(0, tokens, PER_CYCLE)]
    cycles = len(sizes)
    return Speculation(
        cycles=cycles,
        drafted=(PER_CYCLE - 1) * cycles,
        accepted=tokens - cycles,
        accept_len=tokens / cycles if cycles else 0.0,
        sources={"drafter": DraftCounts(cycles, (PER_CYCLE - 1) * cycles, tokens - cycles)},
        accept_hist=tuple(sizes.count(size) for size in range(1, PER_CYCLE + 1)),
        accepted_per_position=tuple(
            sum(size > place for size in sizes) for place in range(1, PER_CYCLE)
        ),
    )


def _check_tools(use: ToolUse) -> None:
    """Refuse what a real server refuses, except for what its compiler does."""
    try:
        call_grammar(use, (0, 1))
    except RequestError as e:
        raise PlanError("schema_unsupported", errors.refusal(e), field="tools") from e


def _rule(request: messages.PlanRequest | messages.Validate) -> answer_rule.AnswerRule:
    rule = answer_rule.rule_of(request)
    schema: Mapping[str, Any] = {} if rule.schema is None else rule.schema.table
    literals = [schema["const"]] if "const" in schema else schema.get("enum", [{}])
    # Whether a deeper schema allows an object, only a grammar can find, and the mock has none.
    if "object" not in schema.get("type", "object") or dict not in map(type, literals):
        raise errors.no_object(schema)
    return rule


def _callable(ask: messages.PlanRequest, use: ToolUse) -> tuple[Tool, ...]:
    """The tools that the mock calls: none after it got a result, unless a call is demanded."""
    answered = ask.messages is not None and ask.messages[-1].role == "tool"
    if use.choice == "none" or (use.choice == "auto" and answered):
        return ()
    return tuple(tool for tool in use.tools if not use.only or tool.name in use.only)


def _call(tool: Tool) -> str:
    """A call with the arguments that must be there."""
    properties = tool.parameters.get("properties", {})
    given = "".join(
        f"<parameter={key}>\n{_value(properties.get(key, {}), tool.types(key))}\n</parameter>\n"
        for key in tool.parameters.get("required", ())
    )
    return f"{chr(MARKS[0])}\n<function={tool.name}>\n{given}</function>\n{chr(MARKS[1])}"


def _value(schema: Mapping[str, Any], types: frozenset[JsonType]) -> str:
    if "enum" in schema:
        first = schema["enum"][0]
        return first if isinstance(first, str) else json.dumps(first)
    plain: dict[JsonType, str] = {
        "string": "mock", "integer": "1", "number": "1.5", "boolean": "true", "array": "[]",
        "object": "{}", "null": "null",
    }  # fmt: skip
    return next(text for kind, text in plain.items() if kind in types)


def _character(token: int) -> bytes:
    return chr(token).encode()


class MockBackend:
    """See backend.Backend."""

    def __init__(self, config: ServeConfig, cycle_s: float = 0.0) -> None:
        self.config = config
        self.cycle_s = cycle_s
        """Time of a step, s."""
        ms = 1e3 * cycle_s
        self._rates = LatencyModel(
            cycle_ms=ms, step_sizes=(CHUNK,), step_ms={CHUNK: ms}, worst_step_ms=ms
        )
        self._rates.answer_len = self._rates.thinking_len = PER_CYCLE
        self._rates.answer_tokens = len(words(PLAN))
        self._prefixes: dict[str, dict[str, Any]] = {}
        self._images: MockImages | None = None

    @property
    def about(self) -> ModelReply:
        return ModelReply(
            model="mock",
            engine="mock",
            quantisation={},
            package_sha256=None,
            tokenizer_sha256=None,
            golden_sha256=None,
            max_context=CONTEXT,
            block=PER_CYCLE,
            prefill_chunk=CHUNK,
            features=(
                "mock",
                "stream",
                "deadline",
                "preempt",
                "prefix",
                "json_schema",
                "skills",
                "thinking_budget",
                "relaxed_thinking",
                "tools",
                "images",
                *answer_rule.FEATURES,
            ),
        )

    @property
    def rates(self) -> LatencyModel:
        return self._rates

    @property
    def reuse(self) -> ReuseCounts:
        return ReuseCounts()

    def warm(self) -> None:
        pass

    def read_images(self, ask: messages.PlanRequest, scope: str = "") -> Mapping[str, Picture]:
        if not ask.images and not validation.image_names(ask):
            return NO_PICTURES
        return self._reader().read(ask, scope)

    def _reader(self) -> MockImages:
        try:
            with extra("images"):
                from thor_dflash.serving.planner.mock_images import MockImages
        except ConfigError as e:
            raise bad_request(str(e), "images") from e
        if self._images is None:
            self._images = MockImages(self.config)
        return self._images

    def prepare(
        self,
        ask: messages.PlanRequest,
        left_ms: float | None,
        scope: str = "",
        pictures: Mapping[str, Picture] | None = None,
    ) -> Prepared:
        validation.check_values(ask)
        validation.check_forced(ask, allowed=False)
        use = tool_use(ask, self.config.tools)
        if use is not None and use.constrained:
            _check_tools(use)
        pictures = self.read_images(ask, scope) if pictures is None else pictures
        images = {name: picture.grid.tokens for name, picture in pictures.items()}
        rule, tokens = _rule(ask), _tokens(ask, images)
        self._check_prefix(name := ask.prefix_id)
        max_tokens = ask.max_tokens or self.config.max_tokens
        if tokens + max_tokens > CONTEXT:
            raise errors.too_long(CONTEXT, tokens, max_tokens)
        budget = validation.budget_of(ask, self.config)
        return Prepared(
            ask=ask,
            prompt=tuple(range(tokens)),
            cached=0 if name is None else min(tokens, self._prefixes[name]["held"]),
            max_tokens=max_tokens,
            budget=budget,
            thinks=budget > 0,
            format=rule.format,
            tools=() if use is None else _callable(ask, use),
            pictures=pictures,
            admitted=None,
            grammar_ms=0.0,
            min_ms=self._rates.min_ms(tokens, max_tokens, whole=ask.on_deadline == "error"),
        )

    def start(self, prepared: Prepared, left_ms: float | None) -> PlanRun:
        self._check_prefix(prepared.ask.prefix_id)
        return MockPlanRun(prepared, self._rates, self.cycle_s, self._images)

    def _check_prefix(self, name: str | None) -> None:
        if name is not None and name not in self._prefixes:
            text = f"prefix_id must be a pinned prefix (got {show(name)})"
            raise PlanError("bad_request", text, field="prefix_id")

    def validate(self, request: messages.Validate) -> dict[str, Any]:
        out: dict[str, Any] = {"max_context": CONTEXT}
        if request.prompt is not None or request.messages is not None:
            shown = validation.image_names(request)
            out["prompt_tokens"] = _tokens(request, self._reader().count(request) if shown else {})
        if request.json_schema is not None:
            validation.check_values(messages.PlanRequest(json_schema=request.json_schema))
        if _rule(request).field:
            out |= {"compile_ms": 0.0, "warnings": ()}
        return out

    def pin(self, request: messages.PrefixPut, stopped: Callable[[], bool]) -> dict[str, Any]:
        tokens = len(words(request.system))
        self._prefixes[request.prefix_id] = {
            "prefix_id": request.prefix_id,
            "tokens": tokens,
            "held": tokens,
            "bytes": len(request.system.encode()),
            "build_ms": 1e3 * self.cycle_s,
            "persisted": request.persist,
        }
        return self._prefixes[request.prefix_id]

    def keep(self, request: messages.PrefixPut) -> None:
        """See Backend. The mock stores nothing."""
        if request.prefix_id not in self._prefixes:
            raise errors.dropped()

    @property
    def skipped(self) -> tuple[str, ...]:
        return ()

    def prefixes(self) -> list[dict[str, Any]]:
        return list(self._prefixes.values())

    def drop(self, prefix_id: str) -> bool:
        return self._prefixes.pop(prefix_id, None) is not None

    def drop_session(self, request: messages.SessionDrop, scope: str = "") -> int:
        return 0

    def idle(self, stopped: Callable[[], bool]) -> float | None:
        return None

    def close(self) -> None:
        pass


class MockPlanRun:
    """See backend.Run."""

    def __init__(
        self, prepared: Prepared, rates: LatencyModel, cycle_s: float, images: MockImages | None
    ) -> None:
        thought = words(THINKING)[: prepared.budget]
        form = prepared.format
        goal = json.dumps(GOAL + _seen(prepared.pictures))
        plan = PLAN.replace(f'"{GOAL}"', goal, 1)
        plan = form.sample() if isinstance(form, TextPlanFormat | Nav2Waypoints) else plan
        answer = words(_call(prepared.tools[0]) if prepared.tools else plan)
        self._prepared = prepared
        self._rates = rates
        self._cycle_s = cycle_s
        self._script = [TextPiece(w, thinking=True) for w in thought]
        self._script += [TextPiece(w, thinking=False) for w in answer[: prepared.max_tokens]]
        self._calls = ToolCallParser({t.name: t for t in prepared.tools}, MARKS, _character)
        self._cut = len(answer) > prepared.max_tokens
        self._thought = len(thought)
        self._writer = ChunkWriter(prepared.ask.stream, prepared.format)
        self._images = images
        self._unseen = images.encode(prepared.pictures) if images else []
        self._encode_ms: dict[bytes, float] = {}
        self._prompt_done = prepared.cached
        self._emitted = 0
        self._start = time.perf_counter()
        self._firsts: dict[bool, float] = {}
        """Time of the first thinking token (True) and of the first answer token (False), ms since
        the start."""

    @property
    def done(self) -> bool:
        return self._emitted == len(self._script)

    @property
    def phase(self) -> messages.Phase:
        if not self._emitted:
            return "prefill"
        return "thinking" if self._script[self._emitted - 1].thinking else "answer"

    def step(self) -> Sequence[messages.Chunk]:
        if self._cycle_s:
            time.sleep(self._cycle_s)
        if self._unseen:
            self._encode_ms[self._unseen.pop(0)] = 1e3 * self._cycle_s
            return ()
        if self._prompt_done < len(self._prepared.prompt):
            self._prompt_done += CHUNK
            return self._writer.prefill(min(self._prompt_done, len(self._prepared.prompt)))
        pieces = self._script[self._emitted : self._emitted + PER_CYCLE]
        self._emitted += len(pieces)
        for piece in pieces:
            self._firsts.setdefault(piece.thinking, self._ms())
        self._rates.cycle(1e3 * self._cycle_s, len(pieces), thinking=pieces[0].thinking)
        if not self._prepared.tools:
            return self._writer.cycle(pieces, self._emitted)
        ids = (ord(c) for p in pieces if not p.thinking for c in p.text)
        calls = [c for i in ids for c in self._calls.feed(i) if isinstance(c, CallPiece)]
        if self.done:
            calls += [c for c in self._calls.end() if isinstance(c, CallPiece)]
        return self._writer.cycle([p for p in pieces if p.thinking], self._emitted, calls)

    def result(self, stop: StopReason | None) -> messages.Result:
        pieces = self._script[: self._emitted]
        texts = {
            kind: "".join(p.text for p in pieces if p.thinking is kind) for kind in (True, False)
        }
        thinking = sum(piece.thinking for piece in pieces)
        decoded = outcome.Decoded(
            finish=stop or ("length" if self._cut else "stop"),
            text="" if self._prepared.tools else texts[False].rstrip(" "),
            reuse=NO_REUSE,
            calls=self._calls if self._prepared.tools else None,
            thinking=texts[True],
            tokens=tuple(range(self._emitted)),
            usage=Usage(
                prompt_tokens=len(self._prepared.prompt),
                cached_tokens=self._prepared.cached,
                thinking_tokens=thinking,
                output_tokens=len(pieces) - thinking,
            ),
            timings=self._timings(),
            spec=_spec(self._emitted),
            closed="natural" if thinking and self._emitted > thinking else "",
            images=self._images.results(self._prepared.pictures, self._encode_ms)
            if self._images
            else None,
        )
        return outcome.result(self._prepared, decoded)

    def _timings(self) -> Timings:
        e2e = self._ms()
        if not self._firsts:
            return Timings(e2e_ms=e2e)
        first = min(self._firsts.values())
        decode = e2e - first
        return Timings(
            prefill_ms=first,
            ttft_ms=first,
            ttfa_ms=self._firsts.get(False),
            decode_ms=decode,
            e2e_ms=e2e,
            tok_s=rate(self._emitted, decode),
        )

    def _ms(self) -> float:
        return 1e3 * (time.perf_counter() - self._start)

    def close(self) -> None:
        pass
