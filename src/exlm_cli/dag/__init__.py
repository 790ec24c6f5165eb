"""The DAG behind one masked input: numbers, drawing, and reports."""

FORMATS = ("png", "svg", "html", "dot", "json")
"""Formats that `report.write_report` writes."""
