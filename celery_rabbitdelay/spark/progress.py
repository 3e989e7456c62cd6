"""The progress of a driver's job in its terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, Final
from uuid import uuid4

from pyspark.sql import SparkSession

from celery_rabbitdelay.operations.progress_bar import Show, is_terminal, progress_bar

#: Seconds between two looks.
INTERVAL: Final = 0.2

#: The property by which Spark groups the jobs of a thread.
JOB_GROUP: Final = "spark.jobGroup.id"

#: Whether Spark shows a bar of its own; its shell does.
SPARKS_OWN_BAR: Final = "spark.ui.showConsoleProgress"


@contextmanager
def progress_of_partitions(spark: SparkSession, label: str) -> Iterator[None]:
    """Show how many partitions of the jobs that this thread starts are done.

    Nothing is shown if the standard error is no terminal, if Spark shows a bar of its own, or with
    Spark Connect, whose client does.

    Args:
        spark: The session.
        label: The text before the bar.
    """
    context: Any = getattr(spark, "sparkContext", None)  # none with Spark Connect
    if context is None or not is_terminal() or context.getConf().get(SPARKS_OWN_BAR) == "true":
        yield
        return
    former = context.getLocalProperty(JOB_GROUP)
    group = former or f"rabbitdelay-{uuid4().hex}"
    tracker, ended = context.statusTracker(), Event()
    earlier = set(tracker.getJobIdsForGroup(group))
    with progress_bar(label) as show:
        watch = Thread(target=_watch, args=(tracker, group, earlier, ended, show), daemon=True)
        context.setLocalProperty(JOB_GROUP, group)
        watch.start()
        try:
            yield
        finally:
            ended.set()
            watch.join()
            context.setLocalProperty(JOB_GROUP, former)


def _watch(tracker: Any, group: str, earlier: set[int], ended: Event, show: Show) -> None:
    """Show the progress until the jobs have ended, and once more then."""
    is_over = False
    while not is_over:
        is_over = ended.wait(INTERVAL)
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
        ids = {stage for job in jobs if job and job.jobId not in earlier for stage in job.stageIds}
        stages = [stage for stage in map(tracker.getStageInfo, ids) if stage]
        # Spark skips stages whose output it has already.
        begun = [each for each in stages if each.numActiveTasks or each.numCompletedTasks]
        if begun:
            done = sum(each.numCompletedTasks for each in begun)
            show(done, "partitions", sum(each.numTasks for each in begun))
