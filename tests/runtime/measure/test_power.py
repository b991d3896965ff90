"""Power and temperature, read from sysfs files laid out like those of a Jetson."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from thor_dflash.runtime.measure import power as sensors
from thor_dflash.runtime.measure.power import (
    PowerSampler,
    Sample,
    Sensor,
    energy,
    find_sensors,
    junction,
)


def write(root: Path, chip: str, **files: str) -> Path:
    """Make the directory of a chip or thermal zone under sys/class, with these files in it."""
    path = root / "sys/class" / chip
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name).write_text(text + "\n")
    return path


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """Two power chips with three readable rails and one that cannot be read, beside a disk's
    sensors, which must be left out. Of two thermal zones, the junction's is at 51.5 degrees.
    """
    write(tmp_path, "hwmon/hwmon0", name="nvme", temp1_input="40000", label="VDD_DISK",
          power1_input="7")  # fmt: skip
    write(tmp_path, "hwmon/hwmon1", name="ina238", label="VIN", power1_input="61500000",
          in1_input="1", curr1_input="1")  # fmt: skip
    write(tmp_path, "hwmon/hwmon2", name="ina3221", in1_label="VDD_GPU", in1_input="20000",
          curr1_input="1500", in2_label="VDD_OFF", in2_input="0", curr2_input="n/a",
          in3_label="VDD_CPU", in3_input="5000", curr3_input="-78")  # fmt: skip
    write(tmp_path, "thermal/thermal_zone0", type="cpu-thermal", temp="99000")
    write(tmp_path, "thermal/thermal_zone1", type="tj-thermal", temp="51500")
    return tmp_path


def test_every_rail_that_can_be_read_is_found_by_its_name(board: Path) -> None:
    found = {sensor.name: sensor.watts() for sensor in find_sensors(board)}
    assert found == pytest.approx({"VDD_CPU": -0.39, "VDD_GPU": 30.0, "VIN": 61.5})
    assert list(found) == sorted(found)


def test_the_junction_is_the_zone_of_that_name(board: Path, tmp_path: Path) -> None:
    assert junction(board) == board / "sys/class/thermal/thermal_zone1/temp"
    assert junction(tmp_path / "elsewhere") is None
    assert find_sensors(tmp_path / "elsewhere") == []


@pytest.mark.parametrize(
    ("start", "end", "joules"),
    [
        (1.0, 3.0, 60.0),  # from the first sample to the last
        (1.5, 2.0, 17.5),  # within one interval, from 30 W to 40 W
        (0.0, 1.0, 20.0),  # before the first sample, whose power holds
        (3.0, 5.0, 40.0),  # after the last sample, whose power holds
        (0.5, 3.5, 10.0 + 60.0 + 10.0),
    ],
)
def test_energy_is_the_area_under_the_samples(start: float, end: float, joules: float) -> None:
    assert energy([1.0, 2.0, 3.0], [20.0, 40.0, 20.0], start, end) == pytest.approx(joules)


def watched(at: list[float], watts: list[float]) -> PowerSampler:
    """A Watch over one rail that has already taken these samples."""
    path = Path("none")
    watch = PowerSampler([Sensor("VIN", path, path, path)])
    watch._samples = [Sample(when, (w,), None) for when, w in zip(at, watts, strict=True)]
    return watch


def test_idle_is_before_the_rest_has_ended_and_an_answer_takes_its_own_energy() -> None:
    at = [float(i) for i in range(11)]
    watts = [5.0, 7.0, 90.0, 30.0, 30.0, 30.0, 10.0, 50.0, 50.0, 50.0, 50.0]
    watch = watched(at, watts)
    watch._rested = 1.5  # the 90 W at 2 s are of the warm-up, so not of the idle board
    (rail,) = watch.power([(3.0, 5.0), (7.0, 8.0), (8.0, 9.0)]).rails
    assert rail.idle_w == pytest.approx(6.0)
    assert rail.joules == pytest.approx(50.0)  # the median of 60, 50 and 50
    assert rail.mean_w == pytest.approx(160 / 4)
    (rail,) = watch.power([(3.0, 5.0), (7.0, 8.0)]).rails
    assert rail.joules == pytest.approx(50.0)  # of 60 and 50 the lower, as of times


def test_sensors_are_read_until_the_end_and_no_longer(board: Path) -> None:
    with PowerSampler(find_sensors(board), junction(board), period=0.001) as watch:
        start = time.perf_counter()
        deadline = start + 20
        while len(watch._samples) < 5 and time.perf_counter() < deadline:
            time.sleep(0.002)
        end = time.perf_counter()
    count = len(watch._samples)
    power = watch.power([(start, end)])
    assert {rail.name: rail.mean_w for rail in power.rails} == pytest.approx(
        {"VDD_CPU": -0.39, "VDD_GPU": 30.0, "VIN": 61.5}
    )
    assert power.rails[2].joules == pytest.approx(61.5 * (end - start))
    assert (power.hottest_c, power.failed, watch.hung) == (51.5, "", False)
    time.sleep(0.01)
    assert len(watch._samples) == count


def test_without_sensors_nothing_runs_and_nobody_rests() -> None:
    with PowerSampler([]) as watch:
        watch.rest()
        assert watch._thread is None
        assert watch._rested == 0
    power = watch.power([(0.0, 1.0)])
    assert (power.rails, power.hottest_c, power.failed) == ((), None, "")


def test_nobody_waits_for_a_sensor_that_hangs(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors, "PATIENCE", 0.05)
    found = find_sensors(board)
    path = board / "sys/class/hwmon/hwmon1/power1_input"
    path.unlink()
    os.mkfifo(path)  # a reader blocks until somebody writes
    # Without a limit the wait would end here, so that the test fails instead of hanging.
    late = threading.Timer(10, path.write_text, ["1"])
    late.start()
    with PowerSampler(found, period=0.001) as watch:
        pass
    assert watch.hung
    assert watch.power([(0.0, 1.0)]).failed == "a sensor gave no reading for 0.05 s"
    monkeypatch.setattr(sensors, "PATIENCE", 3600.0)
    watch.stop()
    assert watch._thread
    assert watch._thread.is_alive(), "once was enough"
    late.cancel()
    path.write_text("1")  # lets the sampling thread end


def test_a_sensor_that_hangs_at_the_start_is_left_out_with_the_others(
    board: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_sensors(board)
    monkeypatch.setattr(sensors, "PATIENCE", 0.05)
    path = board / "sys/class/hwmon/hwmon1/power1_input"
    path.unlink()
    os.mkfifo(path)
    late = threading.Timer(10, path.write_text, ["1"])
    late.start()
    assert find_sensors(board) == []
    late.cancel()
    path.write_text("1")  # lets the searching thread end


def test_a_sensor_that_hangs_does_not_keep_a_finished_process_alive(tmp_path: Path) -> None:
    pipe = tmp_path / "power"
    os.mkfifo(pipe)
    code = (
        "import sys; from pathlib import Path; path = Path(sys.argv[1]); "
        "from thor_dflash.runtime.measure.power import PowerSampler, Sensor; "
        "PowerSampler([Sensor('VIN', path, path, path)]).start()"
    )
    subprocess.run([sys.executable, "-c", code, str(pipe)], check=True, timeout=30)


def test_a_sensor_that_disappears_is_reported(board: Path) -> None:
    with PowerSampler(find_sensors(board), junction(board), period=0.001) as watch:
        while len(watch._samples) < 2:
            time.sleep(0.002)
        (board / "sys/class/hwmon/hwmon1/power1_input").unlink()
        assert watch._thread is not None
        watch._thread.join(20)
        assert not watch._thread.is_alive()
    power = watch.power([(0.0, 1.0)])
    assert "power1_input" in power.failed
    assert len(power.rails) == 3
