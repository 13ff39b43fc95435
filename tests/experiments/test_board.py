from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from finished_cells import make_cell, train
from rich.console import Console

import vlmrb.experiments.board
from vlmrb.experiments.board import Board, signal_name
from vlmrb.experiments.cells import Cell
from vlmrb.loggers import CSVTable

BUDGETS = {("base", "uniform"): 4000, ("large", "uniform"): 4000}


def console(terminal: bool, height: int = 40) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=120, height=height, highlight=False), text


def under_way(cell: Cell, env_steps: int = 1000) -> None:
    cell.record_start()
    row = {"step": env_steps, "time/wall_s": 10.0, "time/env_steps_per_s": 123.4, "eval/success": 0.25}
    CSVTable(cell.folder / "metrics.csv").append(row)


def test_plain_lines_say_where_each_run_is_and_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlmrb.experiments.board, "LINES_S", 0.0)
    cells = [make_cell(tmp_path / "sweep", seed=seed) for seed in range(4)]
    train(cells[0], [0.0, 1.0, 1.0])
    screen, text = console(terminal=False)
    with Board(cells, BUDGETS, "mine", screen) as board:
        for cell in cells[1:3]:
            board.started(cell)
            under_way(cell)
        board.refresh(jobs=2)
        (cells[2].folder / "log.txt").write_text("working\nvlmrb fit: error: no room [left]\n")
        cells[2].record_end(1)
        board.ended(cells[2])
        cells[1].record_end(143)
        board.ended(cells[1])
        board.refresh(jobs=2)
    lines = text.getvalue().splitlines()
    assert lines[0] == "4 runs, 1 already finished"
    facts = r"1,000 of 4,000 env steps \(25%\), 123 steps/s, success 0\.25, 0:00:(30|2\d) left"
    assert re.fullmatch(rf"  base uniform seed 1: {facts}", lines[1])
    # 30 s each are left of the two, and the last run is expected to take the mean of 10, 40 and 40 s
    left = r"about 0:0(1:00|0:5\d) to go \(until \w+ \d\d:\d\d\)"
    assert re.fullmatch(rf"1 of 4 done, 2 running, 1 waiting; 0:00:0\d gone, {left}", lines[3])
    assert lines[4].endswith(
        f"base uniform seed 2: FAILED (exit code 1): vlmrb fit: error: no room [left] (log: {cells[2].log})"
    )
    assert re.fullmatch(r"\[2/3, \d s\] base uniform seed 1: interrupted", lines[5])
    assert lines[6].startswith("1 of 4 done, 1 failed, 1 interrupted, 1 waiting; ")


def test_reports_come_now_and_then(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep")
    screen, text = console(terminal=False)
    with Board([cell], BUDGETS, "mine", screen) as board:
        board.started(cell)
        for _ in range(5):
            board.refresh(jobs=1)
    assert text.getvalue() == "1 run, 0 already finished\n"


def test_terminal_shows_a_table_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlmrb.experiments.board, "REFRESH_S", 0.0)
    cells = [make_cell(tmp_path / "sweep", seed=seed, config=name) for name in ("base", "large") for seed in range(20)]
    train(cells[0], [0.0, 1.0, 1.0])
    screen, text = console(terminal=True, height=20)
    with Board(cells, BUDGETS, "mine", screen) as board:
        board.started(cells[25])
        under_way(cells[25])
        board.refresh(jobs=1)
        assert "mine" in text.getvalue()
        screen, text = console(terminal=True, height=20)
        screen.print(board.table(jobs=1))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", text.getvalue()).splitlines()
    assert len(shown) < 20
    rows = [re.split(r"[\s│]+", line.strip("│ ")) for line in shown if "uniform" in line]
    assert rows[0][:-1] == ["large", "uniform", "5", "running", "1,000", "/", "4,000", "(25%)", "123", "0.25"]
    assert rows[1] == ["base", "uniform", "0", "done", "200", "0.67"]
    assert "and 28 more" in "\n".join(shown)


def test_run_that_was_taken_back_before_it_began_waits_again(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep")
    cell.record_start()
    cell.record_end(1)  # by an earlier sweep
    screen, text = console(terminal=False)
    with Board([cell], BUDGETS, "mine", screen) as board:
        board.started(cell)
        board.ended(cell, begun=False)
        assert board.headline(jobs=1).startswith("0 of 1 done, 1 waiting; ")
    assert text.getvalue() == "1 run, 0 already finished\n"


def test_display_goes_on_whatever_a_runs_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlmrb.experiments.board, "LINES_S", 0.0)
    cells = [make_cell(tmp_path / "sweep", seed=seed) for seed in range(2)]
    screen, text = console(terminal=False)
    with Board(cells, BUDGETS, "mine", screen) as board:
        for cell in cells:
            board.started(cell)
            under_way(cell)
        with (cells[0].folder / "metrics.csv").open("a") as file:
            file.write("0.5,2000,20.0,1e300\n")  # no end that a calendar has
        for _ in range(2):
            board.refresh(jobs=2)
        cells[0].record_end(-40)
        board.ended(cells[0])
    assert text.getvalue().count("the state of the runs cannot be shown (OverflowError") == 1
    assert "base uniform seed 0: FAILED (killed by signal 40)" in text.getvalue()


def test_terminal_that_is_gone_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlmrb.experiments.board, "REFRESH_S", 0.0)
    cell = make_cell(tmp_path / "sweep")
    screen, text = console(terminal=True)
    with Board([cell], BUDGETS, "mine", screen) as board:
        text.close()
        board.started(cell)
        board.refresh(jobs=1)
        train(cell, [0.0, 1.0, 1.0])
        board.ended(cell)


def test_signals_have_names_or_numbers() -> None:
    assert [signal_name(number) for number in (9, 40)] == ["SIGKILL", "signal 40"]


def test_run_whose_scorer_scored_next_to_nothing_is_pointed_out(tmp_path: Path) -> None:
    cells = [make_cell(tmp_path / "sweep", seed=seed) for seed in range(3)]
    for cell, scoring in zip(cells, ({}, {"share_scored": 0.5}, {"share_scored": 0.012}), strict=True):
        train(cell, [0.0, 1.0, 1.0], scoring=scoring)
    screen, text = console(terminal=False)
    with Board(cells, BUDGETS, "mine", screen) as board:
        screen.print(board.table(jobs=1))
        for cell in cells:
            board.ended(cell)
    shown = text.getvalue()
    assert shown.count("only 1.2% of the clips scored") == 2
    assert "base uniform seed 2: success 0.67, only 1.2% of the clips scored\n" in shown
