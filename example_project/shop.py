"""A record shop's Celery application and its task: ask a customer for a review of an order."""

import json
import os
from typing import Final
from urllib.request import Request, urlopen

from celery_rabbitdelay import Celery

#: The URL of the mail provider.
MAIL_GATEWAY_URL: Final = os.environ.get("MAIL_GATEWAY_URL", "http://127.0.0.1:8025/mails")

#: The Redis for the registry, which lists the waiting tasks, and for the results.
REDIS_URL: Final = os.environ.get("SHOP_REDIS_URL", "redis://localhost")

#: With an amqps:// URL, Celery's broker_use_ssl as JSON: the files with the certificates.
BROKER_USE_SSL: Final = json.loads(os.environ.get("SHOP_BROKER_USE_SSL", "false"))

app = Celery("record_shop", broker=os.environ.get("CELERY_BROKER_URL", "amqp://"))

app.conf.update(
    broker_use_ssl=BROKER_USE_SSL,
    # A worker acknowledges a task when it has ended. RabbitMQ redelivers the tasks of a killed one.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    result_backend=REDIS_URL,
    rabbitdelay_registry_url=REDIS_URL,
    # The registry lists every reminder that waits.
    rabbitdelay_track="all",
)


@app.task(autoretry_for=(OSError,), max_retries=10, retry_backoff=True, retry_jitter=False)
def remind(order_id: str, customer_id: str, number_of_cds: int) -> None:
    """Ask a customer for a review; if the gateway refuses the mail, try again 1, 2, 4 ... s later.

    The task may run twice. Because of the idempotency key, the gateway sends only one mail.
    """
    text = f"Dear customer {customer_id}, how do your {number_of_cds} CDs sound?"
    mail = {"customer": customer_id, "order": order_id, "text": text}
    headers = {"Content-Type": "application/json", "Idempotency-Key": order_id}
    with urlopen(Request(MAIL_GATEWAY_URL, json.dumps(mail).encode(), headers), timeout=10):
        pass  # urlopen has raised an HTTPError, an OSError, if the gateway refused the mail
