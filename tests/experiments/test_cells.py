from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from finished_cells import make_cell, train

from vlmrb.experiments.cells import Cell, Scheme, last_lines, recorded_cells, require_same_settings
from vlmrb.experiments.records import SCHEMA, read_record


def record_of(cell: Cell) -> dict:
    return json.loads((cell.folder / "cell.json").read_text())


def test_command_names_files_then_options_then_what_the_sweep_sets(tmp_path: Path) -> None:
    scheme = Scheme("gentle", ("replay/vlm.yaml", "--replay.lam_max 0.25", "scorer/sprites.yaml"))
    cell = Cell(Path("base.yaml"), scheme, 3, Path("out"), ("--training.gamma", "0.9"))
    assert " ".join(cell.command) == (
        "vlmrb fit -c base.yaml -c replay/vlm.yaml --replay.lam_max 0.25 -c scorer/sprites.yaml --training.gamma 0.9 "
        "--seed_everything 3 --run_dir out --resume true"
    )


def test_record_describes_the_run_and_every_start_of_it(tmp_path: Path) -> None:
    cell = replace(make_cell(tmp_path / "sweep", overrides=["--training.gamma", "0.9"]), study="mine")
    cell.record_start()
    assert record_of(cell)["exit_code"] is None
    cell.record_end(143)
    cell.record_start()
    cell.record_end(0)
    record = record_of(cell)
    assert (record["schema"], record["study"]) == (SCHEMA, "mine")
    assert (record["config"], record["scheme"], record["seed"]) == ("base", "uniform", 0)
    assert record["command"].startswith(f"vlmrb fit -c {cell.config} -c {cell.scheme.parts[0]} --training.gamma 0.9")
    assert record["exit_code"] == 0
    assert [attempt["exit_code"] for attempt in record["attempts"]] == [143, 0]
    for attempt in record["attempts"]:
        assert attempt["started"] <= attempt["ended"]
        assert attempt["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
        assert {"vlmrb", "torch", "torchrl", "lightning"} <= attempt["versions"].keys()
        assert set(attempt["git"]) == {"vlmrb", "working_dir"}


def test_failure_without_an_exit_code_is_recorded_and_logged_once(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep")
    cell.record_failure("no node would have it")
    assert cell.status == "failed"
    assert cell.last_words() == ["no node would have it"]
    cell.record_start()
    cell.record_failure("its node is gone")
    assert [attempt["exit_code"] for attempt in record_of(cell)["attempts"]] == [1, 1]


def test_same_command_goes_on_wherever_its_files_lie(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep", overrides=["--training.gamma", "0.9"])
    train(cell, [0.0, 1.0, 1.0])
    moved = tmp_path / "elsewhere" / "base.yaml"
    moved.parent.mkdir()
    cell.config.rename(moved)
    moved.write_text(f"# a comment\n{moved.read_text()}")
    require_same_settings([replace(cell, config=moved)], tmp_path / "sweep")


def test_other_overrides_are_refused(tmp_path: Path) -> None:
    train(make_cell(tmp_path / "sweep", overrides=["--training.gamma", "0.9"]), [0.0, 1.0, 1.0])
    with pytest.raises(
        ValueError, match=r'uniform/seed_0 was run with --overrides \["--training.gamma", "0.9"\]: .*--out'
    ):
        require_same_settings([make_cell(tmp_path / "sweep")], tmp_path / "sweep")


@pytest.mark.parametrize(("file", "name"), [("base", "base.yaml"), ("uniform", "scheme")])
def test_edited_file_is_refused(tmp_path: Path, file: str, name: str) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 1.0, 1.0], finished=False, exit_code=143)
    (tmp_path / f"{file}.yaml").write_text("replay: {capacity: 1001}\n")
    with pytest.raises(ValueError, match=f"uniform/seed_0 was run with another content of .*{name}"):
        require_same_settings([cell], tmp_path / "sweep")


def test_other_option_of_a_scheme_is_refused(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 1.0, 1.0])
    other = replace(cell, scheme=replace(cell.scheme, parts=(*cell.scheme.parts, "--replay.lam_max 0.5")))
    with pytest.raises(ValueError, match="uniform/seed_0 was run with another content of its scheme"):
        require_same_settings([other], tmp_path / "sweep")


def test_other_cells_of_other_settings_are_refused_since_one_table_holds_all(tmp_path: Path) -> None:
    train(make_cell(tmp_path / "sweep", seed=0, overrides=["--training.gamma", "0.9"]), [0.0, 1.0, 1.0])
    for scheme, seed in (("uniform", 1), ("vlm", 0)):
        with pytest.raises(ValueError, match="uniform/seed_0 was run with"):
            require_same_settings([make_cell(tmp_path / "sweep", scheme, seed)], tmp_path / "sweep")


