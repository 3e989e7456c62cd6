"""Which of the messages that were sent the broker has settled."""

import amqp
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import MessageNacked
from celery_rabbitdelay.publishing.confirm_channel import Unconfirmed
from celery_rabbitdelay.publishing.message import Content, Publication


def publication(key: str) -> Publication:
    sent = Publication(Content.of(amqp.Message("x")), lambda: ("exchange", key))
    sent.exchange, sent.routing_key = sent.address()
    return sent


def unconfirmed(sent: list[Publication]) -> tuple[Unconfirmed, list[Publication]]:
    """Those that were sent, and, in the order in which it is reported, those that are settled."""
    settled: list[Publication] = []
    found = Unconfirmed(settled.append)
    found.update(enumerate(sent, 1))
    return found, settled


#: Whether the broker has taken a message, its tag, and whether all before it are meant too.
answers = st.tuples(st.booleans(), st.integers(1, 7), st.booleans())


@given(st.lists(answers, max_size=8), st.sets(st.integers(0, 4)))
def test_each_answer_settles_what_it_means_once(
    given_answers: list[tuple[bool, int, bool]], forgotten: set[int]
) -> None:
    sent = [*map(publication, "abcde")]
    waiting, settled = unconfirmed(sent)
    waiting.forget([sent[number] for number in forgotten])
    left = [number for number in range(5) if number not in forgotten]
    for is_ack, tag, multiple in given_answers:
        meant = [n for n in left if (n < tag if multiple else n == tag - 1)]
        left = [n for n in left if n not in meant]
        before = len(settled)
        waiting.settle(tag, multiple, is_nack=not is_ack)
        assert settled[before:] == [sent[number] for number in meant]
        for each in settled[before:]:
            if is_ack:
                assert each.error is None
            else:
                assert isinstance(each.error, MessageNacked)
                assert each.error.routing_key == each.routing_key
        assert [*waiting.values()] == [sent[number] for number in left]
        assert len(waiting) == len(left)
