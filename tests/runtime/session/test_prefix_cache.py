"""The law of prefixes: a request that continues from a stored prefix gives bit for bit the answer
that it gives without one.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.coverings import some
from support.loop_models import answer, prompt, session

from thor_dflash.core.errors import PackageError, RequestError, TransactionError
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter, Proposer
from thor_dflash.runtime.session import Request, Session, prefix_file
from thor_dflash.runtime.session.prefix_cache import PrefixCache, cached_length
from thor_dflash.runtime.session.prefix_file import HEADER

CHUNK = 32
LONG = prompt(300, seed=40)


@pytest.fixture
def s() -> Iterator[Session]:
    """The session that tests share. It has no prefixes; those that a test adds are forgotten."""
    found = session()
    yield found
    found.prefixes = PrefixCache(found.model)


def state_after(s: Session, request: Request, proposer: Proposer) -> dict[str, bytes]:
    """Every bit of state that later steps can read, when the prefill of this request has ended."""
    answers = s.run(request, proposer)
    while (done := next(answers).prompt_done) < len(request.prompt) - 1:
        assert done
    answers.close()
    return {name: array.tobytes() for name, array in s.model.state.snapshot().arrays.items()}


@pytest.mark.parametrize(
    ("length", "more"),
    some(
        [(1, 1), (31, 2), (32, 31), (33, 1), (34, 33), (64, 1), (64, 32), (65, 70), (100, 31),
         (129, 2)],
        [(1, 1), (32, 31), (33, 1), (64, 32), (65, 70), (129, 2)],
        pytest.mark.slow,
    ),
)  # fmt: skip
def test_a_request_with_a_prefix_is_the_request_without(s: Session, length: int, more: int) -> None:
    request = Request(prompt=LONG[: length + more], max_tokens=12)
    want = state_after(s, request, DflashDrafter())
    truth = answer(s, request, DflashDrafter())
    plain = s.report().spec
    s.prefixes.put("skills", LONG[:length])
    held = cached_length(length, CHUNK)
    # Another request in between, so that the state it leaves is not what the prefix would restore.
    answer(s, Request(prompt=prompt(90, 9), max_tokens=3), DflashDrafter())
    assert s.report().usage.cached_tokens == 0
    assert state_after(s, request, DflashDrafter()) == want
    assert answer(s, request, DflashDrafter()) == truth
    assert s.report().usage.cached_tokens == held
    # The drafter's rings are the same, too: it drafts what it drafts without the prefix.
    assert s.report().spec == plain
    assert answer(s, request, NoDrafter()) == truth
    assert answer(s, request, DflashDrafter()) == truth
    assert s.report().spec == plain, "what a request without a drafter hid is there again"


def test_the_longest_that_fits_is_used(s: Session) -> None:
    for length in (40, 100, 170):
        s.prefixes.put(f"first {length}", LONG[:length])
    s.prefixes.put("other", prompt(200, seed=41))
    for length, cached in ((33, 32), (96, 32), (97, 96), (160, 96), (161, 160), (250, 160)):
        request = Request(prompt=LONG[:length], max_tokens=4)
        found = s.prefixes.find(request.prompt)
        assert found
        assert found.held == cached
        answer(s, request, DflashDrafter())
        assert s.report().usage.cached_tokens == cached


def test_a_prompt_that_differs_at_any_held_position_does_not_use_the_prefix(s: Session) -> None:
    """At each of them, the last one included, so that not one token of it has been read."""
    helds = [cached_length(length, CHUNK) for length in (33, 70, 97, 130)]
    for held in helds:
        s.prefixes.put(f"first {held}", LONG[: held + 1])
    for at in range(helds[-1] + 2):
        other = (*LONG[:at], LONG[at] ^ 1, *LONG[at + 1 :])
        found, most = s.prefixes.find(other), max([0, *(held for held in helds if held <= at)])
        assert (found.held if found else 0) == most, at
        assert s.prefixes.use(other) is (found.snapshot if found else None)
    for held in helds:  # no token of the answer is left in a prompt that ends with the prefix
        found = s.prefixes.find(LONG[:held])
        assert (found.held if found else 0) < held
    last = Request(prompt=(*LONG[:127], LONG[127] ^ 1, *LONG[128:150]), max_tokens=4)
    got, cached = answer(s, last, DflashDrafter()), s.report().usage.cached_tokens
    s.prefixes = PrefixCache(s.model)
    assert (got, cached) == (answer(s, last, DflashDrafter()), 96)


def test_memory_is_budgeted_and_the_least_recently_used_goes(s: Session) -> None:
    size = s.prefixes.bytes_of(64)
    s.prefixes.budget = 3 * size
    for i in range(3):
        s.prefixes.put(f"p{i}", prompt(65, seed=50 + i), pinned=i == 0)
    answer(s, Request(prompt=(*prompt(65, seed=51), 7), max_tokens=2), DflashDrafter())
    assert s.report().usage.cached_tokens == 64
    s.prefixes.put("p3", prompt(65, seed=53), pinned=False)
    assert [p.name for p in s.prefixes.list()] == ["p0", "p1", "p3"], "p2 was used longest ago"
    s.prefixes.put("p4", prompt(129, seed=54), pinned=False)
    assert [p.name for p in s.prefixes.list()] == ["p0", "p4"]
    assert sum(p.bytes for p in s.prefixes.list()) <= s.prefixes.budget
    assert all(
        p.bytes == sum(a.nbytes for a in p.snapshot.arrays.values()) for p in s.prefixes.list()
    )


def test_what_cannot_fit_is_refused_before_anything_is_read_or_lost(s: Session) -> None:
    size = s.prefixes.bytes_of(64)
    s.prefixes.budget = 2 * size
    s.prefixes.put("fixed", LONG[:65])
    s.prefixes.put("free", prompt(65, 60), pinned=False)
    begun = s.model.state.begun
    for pinned in (True, False):
        with pytest.raises(
            RequestError, match=rf"must fit the memory .* {2 * size} bytes, .*take {size} "
        ):
            s.prefixes.put("long", LONG[:200], pinned=pinned)
    assert s.model.state.begun == begun
    assert [p.name for p in s.prefixes.list()] == ["fixed", "free"]


def test_a_pinned_prefix_makes_space_for_one_of_the_same_name(s: Session, tmp_path: Path) -> None:
    s.prefixes.budget = s.prefixes.bytes_of(64)
    s.prefixes.put("fixed", LONG[:65])
    s.prefixes.save("fixed", tmp_path / "p")
    s.prefixes.put("fixed", prompt(65, 61))
    assert s.prefixes.find((*prompt(65, 61), 3)) is not None
    s.prefixes.load(tmp_path / "p")
    assert s.prefixes.find(LONG) is not None
    assert len(s.prefixes.list()) == 1


@pytest.mark.parametrize(
    ("name", "tokens", "message"),
    [
        ("", (1,), r"must be 1 to 64 characters \(got \"\"\)"),
        ("p", (), r"must be 1 to 495 tokens.*\(got 0\)"),
        ("p", (1, 512), r"prefix\[1\] must be 0 to 511 \(got 512\)"),
    ],
)
def test_bad_prefixes(s: Session, name: str, tokens: tuple[int, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        s.prefixes.put(name, tokens)


def test_put_can_be_stopped_and_drop_forgets(s: Session) -> None:
    asked: list[int] = []
    stop = lambda: asked.append(1) or len(asked) == 3  # noqa: E731
    assert s.prefixes.put("skills", LONG[:200], stopped=stop) is None
    assert s.prefixes.list() == ()
    s.prefixes.put("skills", LONG[:100])
    assert s.prefixes.drop("skills")
    assert not s.prefixes.drop("skills")
    answer(s, Request(prompt=LONG[:150], max_tokens=2), DflashDrafter())
    assert s.report().usage.cached_tokens == 0


def test_a_request_whose_state_a_put_took_away_fails(s: Session) -> None:
    for steps in (1, 4, 8):  # within the prefill, just after it, and within the answer
        answers = s.run(Request(prompt=LONG[:100], max_tokens=30), DflashDrafter())
        for _ in range(steps):
            next(answers)
        s.prefixes.put("skills", LONG[:40])
        here = s.model.state.length
        with pytest.raises(TransactionError, match="must have the state to itself"):
            next(answers)
        assert s.model.state.length == here, "not one step more"
        s.prefixes.drop("skills")


def test_a_request_whose_state_a_restore_took_away_fails(s: Session) -> None:
    s.prefixes.put("skills", LONG[:100])
    first = s.run(Request(prompt=prompt(90, 9), max_tokens=30), DflashDrafter())
    next(first)
    next(s.run(Request(prompt=LONG[:140], max_tokens=4), DflashDrafter()))
    with pytest.raises(TransactionError):
        next(first)
    s.prefixes.drop("skills")


def test_saved_and_loaded_it_is_the_same(s: Session, tmp_path: Path) -> None:
    request = Request(prompt=LONG[:140], max_tokens=24)
    truth = answer(s, request, DflashDrafter())
    plain = s.report().spec
    put = s.prefixes.put("skills", LONG[:100], pinned=False)
    s.prefixes.save("skills", tmp_path / "skills.prefix")
    assert [p.name for p in tmp_path.iterdir()] == ["skills.prefix"], "no half file beside it"
    s.prefixes.drop("skills")
    answer(s, Request(prompt=prompt(90, 9), max_tokens=30), DflashDrafter())
    got = s.prefixes.load(tmp_path / "skills.prefix")
    assert put
    assert (got.name, got.tokens, got.pinned, got.held, got.bytes) == (
        "skills", LONG[:100], False, 96, put.bytes,
    )  # fmt: skip
    assert answer(s, request, DflashDrafter()) == truth
    assert s.report().spec == plain
    assert s.report().usage.cached_tokens == 96


def test_any_altered_byte_is_noticed(s: Session, tmp_path: Path) -> None:
    s.prefixes.put("skills", LONG[:70])
    path = tmp_path / "p"
    s.prefixes.save("skills", path)
    whole = path.read_bytes()
    places = [0, 20, 60, 120, 200, 400, len(whole) // 2, len(whole) - 1]
    cases = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in places]
    for bad in [*cases, whole[:-1], whole + b"x", b"", b"\n\n"]:
        path.write_bytes(bad)
        with pytest.raises(PackageError, match="must be as it was written"):
            s.prefixes.load(path)
    with pytest.raises(PackageError, match="must be a readable file"):
        s.prefixes.load(tmp_path / "none")
    with pytest.raises(RequestError, match=r"must be a file that can be written"):
        s.prefixes.save("skills", tmp_path / "none" / "p")
    with pytest.raises(RequestError, match=r"must be one that is kept \(got \"other\"\)"):
        s.prefixes.save("other", path)


def test_another_version_device_or_capacity_is_refused(
    s: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s.prefixes.put("skills", LONG[:100])
    s.prefixes.save("skills", tmp_path / "p")
    for owner, attribute, value, what in (
        (s.model, "capacity", 256, "capacity 256"),
        (s.model, "chunk", 16, "chunk 16"),
        (type(s.model.engine), "device", "CPU (b)", r"device CPU \(b\)"),
        (prefix_file, "__version__", "9.9", "tool 9.9"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, value)
            with pytest.raises(PackageError, match=rf"must be written with {what} \(got"):
                s.prefixes.load(tmp_path / "p")
    s.prefixes.budget = 10
    with (tmp_path / "large").open("wb") as file:
        file.truncate(HEADER + 11)  # without content, so that only who reads it needs memory
    with pytest.raises(RequestError, match=r"must fit the memory for prefixes, 10 bytes \(got 16"):
        s.prefixes.load(tmp_path / "large")
    with pytest.raises(RequestError, match="must fit the memory for prefixes: 10 bytes"):
        s.prefixes.load(tmp_path / "p")
    assert s.prefixes.list()[0].name == "skills"


def test_a_saved_prefix_outlasts_a_power_cut_and_leaves_no_file_open(
    s: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []

    def sync(handle: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(handle).st_mode))

    s.prefixes.put("skills", LONG[:40])
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", sync)
        s.prefixes.save("skills", tmp_path / "p")
    assert synced == [False, True], "first the file, then its name in the directory"
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_failed_save_leaves_the_old_file(
    s: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s.prefixes.put("skills", LONG[:100])
    path = tmp_path / "p"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(RequestError, match="No space left"):
            s.prefixes.save("skills", path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
