"""A campaign of hostile inputs, damaged runs, kills and full disks against every command: `make campaign`."""
