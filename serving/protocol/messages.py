"""TDP/1 on the wire: every message as a typed struct. `docs/reference/protocol.md` describes them.

The server refuses unknown fields of a request by name; clients ignore those of a reply.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from thor_dflash.core.bounds import Count, Positive
from thor_dflash.core.errors import Code
from thor_dflash.core.results import Speculation, Timings, Usage
from thor_dflash.serving.protocol.skills import PlanFormatName, SkillSet

VERSION = 1
PORT = 5571
"""Not 5555, the port of a GR00T server, which may run on the same machine."""

NO_ID = "-"
"""The id of a request that was given none."""
Id = Annotated[str, Meta(min_length=1, max_length=64)]
Milliseconds = Annotated[int, Meta(ge=1, le=86_400_000)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Role = Literal["system", "user", "assistant", "tool"]
Part = Literal["plan", "text", "thinking", "tokens", "timings"]
Stream = Literal["steps", "text", "all"]
Finish = Literal[
    "stop", "tool_calls", "length", "thinking_exhausted", "deadline", "cancelled", "preempted",
    "grammar_dead_end", "error", "forced",
]  # fmt: skip
Kind = Literal["step", "thinking", "text", "call", "progress"]
Phase = Literal["prefill", "thinking", "answer"]
Status = Literal["ok", "partial", "error"]
State = Literal["loading", "warming", "ready", "busy", "degraded", "draining", "failed"]


ImageFormat = Literal["jpeg", "png", "rgb8", "bgr8", "mono8"]


class TextPart(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text", gc=False
):
    """A text of a message that also shows images."""

    text: str


class ImageDigest(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The name of an image that this client has sent before."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """As in the `images` of a result."""


class ImagePart(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image", gc=False
):
    """An image of a message."""

    image: Id | ImageDigest
    """The `id` of one of the request's `images`, or an image of an earlier request."""

    @property
    def name(self) -> str:
        """Its id, or its digest."""
        return self.image if isinstance(self.image, str) else self.image.sha256


class ImageInput(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, gc=False
):
    """An image of a request."""

    id: Id
    format: ImageFormat
    data: bytes
    """The file, or the rows of pixels; in JSON as base64."""
    width: Count = 0
    """Of raw pixels; so are the next two."""
    height: Count = 0
    step: Count = 0
    """Bytes of a row; 0: rows follow each other."""
    max_pixels: Count = 0
    """Most pixels after resizing; 0: the server's limit."""


