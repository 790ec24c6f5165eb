"""Data that the package generates, for the quickstarts."""
