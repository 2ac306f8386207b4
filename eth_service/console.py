"""Entry point of the `eth` console script: quiet from the first import on. It imports nothing heavy itself."""

from __future__ import annotations

import os
import signal

_STOPPED = 130


def main() -> None:
    """Run the command. Ctrl-C while its modules are still being imported ends it without a word, exit code 130."""
    # Under nohup and in scripts' background jobs Ctrl-C is ignored; that stays so.
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        # No exception: raised inside an import it may be printed, or swallowed by whoever tries an import.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_STOPPED))
    from eth_service.cli import main as run

    try:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        raise SystemExit(_STOPPED) from None


if __name__ == "__main__":
    main()
