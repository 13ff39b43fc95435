from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
import yaml
from PIL import Image
from report_runs import PAPERS, PLM, leave_run, settings_of

from vlmrb.cli import main
from vlmrb.experiments.report.factor_tables import FACTORS
from vlmrb.experiments.report.paper import paper

ROOT = Path(__file__).parents[2]
KEPT = "docs/results/schemes/doorkey_6x6_dqn/results.csv"


@pytest.fixture(autouse=True, scope="module")
def _in_the_repository() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # commands.txt names configuration files from there
        patch.setattr("vlmrb.experiments.report.statistics.RESAMPLES", 60)
        yield


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the kept results."""
    out = tmp_path_factory.mktemp("kept")
    assert main(["report", KEPT, "--out", str(out)]) == 0
    return out


def told(page: str) -> str:
    """Returns the page's words."""
    return unescape(" ".join(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL).split()))


def test_page_of_the_kept_results(kept: Path) -> None:
    page = (kept / "index.html").read_text()
    words = told(page)
    assert "DoorKey-6, DQN a smaller task" in words
    assert "No vision-language model is known to have scored any run on this page. sprites : hand-made" in words
    assert "0.60" in words  # uniform's success over training, as docs/results/schemes.md has it
    assert "110 finished runs" in words
    assert "26.4M env steps" in words
    assert {path.name for path in (kept / "figures").iterdir()} == {
        f"{name}.{ending}"
        for name in (*(f"{what}_doorkey_6x6_dqn" for what in ("curves", "areas", "schemes")), "priority", "corruption")
        for ending in ("png", "pdf")
    }
    for path in (kept / "figures").glob("*.pdf"):
        assert path.read_bytes().startswith(b"%PDF")
    for path in (kept / "figures").glob("*.png"):
        with Image.open(path) as picture:
            assert min(picture.size) > 300
            assert len(picture.getcolors(1 << 20) or []) > 20  # something is drawn
    text = (kept / "report.md").read_text()
    titles = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert titles == [
        *("DoorKey-6, DQN", "Gains, and what scores cost, DoorKey-6, DQN"),
        *("Against uniform replay, level by level", "Against PER, level by level"),
        *("Priority variants", "Corrupted labels", "Every run that was found", "Not run here"),
    ]
    assert "- How far scores can be relied on: [tables/reliability.csv](tables/reliability.csv)" in text
    assert re.search(r"<details><summary>How far scores can be relied on", page)
    assert re.search(r"<details><summary>Scorers, offline", page)
    assert (kept / "tables" / "reliability.csv").exists()


def test_page_needs_no_other_file_and_no_script(kept: Path) -> None:
    page = (kept / "index.html").read_text()
    sources = re.findall(r'(?:src|srcset)="([^"]{0,30})', page)
    assert len(sources) == 2 * page.count("<picture>") > 0
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "<script" not in page
    assert "<link" not in page
    assert set(re.findall(r'href="([^"#]+)"', page)) == {"https://arxiv.org/abs/2602.01915"}
    assert set(re.findall(r'href="#(\w+)"', page)) <= set(re.findall(r'id="(\w+)"', page))


def test_every_tag_is_closed_and_every_cell_names_its_column(kept: Path) -> None:
    page = (kept / "index.html").read_text()
    for tag in ("section", "table", "thead", "tbody", "tr", "td", "figure", "details", "ul", "li", "dl", "div", "p"):
        assert len(re.findall(rf"<{tag}[ >]", page)) == page.count(f"</{tag}>"), tag
    assert page.count("<td") == page.count("data-head=")  # what a narrow window shows instead of the head


