# ruff: noqa: T201  # a program at the terminal prints
"""Attack a worker with hostile messages, and account for each of them.

``python -m tests.hostile --messages 100000`` starts a private RabbitMQ and a worker. With
``--seconds 600``, it attacks one worker after another, each with another pool, until the time is
over. The exit status is 1 if a message is lost or astray, if a worker has ended, has lost a
connection or has taken too much memory, or if an honest task did not run.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Final

from tests.hostile.campaign import attack
from tests.private_broker import private_broker

#: The pools of the workers, in turn.
POOLS: Final = ("prefork", "threads", "gevent", "solo")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile")
    parser.add_argument("--messages", type=int, help="how many for a worker (100000, or 5000)")
    parser.add_argument("--seconds", type=float, help="attack further workers until then")
    parser.add_argument("--seed", type=int, default=1, help="chooses the messages (1)")
    options = parser.parse_args(arguments)
    count = options.messages or (5_000 if options.seconds else 100_000)
    until = time.monotonic() + (options.seconds or 0)
    is_good = True
    with private_broker() as broker:
        for number, pool in enumerate(itertools.cycle(POOLS)):
            account = attack(broker.url, f"hostile{number}", count, options.seed + number, pool)
            print(f"{pool}: {account}\n", flush=True)
            is_good &= not account.complaints
            if time.monotonic() >= until:
                break
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
