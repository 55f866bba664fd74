"""A parity report for people: one page without anything outside of it, the same as Markdown, and the JSON beside them."""

from __future__ import annotations

from caracal_runtimes.report_page.charts import LayerError
from caracal_runtimes.report_page.markdown import to_markdown
from caracal_runtimes.report_page.page import to_html
from caracal_runtimes.report_page.writing import FILES, write_report

__all__ = ["FILES", "LayerError", "to_html", "to_markdown", "write_report"]
