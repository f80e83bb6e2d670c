"""The audit: lawful histories pass, and each way of tampering is found and placed."""
from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recover import events
from recover.events import EventLog, Receipt, make_receipt, seal
from recover.report import audit as module
from recover.report.audit import audit

B, STEPS, DEATH = 6, 8, 5
Row = dict[str, Any]


def history(directory: Path, key: bytes = b"") -> None:
    """Three replicas, eight steps; replica 2 dies in step 5 after some of its work was reduced; its file is torn."""
    for replica in range(3):
        log = EventLog(directory, "run", replica, 0)
        log.path = log.path.rename(directory / f"events-replica{replica}-rank0-{replica}.jsonl")
        log.emit(events.RUN_START, microbatches=B, replicas=3)
        log.emit(events.VIEW_NEW, view=(0, 1), members=(0, 1, 2))
        for step in range(STEPS if replica < 2 else DEATH):
            late = step >= DEATH
            who = [0, 0, 1, 1, 2, 2] if step <= DEATH else [0, 0, 0, 1, 1, 1]
            log.receipt(make_receipt(
                step=step, view=(0, 2 if late else 1), members=[0, 1] if late else [0, 1, 2], who=who, divisor=B,
                loss=4.0 / (step + 1), checksums=[step * 10, step * 10 + 1], state_hash=f"{step:064x}"), key)
        if replica < 2:
            log.emit(events.RUN_END, status="finished", last_step=STEPS - 1, members=(0, 1))
        log.close(20)
    casualty = file(directory, 2)
    casualty.write_bytes(casualty.read_bytes() + b'{"schema":1,"event":"recover.step.rec')


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original")
    history(directory)
    return directory


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def file(directory: Path, replica: int) -> Path:
    (path,) = directory.glob(f"events-replica{replica}-*.jsonl")
    return path


def rows(path: Path) -> list[Row]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def write(path: Path, content: list[Row], reseal: bool) -> None:
    previous = ""
    for row in content:
        if row["event"] == events.RECEIPT and reseal:
            sealed = seal(msgspec.convert(row["attributes"], Receipt), previous)
            row["attributes"], previous = msgspec.to_builtins(sealed), sealed.digest
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in content))


def tamper(directory: Path, replica: int, step: int, change: Callable[[Row], None], reseal: bool = True) -> int:
    """Change one receipt; with `reseal` by somebody who makes the whole chain anew. Returns the number of its line."""
    path = file(directory, replica)
    content = rows(path)
    number = next(number for number, row in enumerate(content, start=1)
                  if row["event"] == events.RECEIPT and row["step"] == step)
    change(content[number - 1]["attributes"])
    write(path, content, reseal)
    return number


def assign(**values: Any) -> Callable[[Row], None]:
    return lambda attributes: attributes.update(values)


def found(directory: Path) -> module.Offence:
    result = audit(directory)
    assert not result.ok
    assert result.offence is not None
    return result.offence


def test_a_run_with_a_death_is_clean(run: Path) -> None:
    result = audit(run)
    assert result.ok, result.offences
    (checked,) = result.runs
    assert checked.microbatches == B
    assert sorted(len(source.items) for source in checked.sources.values()) == [DEATH, STEPS, STEPS]


def test_the_helper_that_reseals_changes_nothing_by_itself(run: Path) -> None:
    tamper(run, 1, 3, lambda attributes: None)
    assert audit(run).ok


ALTERED: dict[str, Callable[[Row], None]] = {
    "step": assign(step=9), "view": assign(view=[0, 7]), "members": assign(members=[0, 1]),
    "who": assign(who=[0, 0, 1, 1, 2, 1]), "divisor": assign(divisor=5.0), "loss": assign(loss=1.5),
    "loss_bits": assign(loss_bits="3fe0000000000000"), "checksums": assign(checksums=[30, 32]),
    "no checksums": assign(checksums=None), "state_hash": assign(state_hash="ff"),
    "policy_constant": assign(policy_constant=False), "previous": assign(previous="0" * 64),
    "digest": assign(digest="0" * 64), "one more field": assign(extra=1), "a wrong type": assign(divisor="6"),
}


