"""`python -m exlm_cli`: the `exlm` command."""

import sys

from exlm_cli.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
