"""Dry runs: a step of any rank, without the other ranks and without values."""

from penstock.dry.dry_report import DryRank, DryRun, Traffic
from penstock.dry.running_dry import dry_run

__all__ = ["DryRank", "DryRun", "Traffic", "dry_run"]