@pytest.mark.parametrize("change", ALTERED.values(), ids=ALTERED)
def test_a_receipt_altered_after_it_was_written_is_found(run: Path, change: Callable[[Row], None]) -> None:
    number = tamper(run, 1, 3, change, reseal=False)
    offences = audit(run).offences
    assert (file(run, 1).name, number) in {(offence.path, offence.line) for offence in offences}
    assert {offence.rule for offence in offences if offence.line == number} & {"chain", "format"}


RESEALED: dict[str, tuple[Callable[[Row], None], str, str]] = {
    "a microbatch twice by another": (assign(who=[0, 0, 1, 1, 1, 2]), "I1", "who contributed what"),
    "one too few": (assign(who=[0, 0, 1, 1, 2]), "I1", "5 contributions instead of 6"),
    "nobody": (assign(who=[0, 0, 1, 1, 2, -1]), "I1", "nobody contributed microbatch 5"),
    "a stranger": (assign(who=[0, 0, 1, 1, 2, 9]), "I1", "from 9, who never was a member"),
    "not in its own members": (assign(members=[0, 2]), "I1", "must be sorted, distinct and contain replica 1"),
    "members twice": (assign(members=[0, 1, 1, 2]), "I1", "distinct"),
    "divisor": (assign(divisor=5.0), "I1", "the divisor differs"),
    "divisor zero": (assign(divisor=0.0), "I1", "divisor 0.0"),
    "loss and its bits": (assign(loss=0.5, loss_bits="3fe0000000000000"), "I2", "the loss differs"),
    "loss without its bits": (assign(loss=0.5), "format", "its bits"),
    "a checksum": (assign(checksums=[30, 32]), "I2", "checksums of the buckets differs"),
    "the hash of the state": (assign(state_hash="ff"), "I5", "hash of the state differs"),
    "batch not kept": (assign(policy_constant=False), "I1", "whether the policy keeps the batch"),
    "the step inside": (assign(step=4), "format", "the line says step 3"),
}


@pytest.mark.parametrize(("change", "rule", "what"), RESEALED.values(), ids=RESEALED)
def test_a_whole_chain_made_anew_still_disagrees_with_the_run(
        run: Path, change: Callable[[Row], None], rule: str, what: str) -> None:
    number = tamper(run, 1, 3, change)
    assert [offence for offence in audit(run).offences
            if (offence.path, offence.line, offence.rule) == (file(run, 1).name, number, rule) and what in offence.what]
    assert found(run).step in (3, 4)


def test_the_first_offence_is_the_one_of_the_lowest_step(run: Path) -> None:
    tamper(run, 1, 6, assign(state_hash="ff"))
    number = tamper(run, 0, 2, assign(state_hash="ee"))
    offence = found(run)
    assert (offence.path, offence.line, offence.step, offence.rule) == (file(run, 0).name, number, 2, "I5")
    assert "step 2: I5" in str(offence)


def test_the_casualty_is_held_to_the_same(run: Path) -> None:
    tamper(run, 2, DEATH - 1, assign(state_hash="ff"))
    assert found(run).path == file(run, 2).name


def test_work_of_one_outside_the_view_is_found(run: Path) -> None:
    for replica in (0, 1):      # both agree on it, so only I4 speaks
        tamper(run, replica, DEATH + 1, assign(who=[0, 0, 0, 1, 1, 2]))
    assert found(run).rule == "I4"


def test_a_shrinking_policy_may_leave_microbatches_out_and_says_so(run: Path) -> None:
    for replica in (0, 1):
        tamper(run, replica, DEATH + 1, assign(who=[0, 0, -1, -1, 1, 1], policy_constant=False))
    assert audit(run).ok


