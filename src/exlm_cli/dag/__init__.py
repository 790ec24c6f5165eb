"""The DAG behind one masked input: numbers, drawing, and reports."""

FORMATS = ("png", "svg", "html", "json")
"""Formats that `report.write_report` writes."""
