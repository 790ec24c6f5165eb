"""The `exlm` command, also as `python -m exlm_cli`."""

import signal
import sys


def main() -> int:
    """Run one command and return its exit code, also where Ctrl-C comes while modules are imported."""
    try:
        from exlm_cli.cli.app import main as run
    except KeyboardInterrupt:
        sys.stderr.write("stopped\n")
        return 128 + signal.SIGINT
    return run()


if __name__ == "__main__":
    sys.exit(main())
