from __future__ import annotations

import csv
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vlmrb.loggers import AppendingCSVLogger, CSVTable, start_loggers


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_row_is_on_disk_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    table = CSVTable(tmp_path / "run" / "m.csv")
    table.append({"step": 1, "loss": 0.5})
    assert read(tmp_path / "run" / "m.csv") == [{"step": "1", "loss": "0.5"}]
    table.append({"step": 2, "loss": 0.25})
    assert read(tmp_path / "run" / "m.csv")[1] == {"step": "2", "loss": "0.25"}


def test_leading_columns_come_first_and_the_rest_by_name(tmp_path: Path) -> None:
    table = CSVTable(tmp_path / "m.csv", leading=("step", "absent"))
    table.append({"b": 1, "step": 1, "a": 2})
    table.append({"aa": 3, "step": 2})
    assert (tmp_path / "m.csv").read_text() == "step,a,aa,b\n1,2,,1\n2,,3,\n"


def test_cells_hold_tensors_booleans_strings_and_nothing(tmp_path: Path) -> None:
    table = CSVTable(tmp_path / "m.csv")
    table.append({"a": torch.tensor(2.5), "b": True, "c": 'x, "y"', "d": None, "e": np.float32(0.1), "f": float("nan")})
    assert read(tmp_path / "m.csv") == [
        {"a": "2.5", "b": "1", "c": 'x, "y"', "d": "", "e": repr(float(np.float32(0.1))), "f": "nan"}
    ]


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(
        st.dictionaries(st.sampled_from("abcdef"), st.floats(allow_nan=False), min_size=1, max_size=4), max_size=12
    ),
    reopen=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_every_float_reads_back_exactly_whatever_columns_appear(
    rows: list[dict[str, float]], reopen: list[bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("table") / "m.csv"
    table = CSVTable(path)
    for row, anew in zip(rows, reopen, strict=False):
        if anew:
            table = CSVTable(path)
        table.append(row)
    back = [{name: float(cell) for name, cell in row.items() if cell} for row in CSVTable(path).rows()]
    assert back == rows


def test_line_torn_by_a_crash_is_dropped_and_appending_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text("step,loss\n1,0.5\n2,0.2")  # 0.25 was being written
    table = CSVTable(path)
    assert [row["step"] for row in table.rows()] == ["1"]
    table.append({"step": 2, "loss": 0.25})
    assert path.read_text() == "step,loss\n1,0.5\n2,0.25\n"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (b"15x0,0.5\n", "step is '15x0'"),
        (b"1500\n", "it does not fill 2 columns"),
        (b"\0\0\0\0\n", "it does not fill 2 columns"),
        (b"\xff1,0.5\n", "step is '\ufffd1'"),
        (b'1500,"0.5\n', "it does not fill 2 columns"),
        (b"\0" * 200_000 + b"\n", "it does not fill 2 columns"),
    ],
    ids=["digits", "cut", "zeros", "bytes", "quote", "many zeros"],
)
def test_damaged_row_is_named_when_a_run_is_resumed(tmp_path: Path, damage: bytes, says: str) -> None:
    path = tmp_path / "m.csv"
    path.write_bytes(b"step,loss\n1000,0.5\n" + damage + b"2000,0.25\n")
    with pytest.raises(ValueError, match=r"m.csv, line \d, is damaged \(.*remove that line, then repeat the command"):
        CSVTable(path).truncate_after("step", 1500)
    with pytest.raises(ValueError, match=re.escape(says)):
        CSVTable(path).truncate_after("step", 1500)
    assert path.read_bytes().startswith(b"step,loss\n1000,0.5\n" + damage[:4])


def test_damaged_head_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("st\0p,loss\n1000,0.5\n")
    with pytest.raises(ValueError, match=r"m.csv, line 1, is damaged \(it does not name step\)"):
        CSVTable(tmp_path / "m.csv").truncate_after("step", 1500)


def test_failed_rewrite_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.csv"
    table = CSVTable(path)
    table.append({"step": 1})

    def full_disk(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vlmrb.loggers.os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        table.append({"step": 2, "new": 1})
    assert path.read_text() == "step\n1\n"
    assert list(tmp_path.iterdir()) == [path]


def test_truncation_drops_rows_beyond_the_value_only(tmp_path: Path) -> None:
    table = CSVTable(tmp_path / "m.csv")
    for step in (0, 500, 1000, 1500):
        table.append({"step": step})
    table.append({"note": "no step"})
    assert table.truncate_after("step", 1000) == 1
    assert [row["step"] for row in CSVTable(tmp_path / "m.csv").rows()] == ["0", "500", "1000", ""]


def test_table_of_another_run_is_kept_under_another_name(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    for run in range(3):
        table = CSVTable(path)
        table.truncate_after("step", -1)
        table.append({"step": 0, "run": run})
    assert {file.name: read(file)[0]["run"] for file in tmp_path.iterdir()} == {
        "m.csv": "2",
        "m.1.csv": "0",
        "m.2.csv": "1",
    }


def test_truncating_a_table_that_does_not_exist_writes_nothing(tmp_path: Path) -> None:
    assert CSVTable(tmp_path / "m.csv").truncate_after("step", 10) == 0
    assert list(tmp_path.iterdir()) == []


def test_logger_refuses_a_row_without_env_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="env steps"):
        AppendingCSVLogger(tmp_path).log_metrics({"loss": 1.0})


def test_resumed_loggers_show_each_step_once(tmp_path: Path) -> None:
    def loggers() -> list:
        return [TensorBoardLogger(tmp_path, name="", version=""), AppendingCSVLogger(tmp_path)]

    def run(first: int, last: int, value: float) -> None:
        mine = loggers()
        start_loggers(mine, first)
        for step in range(first + (first > 0), last + 1):
            for logger in mine:
                logger.log_metrics({"train/loss": value}, step=step)
        for logger in mine:
            logger.finalize("success")

    run(0, 6, 1.0)  # a checkpoint was taken at 4, the run died after 6
    time.sleep(1.1)  # TensorBoard's files are read in the order of their names, which tell seconds apart
    run(4, 8, 2.0)
    expected = [(step, 1.0 if step <= 4 else 2.0) for step in range(9)]
    assert [(int(row["step"]), float(row["train/loss"])) for row in read(tmp_path / "metrics.csv")] == expected
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == expected
