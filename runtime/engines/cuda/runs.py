"""What the stream was given and how long it took, told once it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thor_dflash.runtime.engines.cuda.capture import Captured


@dataclass(slots=True)
class Runs:
    """Runs of captured steps, in order."""

    latest: Captured | None = None
    """What ran last, as long as what it handed over is what the device has."""
    noted: list[float] | None = None
    """Where the time of each run is told, too, s."""
    _running: list[Captured] = field(default_factory=list[Captured])
    _ended: list[Captured] = field(default_factory=list[Captured])
    _seconds: dict[str, float] = field(default_factory=dict[str, float])
    _left: bool = False

    def run(self, captured: Captured) -> None:
        """Enqueue a step."""
        captured.run()
        self._running.append(captured)
        self.latest = captured

    def idle(self) -> None:
        """All work of the stream is done."""
        self._end(len(self._running))
        self._left = False

    def idle_before(self) -> None:
        """All work of the stream before the last run is done, and what that one hands over."""
        self._end(len(self._running) - 1)
        self._left = True

    def _end(self, count: int) -> None:
        for captured in self._running[:count]:
            captured.ended(1)
        self._ended += self._running[:count]
        del self._running[:count]

    @property
    def left(self) -> bool:
        """Whether the last run may go on although all that was asked of it has been given."""
        return self._left

    @property
    def ended(self) -> bool:
        """Whether runs have ended whose time was not asked for."""
        return bool(self._ended)

    def collect(self) -> None:
        """Ask how long those took."""
        for captured in self._ended:
            each = captured.collect()
            self._seconds[captured.name] = self._seconds.get(captured.name, 0.0) + sum(each)
            if self.noted is not None:
                self.noted += each
        self._ended.clear()

    @property
    def seconds(self) -> Mapping[str, float]:
        """By name, of all that was collected."""
        return dict(self._seconds)
