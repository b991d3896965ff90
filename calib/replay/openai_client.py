"""Streams chat completions from an OpenAI server over one HTTP connection, with the standard
library alone, and notes when each part arrives.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from thor_dflash.core.errors import PlanError, RequestError
from thor_dflash.core.message_text import show
from thor_dflash.core.strict_records import as_list, as_table

TURN_S = 600.0
"""Longest time of a turn, s: the benchmark's limit."""
_Table = Mapping[str, Any]


@dataclass(slots=True)
class StreamedAnswer:
    """An answer as it arrived. Times are seconds since the request was sent."""

    first_s: float | None = None
    """First text, thinking or part of a call."""
    last_s: float | None = None
    text: str = ""
    finish: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """OpenAI's form, put together from the parts."""
    usage: _Table = field(default_factory=dict[str, Any])
    extra: _Table = field(default_factory=dict[str, Any])
    """The field `thor_dflash`, which only our servers send."""

    def feed(self, chunk: _Table, at: float) -> None:
        """Take in one chunk of the stream."""
        self.usage = as_table(chunk.get("usage")) or self.usage
        self.extra = {**self.extra, **(as_table(chunk.get("thor_dflash")) or {})}
        for choice in map(as_table, as_list(chunk.get("choices")) or []):
            choice = choice or {}
            self.finish = str(choice.get("finish_reason") or self.finish)
            delta = as_table(choice.get("delta")) or {}
            words = (delta.get(k) for k in ("content", "reasoning_content", "reasoning"))
            parts = as_list(delta.get("tool_calls")) or []
            if parts or any(words):
                self.first_s = at if self.first_s is None else self.first_s
                self.last_s = at
            self.text += str(delta.get("content") or "")
            for part in parts:
                self._call(as_table(part) or {})

    def _call(self, part: _Table) -> None:
        index = part.get("index")
        at = index if isinstance(index, int) and 0 <= index <= len(self.calls) else len(self.calls)
        if at == len(self.calls):
            self.calls.append({"function": {"name": "", "arguments": ""}})
        function: _Table = as_table(part.get("function")) or {}
        for key in ("name", "arguments"):
            self.calls[at]["function"][key] += str(function.get(key) or "")


class OpenAIConnection:
    """One connection to `/v1`, which is opened again only after an error."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float = TURN_S) -> None:
        """
        Args:
            url: Base address, such as http://127.0.0.1:8000/v1.
            headers: Sent with every request.
            timeout_s: Longest time of one answer.

        Raises:
            RequestError: `url` is none.
        """
        found = urlsplit(url)
        if found.scheme not in ("http", "https") or not found.hostname:
            raise RequestError(f"--url must be http://HOST:PORT/v1 (got {show(url)})")
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        try:
            self._connection = kinds[found.scheme](found.hostname, found.port, timeout=timeout_s)
        except ValueError as e:
            raise RequestError(f"--url must be http://HOST:PORT/v1 (got {show(url)})") from e
        self._path = found.path.rstrip("/")
        self._headers = dict(headers)
        self._timeout_s = timeout_s

    def model(self) -> str:
        """The first model that the server lists.

        Raises:
            PlanError: unreachable; it cannot be reached.
            RequestError: it refuses, or lists none.
        """
        with _closing_after_errors(self._connection):
            self._connection.request("GET", f"{self._path}/models", headers=self._headers)
            table = self._json(self._connection.getresponse())
        models = [as_table(m) or {} for m in as_list(table.get("data")) or []]
        if not models or not isinstance(models[0].get("id"), str):
            raise RequestError("the server must list a model (got none); name one with --model")
        return str(models[0]["id"])

    def stream(self, body: _Table, headers: Mapping[str, str]) -> StreamedAnswer:
        """Send a request with `stream` and wait for its whole answer.

        Raises:
            PlanError: unreachable; the server cannot be reached, or takes longer than the limit.
            RequestError: it refuses the request, or ends the stream early.
        """
        data = json.dumps(body, ensure_ascii=False).encode()
        every = {**self._headers, **headers, "Content-Type": "application/json"}
        answer = StreamedAnswer()
        start = time.perf_counter()
        with _closing_after_errors(self._connection):
            self._connection.request("POST", f"{self._path}/chat/completions", data, every)
            response = self._connection.getresponse()
            if response.status != 200:
                self._json(response)
            for event in self._events(response, start):
                answer.feed(event, time.perf_counter() - start)
        return answer

    def _events(self, response: http.client.HTTPResponse, start: float) -> Iterator[_Table]:
        while line := response.readline():
            if time.perf_counter() - start > self._timeout_s:
                raise TimeoutError
            name, _, data = line.decode("utf-8", "replace").strip().partition(":")
            if name != "data":
                continue
            if data.strip() == "[DONE]":
                response.read()  # so that the connection can be used again
                return
            table = as_table(_parsed(data)) or {}
            if "error" in table:
                raise RequestError(f"the server must answer (got {show(table['error'])})")
            yield table
        raise RequestError("the stream must end with [DONE] (got its end without)")

    def _json(self, response: http.client.HTTPResponse) -> _Table:
        data = response.read()
        table = as_table(_parsed(data.decode("utf-8", "replace")))
        if response.status != 200 or table is None:
            error: object = (table or {}).get("error", data.decode("utf-8", "replace"))
            message = (as_table(error) or {}).get("message", error)
            raise RequestError(
                f"the server must answer with 200 (got {response.status}: {message})"
            )
        return table

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _parsed(data: str) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


@contextmanager
def _closing_after_errors(connection: http.client.HTTPConnection) -> Generator[None]:
    """Close a connection whose answer was not read to its end; name what failed."""
    try:
        yield
    except BaseException as e:
        connection.close()
        if isinstance(e, TimeoutError):
            text = "the server must answer within the limit of a turn (got no end)"
            raise PlanError("unreachable", text) from e
        if isinstance(e, (OSError, http.client.HTTPException)):
            at = f"{connection.host}:{connection.port}"
            text = f"the server at {at} must be reachable (got {type(e).__name__}: {e})"
            raise PlanError("unreachable", text) from e
        raise
