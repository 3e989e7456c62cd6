"""The table at the end of a run."""

from example_project.demonstration.outcome import Outcome, percentile


def table(outcome: Outcome) -> str:
    """Return all counts and measurements as text."""
    return "\n".join([_counts(outcome), "", _lateness(outcome)])


def _counts(outcome: Outcome) -> str:
    kill, dispatch = outcome.kill, outcome.dispatch
    away = (outcome.back_ms - kill.killed_ms) / 1000
    rows: list[tuple[str, int | str, str]] = [
        ("sent", len(outcome.sent), f"of {dispatch.orders:,} orders, in {dispatch.seconds:.1f} s"),
        ("  listed in the registry", dispatch.listed, "as waiting, when Spark had ended"),
        ("  in messages", dispatch.messages, "a message carries the tasks of one tick"),
        ("due before they could be sent", outcome.overdue, "sent without a delay"),
        ("waiting when the worker was killed", kill.waiting, ""),
        (
            "  messages in the delay queues then",
            kill.in_levels,
            "counted by RabbitMQ, queue by queue",
        ),
        ("delivered", outcome.delivered, f"{outcome.results:,} results in Redis say SUCCESS"),
        ("duplicates", outcome.duplicates, "orders with more than one mail"),
        ("lost", outcome.lost, "sent, but no mail"),
        ("refused", outcome.refused, "attempts, by the gateway"),
        ("retried", outcome.retried, f"orders; {outcome.retries:,} retries"),
        ("redelivered", outcome.redelivered, f"messages; {outcome.started_twice:,} ran twice"),
        ("worker away", f"{away:.1f} s", "from the kill to the next start of a task"),
    ]
    return "\n".join(_row(name, _text(value), remark) for name, value, remark in rows)


def _lateness(outcome: Outcome) -> str:
    every, calm = outcome.lateness, outcome.lateness_before_kill
    if not every or not calm:
        return "no lateness was measured"
    rows: list[tuple[str, int | str, int | str]] = [
        ("lateness of first attempts in ms", "all", "before the kill"),
        ("  reminders", len(every), len(calm)),
        ("  smallest", every[0], calm[0]),
        ("  p50", percentile(every, 50), percentile(calm, 50)),
        ("  p99", percentile(every, 99), percentile(calm, 99)),
        ("  max", every[-1], calm[-1]),
    ]
    return "\n".join(
        f"{name:<38}{_text(of_all):>8}{_text(of_calm):>18}" for name, of_all, of_calm in rows
    )


def _row(name: str, value: str, remark: str) -> str:
    return f"{name:<38}{value:>8}   {remark}".rstrip()


def _text(value: int | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"
