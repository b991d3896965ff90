"""What is under way and no job: each `validate` and `prefix.drop`, within bounds. One thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from thor_dflash.errors import PlanError
from thor_dflash.serving import wire
from thor_dflash.serving.life import RETRY_MS
from thor_dflash.serving.schedule import Peer
from thor_dflash.serving.work import Owed

MOST = 16
"""Of all clients: each holds a message, and takes the clerk a second at worst."""
EACH = 4
"""Of one client."""


@dataclass(slots=True)
class Dues:
    """Each holds its room until a thread is done with it, even where nobody waits any more."""

    _taken: list[Owed] = field(default_factory=list[Owed])

    def take(self, peer: Peer, request: wire.Validate | wire.PrefixDrop) -> Owed:
        """Take one in.

        Raises:
            PlanError: busy.
        """
        for whose, most, got in (
            ("all clients", MOST, len(self._taken)),
            ("one client", EACH, sum(one.peer.client == peer.client for one in self._taken)),
        ):
            if got >= most:
                text = f"validate and prefix.drop of {whose} must be <= {most} (got as many)"
                raise PlanError("busy", text, retry_after_ms=RETRY_MS)
        self._taken.append(owed := Owed(peer, request))
        return owed

    def settle(self, owed: Owed) -> bool:
        """A thread is done with one; whether anybody waits for the answer."""
        self._taken.remove(owed)
        return not owed.given_up

    def give_up(self, hers: Callable[[Peer], bool] = lambda peer: True) -> list[Owed]:
        """Have nobody wait any more for those of some peers; these are they."""
        found = [one for one in self._taken if not one.given_up and hers(one.peer)]
        for one in found:
            one.given_up = True
        return found

    @property
    def idle(self) -> bool:
        """Whether nobody waits for any."""
        return all(one.given_up for one in self._taken)
