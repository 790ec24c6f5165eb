"""ExLM: masked language models whose [MASK] tokens expand into states tied by a DAG."""
