"""Reports on disk: one HTML file, the same as Markdown, each plot as SVG and PNG, and files for other viewers.

::

    RUN/
    ├── report.html     everything, for a browser, without a network
    ├── report.md       the same, for a repository
    ├── report/         the plots: *.svg, and *.png where the extra "report" is installed
    └── viewers/        trace.json for ui.perfetto.dev, partition*.json for Model Explorer
"""

from __future__ import annotations

from pathlib import Path

from optimizer.campaign.table import STATE
from optimizer.files import damage_of, write_atomic
from optimizer.report import markdown, page
from optimizer.report.campaign import campaign_document
from optimizer.report.data import read_study
from optimizer.report.document import Document
from optimizer.report.study import study_document
from optimizer.report.svg import standalone
from optimizer.study.folder import RESULT
from search_spaces.core.errors import printable

PLOTS = "report"


def report(run: Path, out: Path | None = None) -> Path:
    """Write the report of a study or a campaign into its folder, or into another one; return the page's path.

    Raises:
        RunFolderError: it is no run folder, not finished, damaged, written by a newer version, or cannot be written.
    """
    several = (run / STATE).is_file()
    with damage_of(run / (STATE if several else RESULT), "make the report of another run"):
        document = campaign_document(run) if several else study_document(read_study(run))
        return _write(document, out or run)


def _write(document: Document, folder: Path) -> Path:
    """Write a report into a folder, file by file, each whole or not at all; return the page's path."""
    contents = {
        "report.html": printable(page.render(document)).encode(),
        "report.md": printable(markdown.render(document, PLOTS)).encode(),
        **{name: text.encode() for name, text in document.files.items()},
    }
    try:
        import resvg_py
    except ImportError:
        resvg_py = None
    for figure in document.figures:
        svg = printable(standalone(figure.svg))
        contents[f"{PLOTS}/{figure.name}.svg"] = svg.encode()
        if resvg_py is not None and not figure.wide:
            contents[f"{PLOTS}/{figure.name}.png"] = bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=2))
    for name, content in contents.items():
        write_atomic(folder / name, content)
    return folder / "report.html"
