"""Rows of txt, csv, jsonl and parquet files and of Hub data sets."""
