"""What arrives in pieces over a socket, with and without TLS."""

import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from struct import pack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from amqp import spec
from amqp.exceptions import RecoverableConnectionError
from amqp.transport import Transport
from kombu import Connection

from celery_rabbitdelay.publishing.wire import Wire
from celery_rabbitdelay.testing import wait_for
from tests.certificates import Certificates

#: A body frame of channel 1, and its payload.
PAYLOAD = bytes(range(256)) * 128
FRAME = b"\x03\x00\x01" + len(PAYLOAD).to_bytes(4) + PAYLOAD + b"\xce"


@pytest.fixture(params=["TCP", "TLS"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, socket.socket]]:
    """py-amqp's side of a connection, and the other side."""
    certificates = Certificates.make(tmp_path) if request.param == "TLS" else None
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(accept, listener, certificates)
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        ours = Transport(host, 10, certificates.for_amqp() if certificates else False)
        ours.connect()
        with accepting.result() as other:
            yield ours, other
        ours.close()


def accept(listener: socket.socket, certificates: Certificates | None) -> socket.socket:
    plain, _ = listener.accept()
    if certificates is None:
        return plain
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.server, certificates.server_key)
    return context.wrap_socket(plain, server_side=True)


@pytest.fixture
def frames() -> list[Any]:
    """The frames that py-amqp was given."""
    return []


@pytest.fixture
def wire(pair: tuple[Any, socket.socket], frames: list[Any]) -> Wire:
    """A wire over that connection."""
    return wire_over(pair[0], frames.append)


def wire_over(transport: Any, handle: Callable[[Any], object]) -> Wire:
    """A wire whose frames are handled by a function, in place of py-amqp."""
    connection = SimpleNamespace(transport=transport, frame_max=131_072, on_inbound_frame=handle)
    return Wire(cast(Connection, SimpleNamespace(connection=connection)))


def read_now(wire: Wire) -> bool:
    """Return whether a whole frame had arrived."""
    try:
        wire.read(0, channel=1)
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("sent_first", [3, 5_000])
def test_a_frame_of_which_a_part_has_arrived_is_not_waited_for(
    wire: Wire, pair: tuple[Any, socket.socket], frames: list[Any], sent_first: int
) -> None:
    _, other = pair
    assert not read_now(wire)
    other.sendall(FRAME[:sent_first])
    # The other side says nothing more for now, like a broker that is frozen.
    for _ in range(50):
        assert not read_now(wire)
    other.sendall(FRAME[sent_first:])
    wait_for(lambda: read_now(wire), "the rest of the frame")
    assert frames == [(3, 1, PAYLOAD)]


def test_frames_that_a_tls_record_holds_together_are_read_one_after_the_other(
    wire: Wire, pair: tuple[Any, socket.socket], frames: list[Any]
) -> None:
    short = b"\x08\x00\x00\x00\x00\x00\x00\xce"
    # A select() would show the first one only: the others are decrypted with it.
    pair[1].sendall(short * 100)
    wire.read(10, channel=1)
    for _ in range(99):
        assert read_now(wire)
    assert len(frames) == 100
    assert not read_now(wire)


def test_a_closed_channel_that_does_not_open_again_is_no_lack_of_frames(
    pair: tuple[Any, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its messages would be sent without confirms. py-amqp would wait for ever."""

    def handle(frame: object) -> None:
        pair[0].read_frame()  # as py-amqp, which asks for the channel and reads the answer

    wire = wire_over(pair[0], handle)
    # Only to be quick: the wait itself is a real one.
    monkeypatch.setattr("celery_rabbitdelay.publishing.wire.REOPEN_TIMEOUT", 0.2)
    pair[1].sendall(b"\x01\x00\x01\x00\x00\x00\x04" + pack(">HH", *spec.Channel.Close) + b"\xce")
    with pytest.raises(RecoverableConnectionError):
        wire.read(10, channel=1)
