"""A campaign of damaged runs, kills, full disks and failing servers against every command: `make campaign`."""
