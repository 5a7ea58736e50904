"""Drawings of timelines: in the terminal, as a picture, as a page or as a trace."""

from penstock.draw.output import save, show
from penstock.draw.panel import Panel

__all__ = ["Panel", "save", "show"]
