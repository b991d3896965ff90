"""The power sensors of the machine, as far as plans may use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thor_dflash.runtime.measure.power import PowerSampler, Sensor


class PowerMeter:
    """Watches the sensors during each plan, until one of them hangs."""

    def __init__(self, sensors: Sequence[Sensor], log: Callable[[str], None]) -> None:
        self._sensors = sensors
        self._log = log
        self._last = PowerSampler(())

    def watch(self) -> PowerSampler:
        """Return the watch of the next plan. After a reading that hung it watches nothing: every
        plan would wait for its own reading, and leave behind the thread that hangs in it.
        """
        if self._last.hung:
            self._sensors = ()
            self._log("a power sensor hangs: plans have no energy_j until the server's next start")
        self._last = PowerSampler(self._sensors)
        return self._last
