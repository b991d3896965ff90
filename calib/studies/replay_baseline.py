"""The classic cycle: snapshot, verify, restore, replay. A reference for the lazy fold, which
replaces it.

It takes two verifies per block instead of one, and a copy of the whole state. It uses no records,
accepted counts or forced ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from thor_dflash.runtime.session import Session


@dataclass(slots=True)
class Replay:
    """Decodes greedily by the classic cycle, with drafts of any origin."""

    session: Session
    guess: Callable[[Sequence[int]], Sequence[int]]
    """Tokens of the answer so far -> up to R - 1 drafts."""
    verifies: int = 0
    copied: int = 0
    """Bytes of all snapshots taken."""

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return `count` tokens after a prompt."""
        model = self.session.model
        model.state.reset()
        rows = prompt[:-1]
        for start in range(0, len(rows), model.chunk):
            model.prefill(rows[start : start + model.chunk], observe=False)
        tokens: list[int] = []
        while len(tokens) < count:
            last = tokens[-1] if tokens else prompt[-1]
            tokens += self._cycle(last, self.guess(tokens))
        return tokens[:count]

    def _cycle(self, last: int, drafts: Sequence[int]) -> list[int]:
        model = self.session.model
        before = model.state.snapshot()
        self.copied += sum(array.nbytes for array in before.arrays.values())
        drafts = list(drafts)[: model.block - 1]
        model.write_tokens([last, *drafts])
        model.verify()
        self.verifies += 1
        best = model.read("logits")[:, : model.manifest.vocab_limit].argmax(axis=1)
        hits = np.array(drafts) == best[: len(drafts)]
        agreed = int(np.argmin([*hits, False]))
        model.state.restore(before)
        model.write_tokens([last, *drafts[:agreed]])
        model.verify()
        self.verifies += 1
        model.state.commit(agreed + 1)
        return [*drafts[:agreed], int(best[agreed])]