def cut(directory: Path, replica: int, keep: Callable[[Row], bool], reseal: bool = False) -> None:
    path = file(directory, replica)
    write(path, [row for row in rows(path) if keep(row)], reseal)


def step_of(row: Row) -> int:
    return int(row["step"]) if row["event"] == events.RECEIPT else -1


def test_a_missing_receipt_is_found(run: Path) -> None:
    cut(run, 1, lambda row: step_of(row) != 3)
    assert {offence.rule for offence in audit(run).offences} == {"chain", "steps"}


def test_a_missing_receipt_is_found_though_the_chain_was_made_anew(run: Path) -> None:
    cut(run, 1, lambda row: step_of(row) != 3, reseal=True)
    offence = found(run)
    assert offence.rule == "steps"
    assert "contributed to step 5 but has no receipt of step 3" in offence.what


def test_a_missing_beginning_is_found(run: Path) -> None:
    cut(run, 1, lambda row: step_of(row) != 0)
    assert found(run).step == 0
    cut(run, 1, lambda row: True, reseal=True)
    assert "no receipt of step 0" in found(run).what


def test_a_missing_end_is_found(run: Path) -> None:
    cut(run, 1, lambda row: step_of(row) != STEPS - 1)
    assert "the run ended with step 7" in found(run).what
    cut(run, 1, lambda row: step_of(row) < STEPS - 3 and row["event"] != events.RUN_END)
    assert f"no receipt of step {STEPS - 3}" in found(run).what


def test_a_missing_file_is_found(run: Path) -> None:
    file(run, 1).unlink()
    assert "replica 1 contributed" in found(run).what


def test_reordered_receipts_are_found(run: Path) -> None:
    path = file(run, 1)
    content = rows(path)
    content[3], content[4] = content[4], content[3]
    write(path, content, reseal=False)
    assert {offence.rule for offence in audit(run).offences} == {"chain", "steps"}


def test_a_receipt_twice_is_found(run: Path) -> None:
    path = file(run, 1)
    content = rows(path)
    write(path, [*content[:4], content[3], *content[4:]], reseal=False)
    assert {offence.rule for offence in audit(run).offences} == {"chain", "steps"}


def test_a_receipt_after_the_end_is_found(run: Path) -> None:
    path = file(run, 1)
    content = rows(path)
    write(path, [*content[:-2], content[-1], content[-2]], reseal=False)
    assert "after the end of the run" in found(run).what


def test_a_bad_line_in_the_middle_is_found(run: Path) -> None:
    path = file(run, 1)
    content = path.read_bytes().splitlines(keepends=True)
    content[3] = content[3][:-30] + b"\n"
    path.write_bytes(b"".join(content))
    offence = found(run)
    assert (offence.path, offence.line, offence.rule) == (path.name, 4, "format")


def test_a_receipt_under_another_name_is_found(run: Path) -> None:
    path = file(run, 1)
    content = rows(path)
    content[4]["replica"] = 0
    write(path, content, reseal=False)
    assert "two ranks in one file" in found(run).what


def test_nothing_to_check_is_no_clean_bill(tmp_path: Path) -> None:
    assert "no receipt" in found(tmp_path).what
    with pytest.raises(FileNotFoundError):
        audit(tmp_path / "absent")


def test_with_a_key_a_chain_made_anew_is_found(tmp_path: Path) -> None:
    history(tmp_path, key=b"secret")
    assert audit(tmp_path, b"secret").ok
    assert not audit(tmp_path, b"other").ok
    for replica in (0, 1, 2):
        tamper(tmp_path, replica, 3, assign(divisor=5.0))       # consistently, but without the key
    offence = audit(tmp_path, b"secret").offence
    assert offence is not None
    assert offence.rule == "chain"


def test_two_runs_in_one_directory_are_kept_apart(run: Path) -> None:
    path = file(run, 1)
    other = [{**row, "run_id": "other"} for row in rows(path)]
    write(run / "events-replica1-rank0-77.jsonl", other[:2], reseal=False)
    result = audit(run)
    assert result.ok
    assert len(result.runs) == 2