def test_other_schemes_and_configurations_may_differ(tmp_path: Path) -> None:
    train(make_cell(tmp_path / "sweep"), [0.0, 1.0, 1.0])
    others = [make_cell(tmp_path / "sweep", "vlm"), make_cell(tmp_path / "sweep", config="larger")]
    Path(others[0].scheme.parts[0]).write_text("replay: {capacity: 7}\n")
    others[1].config.write_text("replay: {capacity: 8}\n")
    require_same_settings(others, tmp_path / "sweep")


def test_failed_start_may_be_repeated_with_other_settings(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep", overrides=["--no_such_option"])
    cell.record_start()
    cell.record_end(2)
    require_same_settings([make_cell(tmp_path / "sweep")], tmp_path / "sweep")


def test_run_of_unknown_settings_is_refused(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 1.0, 1.0])
    (cell.folder / "cell.json").unlink()
    with pytest.raises(ValueError, match="no sweep has recorded"):
        require_same_settings([cell], tmp_path / "sweep")


@pytest.mark.parametrize("schema", [None, SCHEMA - 1, SCHEMA + 1])
@pytest.mark.parametrize("place", ["base/uniform/seed_0", "uniform/seed_0"])  # the first version's runs lie higher
def test_record_of_another_version_is_refused(tmp_path: Path, schema: int | None, place: str) -> None:
    cell = make_cell(tmp_path / "sweep")
    folder = tmp_path / "sweep" / place
    folder.mkdir(parents=True)
    (folder / "cell.json").write_text(json.dumps({"seed": 0} | ({} if schema is None else {"schema": schema})))
    with pytest.raises(ValueError, match=rf"seed_0/cell.json was written by another version of vlmrb .*{SCHEMA}\)"):
        require_same_settings([cell], tmp_path / "sweep")


@pytest.mark.parametrize("torn", ["", '{"success": 0.5, "fini', "[]", "{}", '{"finished": true}'])
def test_torn_summary_counts_as_unfinished(tmp_path: Path, torn: str) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 1.0, 1.0], exit_code=None)
    assert cell.finished
    (cell.folder / "summary.json").write_text(torn)
    assert not cell.finished
    assert cell.status == "unfinished"


@pytest.mark.parametrize("torn", ["", '{"schema": 2, "stu', '{"schema": 2}'])
def test_torn_record_of_a_run_that_never_began_is_none(tmp_path: Path, torn: str) -> None:
    cell = make_cell(tmp_path / "sweep")
    cell.folder.mkdir(parents=True)
    (cell.folder / "cell.json").write_text(torn)
    assert read_record(cell.folder) is None
    assert recorded_cells(tmp_path / "sweep") == []
    require_same_settings([cell], tmp_path / "sweep")
    cell.record_start()
    assert cell.status == "unfinished"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: "", "empty, or no JSON"),
        (lambda text: text[: len(text) // 2], "empty, or no JSON"),
        (lambda text: "\0" * len(text), "empty, or no JSON"),
        (lambda text: '{"schema": 2}', "no proper 'study'"),
        (lambda text: json.dumps(json.loads(text) | {"settings": {}}), "no proper 'config'"),
        (lambda text: json.dumps(json.loads(text) | {"attempts": []}), "no 'attempts'"),
    ],
    ids=["empty", "cut", "zeros", "bare", "settings", "attempts"],
)
def test_damaged_record_of_a_run_is_named_and_never_left_out(
    tmp_path: Path, change: Callable[[str], str], says: str
) -> None:
    cell, other = make_cell(tmp_path / "sweep"), make_cell(tmp_path / "sweep", seed=1)
    train(cell, [0.0, 1.0, 1.0])
    record = cell.folder / "cell.json"
    record.write_text(change(record.read_text()))
    for cells in ([cell], [other]):
        with pytest.raises(ValueError, match=f"^{record} is damaged .*{says}.*: remove that folder"):
            require_same_settings(cells, tmp_path / "sweep")


@pytest.mark.parametrize(("code", "status"), [(143, "interrupted"), (-2, "interrupted"), (1, "failed"), (-9, "failed")])
def test_exit_code_decides_what_an_unfinished_cell_is_called(tmp_path: Path, code: int, status: str) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 0.1, 0.2], finished=False, exit_code=code)
    assert cell.status == status


def test_copy_of_a_cell_under_another_name_is_no_cell(tmp_path: Path) -> None:
    cell = make_cell(tmp_path / "sweep")
    train(cell, [0.0, 1.0, 1.0])
    shutil.copytree(cell.folder, cell.folder.with_name("seed_0.old1"))
    shutil.copytree(cell.folder.parent, cell.folder.parent.with_name("uniform_before"))
    assert recorded_cells(tmp_path / "sweep") == [cell]


def test_last_lines_are_the_last_that_say_something(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("one\r  two\nvlmrb fit: error: three\n \n")
    assert last_lines(tmp_path / "log.txt", 1) == ["vlmrb fit: error: three"]
    assert last_lines(tmp_path / "log.txt", 2) == ["  two", "vlmrb fit: error: three"]
    assert last_lines(tmp_path / "none.txt", 3) == ["it printed nothing"]
