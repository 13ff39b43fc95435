"""Writes a report as one HTML page: no scripts, nothing from elsewhere, light or dark, wide or narrow."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from vlmrb.experiments.report.figures import Picture
from vlmrb.experiments.report.paper import Standing, paper
from vlmrb.experiments.report.settings import ScorerName
from vlmrb.experiments.report.table import Cell, Column, Number, Row, Table, shown


@dataclass(frozen=True)
class Part:
    """A card of the page.

    Attributes:
        table: possibly none.
        pictures: above it.
        standing: of the task that the card is about, if it is about one.
    """

    table: Table | None = None
    pictures: Sequence[Picture] = field(default_factory=tuple)
    standing: Standing | None = None


@dataclass(frozen=True)
class Report:
    """All that is told.

    Attributes:
        facts: the heading's numbers: what → how many.
        scorers: everything that gave scores.
        warnings: what is missing or left out, a sentence each.
        tasks: a card for each task.
        together: cards on all tasks.
        paper: cards with something of ours beside the paper's figures.
        missing: tables of the paper for which nothing has been run.
        runs: the list of all runs.
        command: how the report was asked for.
        version: of this program.
    """

    facts: Mapping[str, str]
    scorers: Sequence[ScorerName]
    warnings: Sequence[str]
    tasks: Sequence[Part]
    together: Sequence[Part]
    paper: Sequence[Part]
    missing: Sequence[Table]
    runs: Table
    command: str
    version: str


def render_page(report: Report) -> str:
    """Renders the page, with its pictures in it."""
    source = paper()["source"]
    link = f'<a href="https://arxiv.org/abs/{source["arxiv"]}">arXiv {source["arxiv"]}</a>'
    chapters = {
        "tasks": (
            "Tasks",
            "Only runs over their whole budget are in a number.",
            report.tasks,
        ),
        "together": ("All tasks together", "", report.together),
        "paper": ("Beside the paper", "The paper's figures are tinted; – is what has not been run here.", report.paper),
    }
    chapters = {key: chapter for key, chapter in chapters.items() if chapter[2]}
    links = {key: title for key, (title, _, _) in chapters.items()}
    links |= {"missing": "Not run here"} if report.missing else {}
    links |= {"runs": "Runs", "how": "How the numbers are made"}
    bar = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, title in links.items())
    facts = "".join(f"<li><b>{escape(number)}</b> {escape(what)}</li>" for what, number in report.facts.items())
    parts = [
        "<header><h1>Experience replay guided by scores</h1>"
        f'<p class="soft">Own runs beside the figures of <i>{escape(source["title"])}</i> '
        f"({escape(source['authors'])}, {link}; {escape(source['version'])}).</p>",
        f'<ul class="facts">{facts}</ul>',
        f"<nav>{bar}</nav></header>",
        _scorers(report.scorers),
        *([_warnings(report.warnings)] if report.warnings else []),
    ]
    for key, (title, lead, cards) in chapters.items():
        parts.append(f'<h2 id="{key}">{escape(title)}</h2>' + (f'<p class="soft">{escape(lead)}</p>' if lead else ""))
        parts += [_card(card) for card in cards]
    if report.missing:
        parts.append('<h2 id="missing">Not run here</h2><section><p class="soft">Tables of the paper for which no run, '
                     "calibration or measurement was given.</p>")  # fmt: skip
        for table in report.missing:
            parts.append(f"<details><summary>{escape(_title(table))}</summary>{_body(table)}</details>")
        parts.append("</section>")
    parts += [
        '<h2 id="runs">Runs</h2>',
        f"<section><details><summary>{escape(report.runs.title)}</summary>{_body(report.runs)}</details></section>",
        f'<h2 id="how">How the numbers are made</h2><section>{_HOW}<dt>This page</dt><dd>vlmrb {report.version}'
        f"<pre>{escape(report.command)}</pre></dd></dl></section>",
    ]
    style = Path(__file__).with_name("page.css").read_text()
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>vlmrb report</title>'
        f"<style>\n{style}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


_SHORT = 34  # letters that stay on one line


_HOW = """<dl>
<dt>Success</dt><dd>A run's <i>final</i> success is the mean of its last three evaluations, its <i>best</i> that of its
best one (the paper's performance; biased upwards, the more so the more evaluations there are and the fewer episodes
each has), <i>over training</i> the area under its curve divided by its env steps.</dd>
<dt>Env steps to a success</dt><dd>Those at the first evaluation that reached it. A run that never did counts as its
whole budget, as in the paper; “&gt;” then marks a lower bound, with how many runs got there. A baseline's best is the
mean over its seeds of their best evaluations; where it never succeeded, there is nothing to reach, and so a gap.</dd>
<dt>Time of a run</dt><dd>All that it took, evaluations included, over all attempts, as its summary.json says.</dd>
<dt>IQM</dt><dd>Interquartile mean: the mean of the middle half of all runs. With fewer than four runs it is the
mean.</dd>
<dt>Chance to be ahead</dt><dd>The probability that a run drawn from the scheme has had more success over training than
one drawn from the baseline; a tie counts as half.</dd>
<dt>Brackets and bars</dt><dd>95 % percentile intervals of a stratified bootstrap over runs (rliable, 2,000
resamples). With five seeds or fewer they are rather too narrow. A single run has none.</dd>
<dt>Bands of learning curves</dt><dd>95 % intervals of the mean over seeds by Student's t, which are as wide as few
seeds ask for, within 0 and 1. The curves of all tasks together have the bootstrap's.</dd>
<dt>What is in no number</dt><dd>Runs that were interrupted, failed, or are not finished, and those whose
evaluations end before their budget. They are listed.</dd>
"""


def _scorers(scorers: Sequence[ScorerName]) -> str:
    if not scorers:
        return '<section><h3>What gave the scores</h3><p class="soft">No run here has a scorer.</p></section>'
    items = "".join(
        f"<li><b>{escape(scorer.name)}</b>: {escape(scorer.remark or 'a vision-language model')}</li>"
        for scorer in scorers
    )
    told = any(scorer.kind == "vlm" for scorer in scorers)
    verdict = "" if told else "<p>No vision-language model is known to have scored any run on this page.</p>"
    return f'<section><h3>What gave the scores</h3>{verdict}<ul class="notes">{items}</ul></section>'


def _warnings(warnings: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in warnings)
    return f'<section class="warn"><h3>What is missing or left out</h3><ul class="notes">{items}</ul></section>'


def _card(part: Part) -> str:
    where = part.standing
    badge = ""
    if where is not None:
        kinds = "badge" if where.same else "badge smaller"
        badge = f'<span class="{kinds}">{escape(where.badge)}</span>'
    heading = f"<h3>{escape(_title(part.table))} {badge}</h3>" if part.table else ""
    lead = f'<p class="soft">{_emphasis(part.table.lead)}</p>' if part.table and part.table.lead else ""
    figures = "".join(_figure(picture) for picture in part.pictures)
    body = (f'<div class="pictures">{figures}</div>' if figures else "") + (_grid(part.table) if part.table else "")
    notes = _notes(part.table) if part.table else ""
    return f'<section>{heading}{lead}<div class="body">{body}</div>{notes}</section>'


def _title(table: Table) -> str:
    return f"{table.title} (the paper's table {table.number})" if table.number else table.title


def _figure(picture: Picture) -> str:
    light, dark = (
        f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in (picture.light, picture.dark)
    )
    return (
        f'<figure style="width: {picture.width}px"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(picture.title)}" width="{picture.width}"></picture>'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _body(table: Table) -> str:
    lead = f'<p class="soft">{_emphasis(table.lead)}</p>' if table.lead else ""
    return lead + _grid(table) + _notes(table)


def _emphasis(text: str) -> str:
    """Renders ``*word*``; the parts between stars are emphasised by turns."""
    parts = escape(text).split("*")
    return "".join(f"<i>{part}</i>" if number % 2 else part for number, part in enumerate(parts))


def _grid(table: Table) -> str:
    lines = ['<div class="scroll"><table><thead>', *_heads(table.columns), "</thead><tbody>"]
    section = ""
    for row in table.rows:
        if row.section != section:
            section = row.section
            lines.append(f'<tr class="section"><th colspan="{len(table.columns)}">{escape(section)}</th></tr>')
        lines.append(_row(table.columns, row))
    lines.append("</tbody></table></div>")
    return "".join(lines)


def _notes(table: Table) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _heads(columns: Sequence[Column]) -> Iterator[str]:
    if any(column.group for column in columns):
        yield "<tr>"
        for group, members in itertools.groupby(columns, lambda column: column.group):
            found = list(members)
            kinds = " ".join(["group"] * bool(group) + ["paper"] * all(column.paper for column in found))
            yield f'<th colspan="{len(found)}" class="{kinds}">{escape(group)}</th>'
        yield "</tr>"
    yield "<tr>"
    for column, first in zip(columns, _firsts(columns), strict=True):
        kinds = " ".join(["text"] * (column.kind == "text") + ["paper"] * column.paper + ["first"] * first)
        yield f'<th class="{kinds}">{escape(column.head)}</th>'
    yield "</tr>"


def _firsts(columns: Sequence[Column]) -> list[bool]:
    """Says of each column whether it is the first of a group, or of those without one behind a group."""
    groups = [column.group for column in columns]
    return [number > 0 and group != groups[number - 1] for number, group in enumerate(groups)]


def _row(columns: Sequence[Column], row: Row) -> str:
    firsts = _firsts(columns)
    cells = [_cell(column, row.cells.get(column.key), first) for column, first in zip(columns, firsts, strict=True)]
    return "".join([f'<tr class="{row.mark}">' if row.mark else "<tr>", *cells, "</tr>"])


def _cell(column: Column, cell: Cell, first: bool) -> str:
    text, behind = shown(cell, column.kind)
    gap = cell is None or cell == "" or (isinstance(cell, Number) and not cell.known)
    kinds = ["text" if column.kind == "text" else "number"]
    kinds += ["paper"] * column.paper + ["first"] * first + ["gap"] * gap + ["short"] * (len(text) < _SHORT)
    head = f"{column.group}: {column.head}" if column.group else column.head
    small = f" <small>{escape(behind)}</small>" if behind else ""
    return f'<td class="{" ".join(kinds)}" data-head="{escape(head)}"><span>{escape(text)}{small}</span></td>'
