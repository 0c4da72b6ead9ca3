"""One self-contained HTML page about runs and models: stack, training, evaluation, analyses."""

from midus.report.collect import Collection, Subject, collect
from midus.report.page import render, write_page

__all__ = ["Collection", "Subject", "collect", "render", "write_page"]
