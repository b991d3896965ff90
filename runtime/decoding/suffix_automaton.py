"""A suffix automaton: the longest end of a text that occurred in it before, as the text grows.

Source: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), built
online. Appending a token takes constant time, amortised, and following one that is not appended as
well. A text of n tokens has at most 2n states.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROOT = 0


@dataclass(frozen=True, slots=True)
class TextMatch:
    """The longest end of some tokens that occurs in a text."""

    state: int
    length: int
    """Its tokens; 0: none."""


NO_MATCH = TextMatch(ROOT, 0)


class SuffixAutomaton:
    """A text of token ids. Negative ids are separators: none may occur twice."""

    def __init__(self) -> None:
        self.text = array("i")
        # Most states have one edge. It is kept in two arrays; only states with more have a table.
        self._token = array("i", [-1])
        self._target = array("i", [-1])
        self._more: dict[int, dict[int, int]] = {ROOT: {}}
        self._link = array("i", [-1])
        self._length = array("i", [0])
        self._end = array("i", [-1])
        self._last = ROOT
        self._before = -1
        """Where the match of the whole text last ended, before the text's own end."""

    def __len__(self) -> int:
        return len(self.text)

    @property
    def match(self) -> TextMatch:
        """The longest end of the text that also occurs earlier in it."""
        state = self._link[self._last] if self._last else ROOT
        return TextMatch(state, self._length[state])

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        length, link, more = self._length, self._link, self._more
        first, target = self._token, self._target
        state, new = self._last, len(length)
        first.append(-1)
        target.append(-1)
        length.append(length[state] + 1)
        self._end.append(len(self.text))
        link.append(ROOT)
        found = -1
        while state >= 0:
            if first[state] == token:
                found = target[state]
                break
            table = more.get(state)
            if table is None:
                if target[state] < 0:
                    first[state], target[state] = token, new
                else:
                    more[state] = {token: new}
            else:
                found = table.get(token, -1)
                if found >= 0:
                    break
                table[token] = new
            state = link[state]
        if found >= 0:
            if length[found] != length[state] + 1:
                found = self._split(state, token, found)
            link[new] = found
        self._last = new
        match = link[new]
        self._before = self._end[match]
        self._end[match] = len(self.text)
        self.text.append(token)

    def _split(self, state: int, token: int, old: int) -> int:
        """Give the shorter strings of `old` a state of their own, and return it."""
        new = len(self._length)
        self._token.append(self._token[old])
        self._target.append(self._target[old])
        self._length.append(self._length[state] + 1)
        self._end.append(self._end[old])
        self._link.append(self._link[old])
        if table := self._more.get(old):
            self._more[new] = dict(table)
        self._link[old] = new
        while state >= 0:
            if self._token[state] == token and self._target[state] == old:
                self._target[state] = new
            else:
                table = self._more.get(state)
                if table is None or table.get(token) != old:
                    break
                table[token] = new
            state = self._link[state]
        return new

    def follow(self, match: TextMatch, tokens: Sequence[int]) -> TextMatch:
        """The longest end of the match and these tokens after it that occurs in the text."""
        state, length = match.state, match.length
        for token in tokens:
            while (target := self._next(state, token)) < 0 and state:
                state = self._link[state]
                length = self._length[state]
            state, length = (target, length + 1) if target >= 0 else (ROOT, 0)
        return TextMatch(state, length)

    def _next(self, state: int, token: int) -> int:
        if self._token[state] == token and self._target[state] >= 0:
            return self._target[state]
        table = self._more.get(state)
        return -1 if table is None else table.get(token, -1)

    def shorter(self, match: TextMatch) -> TextMatch:
        """The longest shorter end of a match that also occurs somewhere else."""
        state = self._link[match.state] if match.state else ROOT
        return TextMatch(state, self._length[state])

    def end(self, match: TextMatch) -> int:
        """Index of the last token of a match's newest occurrence before the end of the text, or of
        an older one: an occurrence within a longer match is not always noted. -1: none.
        """
        at = self._end[match.state] if match.length else -1
        if at == len(self.text) - 1:
            return self._before if match.state == self._link[self._last] else -1
        return at
