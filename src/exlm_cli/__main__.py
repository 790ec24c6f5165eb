"""The `exlm` command, also as `python -m exlm_cli`."""

import signal
import sys


def main() -> int:
    """Run one command and return its exit code, also where Ctrl-C comes before the command begins."""
    try:
        from exlm_cli.cli.app import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