def test_what_was_contributed_adds_up_though_a_casualty_has_no_receipt_of_its_last_step(original: Path) -> None:
    (table,) = module.tables(audit(original))
    column = next(column for column in table.columns if column.header == "contributed")
    assert list(column.cells) == ["18", "18", "12"]
    assert "8 steps have 48 microbatches" in str(table.caption)
def resume(directory: Path, steps: int, first: int | None = None, state: str | None = None, last: int = STEPS) -> Path:
    """Two replicas go on from a checkpoint, under the same identity; the first one's file."""
    for replica in range(2):
        log = EventLog(directory, "run", replica, 0)
        log.path = log.path.rename(directory / f"events-replica{replica}-rank0-1{replica}.jsonl")
        log.emit(events.RUN_START, microbatches=B, replicas=2)
        log.emit(events.RUN_RESUMED, steps=steps, attempt="again", state_hash=state or f"{steps - 1:064x}")
        for step in range(steps if first is None else first, last):
            log.receipt(make_receipt(step=step, view=(0, 1), members=[0, 1], who=[0, 1, 0, 1, 0, 1], divisor=B, loss=7.0))
        log.emit(events.RUN_END, status="finished", last_step=last - 1, members=(0, 1))
        log.close(20)
    return directory / "events-replica0-rank0-10.jsonl"


def test_a_resumed_run_may_make_the_same_steps_otherwise(run: Path) -> None:
    resume(run, 4)
    result = audit(run)
    assert result.ok, result.offences
    assert sorted((len(checked.sources), checked.attempt, checked.microbatches) for checked in result.runs) == [
        (2, "again", B), (3, "", B)]


def test_without_its_word_of_being_resumed_it_may_not(run: Path) -> None:
    path = resume(run, 4)
    write(path, [row for row in rows(path) if row["event"] != events.RUN_RESUMED], reseal=False)
    assert not audit(run).ok


def test_a_run_resumed_at_its_end_needs_no_receipt(run: Path) -> None:
    resume(run, STEPS)
    assert audit(run).ok


def test_a_resumed_run_begins_where_its_checkpoint_ends(run: Path) -> None:
    resume(run, 4, first=5)
    assert "resumed after 4 steps" in found(run).what


def test_a_run_resumed_with_another_state_is_found(run: Path) -> None:
    resume(run, 4, state="ff")
    offence = found(run)
    assert (offence.rule, offence.step) == ("I5", 3)


def skip(run: Path, index: int, who: list[int], replicas: tuple[int, ...] = (0, 1, 2)) -> None:
    for replica in replicas:
        tamper(run, replica, 3, assign(skipped=[index], who=who, divisor=5.0))


def test_a_skipped_microbatch_is_the_one_lawful_departure(run: Path) -> None:
    skip(run, 3, [0, 0, 1, -1, 2, 2])
    assert audit(run).ok


@pytest.mark.parametrize(("who", "replicas", "said"), [
    ([0, 0, 1, -1, -1, 2], (0, 1, 2), "nobody contributed microbatch 4"),
    ([0, 0, 1, 1, 2, 2], (0, 1, 2), "microbatch 3 comes from 1, but was skipped"),
    ([0, 0, 1, -1, 2, 2], (0, 1), "differs from replica")])
def test_skipping_must_be_said_by_all_and_be_true(run: Path, who: list[int], replicas: tuple[int, ...], said: str) -> None:
    skip(run, 3, who, replicas)
    assert said in found(run).what


def test_a_divisor_of_nothing_needs_a_step_that_is_skipped(run: Path) -> None:
    for replica in range(3):
        tamper(run, replica, 3, assign(skipped=[0], who=[-1, 0, 1, 1, 2, 2], divisor=0.0))
    assert "divisor 0.0" in found(run).what
    for replica in range(3):
        tamper(run, replica, 3, assign(skipped=list(range(B)), who=[-1] * B))
    assert audit(run).ok
