# ruff: noqa: T201  # a program at the terminal prints
"""Attack a worker with hostile messages, and account for each of them.

``python -m tests.hostile --messages 100000`` starts a private RabbitMQ and a worker. The exit
status is 1 if a message is lost or astray, if the worker has lost a connection or has taken too
much memory, or if an honest task did not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.hostile.campaign import attack
from tests.private_broker import private_broker


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile")
    parser.add_argument("--messages", type=int, default=100_000, help="how many (100000)")
    parser.add_argument("--seed", type=int, default=1, help="chooses the messages (1)")
    options = parser.parse_args(arguments)
    with private_broker() as broker:
        account = attack(broker.url, "hostile", options.messages, options.seed)
    print(account)
    print("good" if account.is_good else "NOT GOOD")
    return 0 if account.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