class ImageSize(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """An image of which only the tokens are counted: of its file or its pixels, in pixels."""

    id: Id
    width: Count
    height: Count
    max_pixels: Count = 0
    """As that of a plan's image."""


class Message(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, gc=False
):
    """One turn of a chat. It is never part of a cycle, so the garbage collector need not follow it:
    a request may have thousands.
    """

    role: Role
    content: str | tuple[TextPart | ImagePart, ...]
    """Parts only where the request has images, in messages of users and tools."""
    reasoning_content: str | None = None
    tool_calls: tuple[dict[str, Any], ...] | None = None
    """Of an assistant: OpenAI's objects, with the arguments as an object or its JSON text."""
    tool_call_id: str | None = None
    """Of a tool: the call that this is the result of."""


class SchemaWrapper(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """OpenAI's wrapper around a schema."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's spelling of a request for a schema."""

    type: Literal["json_schema"]
    json_schema: SchemaWrapper


class _Request(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The fields of every request, beside its `op`."""

    v: int = VERSION
    id: Id = NO_ID
    token: str | None = None


class PlanRequest(_Request, frozen=True):
    """`plan`: one prompt to answer with a plan. None stands for the server's default."""

    op: str = "plan"
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    images: tuple[ImageInput, ...] = ()
    """What parts of the messages show."""
    prefix_id: Id | None = None
    json_schema: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    skills: SkillSet | None = None
    """The robot's skills, of which the server makes what the answer obeys."""
    plan_format: PlanFormatName = "json_steps"
    """What the answer is; any but the first needs `skills`."""
    tools: tuple[dict[str, Any], ...] | None = None
    """OpenAI's objects, in the order and with the keys that the prompt is to have."""
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables that the package's chat template reads."""
    conversation: Id | None = None
    """A name for the conversation that this turn belongs to: a hint for reuse, nothing else."""
    cache_scope: Id | None = None
    """Only turns of one client and one scope reuse each other's state."""
    thinking: Literal["on", "off", "auto"] | None = None
    thinking_budget: Count | None = None
    thinking_token_budget: Count | None = None
    reasoning_effort: Effort | None = None
    max_tokens: Positive | None = None
    deadline_ms: Milliseconds | None = None
    on_deadline: Literal["partial", "error"] = "partial"
    priority: Annotated[int, Meta(ge=0, le=9)] = 5
    preempt: Literal["none", "same_session", "lower"] = "same_session"
    session: Id | None = None
    generation: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    stream: bool | Stream = False
    accept_mode: Literal["exact", "relaxed_thinking"] = "exact"
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Count | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    acceptance: Literal["coupled", "rejection"] = "coupled"
    stop: str | tuple[str, ...] | None = None
    drafts: str | tuple[str, ...] | None = None
    """Texts that the answer after the thinking may repeat, such as the plan before it. They change
    how fast, never what."""
    forced_answer: Message | None = None
    """An assistant's message to commit as the answer, whatever the model would choose."""
    forced_accept: Annotated[float, Meta(ge=1, le=1024)] | None = None
    """Tokens of it to commit per cycle; None: as many as the drafter agrees with."""
    parts: tuple[Part, ...] = field(default=("plan", "text", "timings"), name="return")
    metadata: dict[str, Any] | None = None


class Simple(_Request, frozen=True):
    """An operation without arguments, such as `hello` or `health`."""

    op: str


class Cancel(_Request, frozen=True):
    """`cancel`: end a plan, from its own connection or from any other that names its session."""

    target: Id
    op: str = "cancel"
    session: Id | None = None


class Validate(_Request, frozen=True):
    """`validate`: count tokens and compile a schema without decoding."""

    op: str = "validate"
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    images: tuple[ImageSize, ...] = ()
    """What parts of the messages show."""
    json_schema: dict[str, Any] | None = None
    skills: SkillSet | None = None
    plan_format: PlanFormatName = "json_steps"


class PrefixPut(_Request, frozen=True):
    """`prefix.put`: pin the state of a system prompt under a name."""

    prefix_id: Id
    system: str
    persist: bool = False
    """Whether the prefix is kept on disk, so that it outlives the server."""
    op: str = "prefix.put"


class PrefixDrop(_Request, frozen=True):
    """`prefix.drop`: forget a pinned state."""

    prefix_id: Id
    op: str = "prefix.drop"


class SessionDrop(_Request, frozen=True):
    """`session.drop`: a conversation of this client has ended; free the states kept of it."""

    session: Id
    """Its name, as the `conversation` or `session` of its plans."""
    op: str = "session.drop"
    cache_scope: Id | None = None
    """As that of its plans."""


Request = PlanRequest | Simple | Cancel | Validate | PrefixPut | PrefixDrop | SessionDrop


class CallDelta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a tool call, as it is decoded."""

    index: int
    """Of the call within the answer, from 0."""
    name: str = ""
    """In the first part of a call only."""
    arguments: str = ""
    """The next characters of the JSON text of its arguments."""
    done: bool = False
    """The call is complete."""


class CallResult(Struct, frozen=True, kw_only=True):
    """A complete tool call."""

    name: str
    arguments: dict[str, Any]
    text: str
    """The JSON text of the arguments, with numbers as the model wrote them."""


class ReuseResult(Struct, frozen=True, kw_only=True):
    """What a turn reused of earlier ones."""

    boundary: str = ""
    """What it continued from: a pinned `prefix`, the end of a `system` turn, of a `user` turn or of
    a `prompt`; empty: nothing."""
    held: int = 0
    """Prompt tokens that were not read."""
    reread: int = 0
    """Tokens that were read although a kept earlier prompt begins with them, too."""
    diverged_at: int = 0
    """Tokens in common with the kept earlier prompt that is most like this one."""
    why: str = ""
    """Why nothing was reused: off, first, diverged, evicted or too_short."""
    swap_ms: float = 0.0
    """Host time of copying states, ms."""


class ImageResult(Struct, frozen=True, kw_only=True):
    """An image as the model saw it."""

    id: str
    """In the request; its sha256 if the request named it so."""
    sha256: str
    """Of the size and the pixels after resizing."""
    width: int
    """After resizing."""
    height: int
    tokens: int
    """Of the prompt."""
    encode_ms: float = 0.0
    """Time of the vision tower."""
    cached: bool = False
    """The tower did not run: its rows were kept, or no row was read at all."""


class Chunk(Struct, frozen=True, kw_only=True):
    """A piece of a streamed plan, before its result."""

    kind: Kind
    id: str | None = None
    type: Literal["chunk"] = "chunk"
    v: int = VERSION
    seq: int = 0
    text: str | None = None
    step: dict[str, Any] | None = None
    index: int | None = None
    call: CallDelta | None = None
    phase: Phase | None = None
    tokens: int | None = None


class Result(Struct, frozen=True, kw_only=True):
    """A finished plan. `plan` is complete JSON or null, never a fragment."""

    finish_reason: Finish
    status: Status = "ok"
    v: int = VERSION
    id: str | None = None
    type: Literal["result"] = "result"
    seq: int = 0
    plan: dict[str, Any] | None = None
    plan_valid: bool = False
    text: str | None = None
    thinking: str | None = None
    tool_calls: tuple[CallResult, ...] | None = None
    """The complete calls; None if there are none."""
    cut_call: int | None = None
    """Index of the last call of which chunks were sent but that never ended."""
    notes: tuple[str, ...] = ()
    """What was taken otherwise than it was written, such as an argument of a wrong type."""
    tokens: tuple[int, ...] | None = None
    generation: int | None = None
    session: str | None = None
    prefix_id: str | None = None
    seed: int | None = None
    """Seed that the tokens were drawn with; None: greedy."""
    acceptance: Literal["coupled", "rejection"] | None = None
    """Of the drafts of drawn tokens; None: greedy. With rejection the seed does not repeat them."""
    accept_mode: str = "exact"
    thinking_closed: Literal["", "natural", "soft", "hard", "call"] = ""
    """How the thinking ended: by itself ("natural"), by its budget, or with a tool call; "" if it
    did not end."""
    thinking_budget: int = 0
    """Most thinking tokens, as the request, its effort, the server or the context limited them."""
    usage: Usage = Usage()
    images: tuple[ImageResult, ...] | None = None
    """Those of the request, in its order; None if it had none."""
    reuse: ReuseResult | None = None
    timings: Timings | None = None
    spec: Speculation | None = None
    metadata: dict[str, Any] | None = None


class ErrorReply(Struct, frozen=True, kw_only=True):
    """The error that answers a request that was not served."""

    code: Code
    message: str
    v: int = VERSION
    id: str | None = None
    type: Literal["error"] = "error"
    seq: int = 0
    retryable: bool = False
    retry_after_ms: float | None = None
    min_ms: int | None = None
    field: str | None = None


Event = Chunk | Result
