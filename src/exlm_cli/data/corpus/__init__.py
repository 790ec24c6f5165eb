"""From files to token shards: read `prepare` from top to bottom."""