def test_what_did_not_finish_is_listed_and_what_was_not_run_is_a_gap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        leave_run(tmp_path / "in" / "door" / "vlm" / f"seed_{seed}", [0.0, 0.5, 1.0, 1.0, 1.0], settings_of("vlm"))
    leave_run(
        tmp_path / "in" / "door" / "vlm" / "seed_2", [0.0, 0.3337], settings_of("vlm"), finished=False, exit_code=143
    )
    folder = leave_run(tmp_path / "in" / "door" / "per" / "seed_0", [], settings_of("per"), exit_code=1)
    (folder / "log.txt").write_text("vlmrb fit: error: <no> room\n")
    assert main(["report", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "2 of 4 runs have finished" in said
    where = f"{tmp_path}/in/door/vlm/seed_2"
    assert f"DoorKey-6, DQN, vlm, seed 2: interrupted, in no number: got to 100 of 400 env steps ({where})" in said
    assert f"DoorKey-6, DQN, per, seed 0: failed, in no number: vlmrb fit: error: <no> room ({folder})" in said
    page = (tmp_path / "out" / "index.html").read_text()
    assert "&lt;no&gt; room" in page
    assert "<no>" not in page
    assert "0.33" not in told(page)  # in no table, not even as a mean
    assert "In names of files: door." in told(page)
    (line,) = [line for line in (tmp_path / "out" / "report.md").read_text().splitlines() if line.startswith("| per |")]
    assert set(line.split(" | ")[3:-1]) == {"–"}
    assert {"lambda.csv", "runs.csv", "against_per.csv"} <= {path.name for path in (tmp_path / "out/tables").iterdir()}


def test_run_of_the_papers_task_with_a_vlm_is_called_so(tmp_path: Path) -> None:
    for kind in ("uniform", "vlm"):
        settings = settings_of(kind, PLM, PAPERS)
        leave_run(tmp_path / "in" / "d16" / kind / "seed_0", [0.0, 0.5, 1.0], settings, every=500_000)
    assert main(["report", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    words = told((tmp_path / "out" / "index.html").read_text())
    assert "DoorKey-16, DQN the paper's task" in words
    assert "PLM-1B : a vision-language model" in words
    assert "No vision-language model is known" not in words
    assert "One run each, so there are no intervals." in words


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda path: path.mkdir(), "no runs found in"),
        (lambda path: None, "does not exist"),
        (lambda path: path.with_suffix(".csv").write_text("epoch,loss\n1,2\n"), "is no results.csv of vlmrb sweep"),
    ],
)
def test_nothing_to_report_is_one_line_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: object, error: str
) -> None:
    path = tmp_path / "given"
    make(path)  # type: ignore[operator]
    given = path.with_suffix(".csv") if path.with_suffix(".csv").exists() else path
    assert main(["report", str(given), "--out", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vlmrb report: error: ")
    assert error in line
    assert "give " in line
    assert not (tmp_path / "out").exists()


def test_runs_of_different_budgets_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_run(tmp_path / "in" / "door" / "vlm" / "seed_0", [0.0, 0.5], label="")
    leave_run(tmp_path / "in" / "door" / "vlm" / "seed_1", [0.0, 0.5, 0.6], label="")
    assert main(["report", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "scheme vlm" in line
    assert "100 env steps" in line
    assert "200" in line


def test_report_is_the_same_each_time(kept: Path, tmp_path: Path) -> None:
    assert main(["report", KEPT, "--out", str(tmp_path)]) == 0
    first, second = ((out / "index.html").read_text().replace(str(out), "OUT") for out in (kept, tmp_path))
    assert first == second


def test_every_table_is_documented(kept: Path) -> None:
    text = (ROOT / "docs" / "report.md").read_text()
    keys = {path.stem for path in (kept / "tables").iterdir()} - {"runs"}
    assert [key for key in keys if not key.startswith(("schemes_", "cost_")) and f"`{key}`" not in text] == []
    assert [factor.key for factor in FACTORS if f"`{factor.key}`" not in text] == []


def test_every_column_is_documented(kept: Path) -> None:
    text = (ROOT / "docs" / "report.md").read_text()
    beginnings = tuple(re.findall(r"`([\w.]+_)[TC](?:_S)?`", text))
    assert "best_" in beginnings
    for path in (kept / "tables").iterdir():
        for column in path.read_text().partition("\n")[0].split(","):
            name = re.sub(r"_(low|high|runs|reached|spread|why)$", "", column)
            assert f"`{name}`" in text or name.startswith(("paper_", *beginnings)), f"{path.name}: {column}"


def test_papers_figures_have_a_source_and_every_level_a_domain() -> None:
    assert paper()["source"]["arxiv"] == "2602.01915"
    domains = paper()["domains"]
    assert {level["domain"] for level in paper()["levels"]} == set(domains)
    for domain in domains.values():
        assert domain["scheme"] in ("vlm", "vlm_td")
    for gain in paper()["gains"]:  # the printed gains follow from the printed levels
        for baseline in ("uniform", "per"):
            levels = [level[baseline] for level in paper()["levels"] if level["domain"] == gain["domain"]]
            ours, theirs = (sum(level["steps"][side] for level in levels) for side in (0, 1))
            assert 1 - ours / theirs == pytest.approx(gain[baseline]["steps"], abs=0.01)
            ours, theirs = (sum(level["success"][side] for level in levels) for side in (0, 1))
            assert ours / theirs - 1 == pytest.approx(gain[baseline]["success"], abs=0.01)


@pytest.mark.parametrize("level", paper()["levels"], ids=lambda level: level["name"])
def test_settings_that_the_paper_publishes_are_those_of_our_configurations(level: dict[str, object]) -> None:
    name = str(level["name"]).replace("-", "_").lower()
    folder = ROOT / "configs" / ("minigrid" if name.startswith("doorkey") else "ogbench")
    stem = re.sub(r"doorkey_(\d+)", r"doorkey_\1x\1", name)
    domain = paper()["domains"][level["domain"]]
    for algorithm in domain["algorithms"]:
        settings = yaml.safe_load((folder / f"{stem}_{algorithm.lower()}.yaml").read_text())
        assert settings["env"]["id"] in level["ids"]  # type: ignore[operator]
        for key, value in domain["task"].items():
            found = settings
            for part in key.split("."):
                found = found.get(part, None if found is not settings else {}) if isinstance(found, dict) else found
            assert found == value or (found is None and key.startswith("env.")), key
