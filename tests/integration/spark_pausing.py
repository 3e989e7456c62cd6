"""An application that pauses where it has sent a partition, and before Spark knows.

Spark's Python processes import it. The first attempt of partition 0 pauses until it is killed; of
a stream, only in the batch that ``SPARK_PAUSES_IN`` names.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from pyspark import TaskContext

from celery_rabbitdelay.spark.write import BATCH_ID
from celery_rabbitdelay.testing import wait_for
from tests.integration.shop import PATIENCE, make_app

#: The environment variables: the file that says that a process pauses, and the number of the batch.
PAUSED = "SPARK_PAUSED"
PAUSES_IN = "SPARK_PAUSES_IN"


def _pause() -> None:
    context = TaskContext.get()
    if context is None or context.partitionId():
        return
    if context.getLocalProperty(BATCH_ID) != os.environ.get(PAUSES_IN):
        return
    paused = Path(os.environ[PAUSED])
    if context.attemptNumber():
        # Not before the first attempt has sent its rows.
        wait_for(paused.exists, "the first attempt", PATIENCE)
    else:
        paused.touch()
        signal.pause()


if PAUSED in os.environ:
    app = make_app(json.loads(os.environ["SHOP"]))
    delays: Any = app.rabbitdelay
    close = delays.close

    def _close_and_pause() -> None:
        close()
        _pause()

    # What a write does last in an executor.
    delays.close = _close_and_pause
