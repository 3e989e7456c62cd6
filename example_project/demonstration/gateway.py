"""A mail gateway that speaks HTTP: it refuses a mail now and then, and sends none twice.

The shop's task posts its mails here, as it would to a mail provider. The gateway runs in the
demonstration's own process, so its outbox outlives a killed worker and shows what was delivered.
``python -m example_project.demonstration.gateway`` runs one at the shop's default URL.
"""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

#: The percentage of attempts that the gateway refuses.
REFUSED_PERCENT: Final = 10

#: Seconds between sending a mail and answering. A worker that is killed in between does not know
#: that the mail was sent; the idempotency key prevents a second mail.
ANSWER_TIME: Final = 0.01

#: The port of the shop's default URL.
DEFAULT_PORT: Final = 8025


class MailGateway:
    """The gateway's idempotency keys and its outbox, in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()
        self._keys: set[str] = set()
        self._outbox: Counter[str] = Counter()

    def send(self, order_id: str, idempotency_key: str) -> bool:
        """Send the mail about an order, unless one went out under the same key.

        Returns:
            False if the gateway refuses the mail; it may take the mail at the next attempt.
        """
        with self._lock:
            if idempotency_key in self._keys:
                return True
            if self._refused[idempotency_key] < refusals(idempotency_key):
                self._refused[idempotency_key] += 1
                return False
            self._keys.add(idempotency_key)
            self._outbox[order_id] += 1
        return True

    def orders_mailed(self) -> int:
        """Return the number of orders with a mail."""
        return len(self._outbox)

    def mails(self) -> dict[str, int]:
        """Return the number of mails by order; without the key, it could be more than one."""
        with self._lock:
            return dict(self._outbox)

    def refused(self) -> int:
        """Return the number of refused attempts."""
        with self._lock:
            return self._refused.total()

    @contextmanager
    def served(self, port: int = 0) -> Iterator[str]:
        """Serve the gateway in threads of this process.

        Args:
            port: The TCP port on the loopback interface; 0 for a free one.

        Yields:
            The URL that takes mails.
        """
        gateway = self

        class Handler(_Handler):
            def send_mail(self, order_id: str, idempotency_key: str) -> bool:
                return gateway.send(order_id, idempotency_key)

        with _Server(("127.0.0.1", port), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}/mails"
            finally:
                server.shutdown()
                thread.join()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


class _Handler(BaseHTTPRequestHandler):
    def send_mail(self, order_id: str, idempotency_key: str) -> bool:
        raise NotImplementedError

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        mail = json.loads(self.rfile.read(length))
        is_sent = self.send_mail(mail["order"], self.headers["Idempotency-Key"])
        time.sleep(ANSWER_TIME)
        self.send_response(HTTPStatus.ACCEPTED if is_sent else HTTPStatus.SERVICE_UNAVAILABLE)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Log nothing: the terminal shows the run."""


def refusals(idempotency_key: str) -> int:
    """Return how many attempts are refused before a mail is taken; the same in every run."""
    attempt = 0
    while _percent_of(f"{idempotency_key}/{attempt}") < REFUSED_PERCENT:
        attempt += 1
    return attempt


def _percent_of(attempt: str) -> int:
    digest = hashlib.blake2b(attempt.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % 100


def main() -> None:
    """Serve a gateway until Ctrl-C, and print how many mails went out."""
    gateway = MailGateway()
    with gateway.served(DEFAULT_PORT) as url:
        print(f"{url} takes mails; Ctrl-C ends it", flush=True)
        shown = -1
        try:
            while True:
                if gateway.orders_mailed() != shown:
                    shown = gateway.orders_mailed()
                    print(f"{shown:,} mails sent, {gateway.refused():,} refused", flush=True)
                time.sleep(1)
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
