"""The command line; `app` is its entry."""
