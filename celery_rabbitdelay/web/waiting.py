"""The page Waiting: a search for waiting tracked tasks, with counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.levels.headers import is_digits
from celery_rabbitdelay.registry.index import Pending
from celery_rabbitdelay.registry.known import ENDED
from celery_rabbitdelay.registry.pauses import LATEST_MS
from celery_rabbitdelay.registry.query import NAMES, Term, completions
from celery_rabbitdelay.registry.record import record_of
from celery_rabbitdelay.registry.search import SOON, Search
from celery_rabbitdelay.registry.states import STATES
from celery_rabbitdelay.web.search import Counts, PagedSearch
from celery_rabbitdelay.web.shown import MOST_IN_ADDRESS
from celery_rabbitdelay.web.site import STATUS_PERIOD, counted
from celery_rabbitdelay.web.view_request import Fields, ViewRequest, Wrong

#: The default number of tasks on a page, and the maximum.
PAGE, MOST = 50, 500

#: The largest valid number of tasks that the previous pages have listed.
MOST_SEEN: Final = 10**9

#: How many values of a term are counted: the most frequent.
COUNTED: Final = 8

#: The terms that are counted beside the list, and a fixed order of the values of some terms.
FACETS: Final = ("state", "task", "queue", "due", "job")
ORDERS: Final = {"state": ("overdue", "held", "job-open", "waiting"), "due": tuple(SOON)}

#: How many of the newest jobs are proposed as completions.
COMPLETED: Final = 50


def found_before(fields: Fields) -> int:
    """Return how many tasks the previous pages of a search have listed."""
    return fields.number("so_far", 1, MOST_SEEN) if "so_far" in fields else 0


def waiting(request: ViewRequest) -> dict[str, object]:
    """Return one page of the matching tasks, in the order of their due times."""
    fields, search = request.fields, PagedSearch.of_request(request)
    limit, after = fields.number("limit", PAGE, MOST), _place(request)
    before = found_before(fields)
    most = limit - before % limit  # an earlier request may have filled a part of this page
    is_counted = after is None or not search.needs_records
    read, count, may_be_more = search.counted() if is_counted else (None, None, False)
    found = search.found(after, most) if after or read is None else read.first(most)
    place = None if found.next is None else "{}:{}".format(*found.next)
    so_far = before + len(found.tasks)
    following = fields.address(after=place, so_far=str(so_far) if so_far else None)
    return {
        "q": str(search.query),
        "count": count,
        "may_be_more": may_be_more,
        "complete_since": search.delays.pending_since(),
        "tasks": rows(search, found.tasks),
        "next": place,
        "so_far": so_far,
        "limit": limit,
        "next_address": place and following,
        # The request has read as many records as it may, and has not filled the page.
        "is_short": place is not None and len(found.tasks) < most,
        "searched_until": found.next and instant_of(found.next[0]),
        "facets": {} if count is None else dict(_facets(request, search, search.counts(read))),
        "counted": len(read.tasks) if read and read.next else None,
        "cancelled": search.cancelled,
        "unlisted": [] if count else [*_unlisted(search)],
        "arguments_shown": request.site.options.shows_arguments,
        "language": NAMES,
        **complete(request),
    }


def rows(search: Search, tasks: Sequence[Pending]) -> list[dict[str, object]]:
    """Return tasks with their states and their masked arguments."""
    arguments, ids = search.context.arguments, [each.task_id for each in tasks]
    found = [{**each._asdict(), "state": search.context.holds.state(each)} for each in tasks]
    messages = search.delays.registry.index.short_messages(ids) if arguments else ids
    for task, message in zip(found, messages, strict=True):
        task["arguments"] = arguments and arguments(task["task"], message)
    return found


def _facets(
    request: ViewRequest, search: PagedSearch, counts: Counts
) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """Yield the facets: the counted values of terms, with the addresses that filter by them."""
    query = search.query
    for name in FACETS:
        counted, chosen = counts[name], query.named(name)
        values = ORDERS.get(name) or [each for each, _ in counted.most_common(COUNTED)]
        terms = [Term.of(name, each) for each in values if counted[each]]
        links = list[dict[str, object]]()
        for term in (*chosen, *(each for each in terms if each not in chosen)):
            is_on, text = term in chosen, "*".join(term.parts)
            new = query.without(term) if is_on else query.replaced(name, term)
            address = request.fields.address(q=str(new), after=None, so_far=None)
            to = address if len(address) <= MOST_IN_ADDRESS else None
            count = counted.get(text)
            links.append({"value": text, "count": count, "is_on": is_on, "address": to})
        yield name, links


def _unlisted(search: Search) -> Iterator[dict[str, str]]:
    """Yield the tasks that the search names by id and that no longer wait, with their states."""
    for task_id in (search.ids or ())[:COUNTED]:
        record = record_of(search.delays.registry, task_id)
        if record is not None and record.state in ENDED:
            yield {"task_id": task_id, "words": ENDED[record.state]}


def complete(request: ViewRequest) -> dict[str, object]:
    """Return the completions of the search that a user is typing."""
    registry = request.with_registry.registry

    def look() -> dict[str, list[str]]:
        kinds = [each.kind for each in counted(request.site).kinds]
        jobs = registry.jobs.all(registry.now_ms(), COMPLETED)
        return {
            "task": sorted({each.task for each in kinds}),
            "queue": sorted({each.queue for each in kinds}),
            "job": [each.name for each in jobs],
            "state": [*STATES],
            "due": [*SOON, "today", "tomorrow"],
            "sent": ["<1h", "today", "yesterday"],
        }

    values = request.site.latest("completions", look, STATUS_PERIOD).value
    return {"completions": completions(request.fields.get("q", ""), values or {})}


def _place(request: ViewRequest) -> tuple[int, str] | None:
    """Return the due time and the id of the task before the page; None for the first page."""
    if "after" not in request.fields:
        return None
    due_ms, _, task_id = request.fields.needed("after").partition(":")
    if not is_digits(due_ms, LATEST_MS):
        raise Wrong("after", "takes the field 'next' of the previous page")
    return int(due_ms), task_id
