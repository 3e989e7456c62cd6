"""Changes that operators make with ``rabbitmqctl``, made by calls into the node.

``rabbitmqctl`` boots an Erlang VM each time, which takes seconds of processor time; Erlang's own
``erl_call`` is a small program that hands an expression to a node.
"""

import base64
import json
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Final

from celery_rabbitdelay.testing import RabbitMQServer

#: The user whom RabbitMQ's own log names for a change.
ACTOR: Final = '<<"tests">>'


def evaluate(broker: RabbitMQServer, *expressions: str) -> str:
    """Evaluate Erlang expressions on a node, each of whose values has to be no error.

    Raises:
        subprocess.CalledProcessError: One of them failed; a note says how.
    """
    checked = ", ".join(
        f"case {each} of {{error, Why{number}}} -> exit(Why{number}); V{number} -> V{number} end"
        for number, each in enumerate(expressions)
    )
    program = Path(getattr(broker, "root", None) or "/", "usr/bin/erl_call")
    if not program.exists() or "RABBITMQ_USE_LONGNAME" in broker._environment():
        return broker.ctl("eval", f"{checked}.")
    cookie = (broker.folder / ".erlang.cookie").read_text()
    # Two clients of one name would keep each other out.
    own = ["-h", f"tests{os.getpid()}x{threading.get_ident()}"]
    command = ["/usr/bin/erl_call", *own, "-sname", broker.node, "-c", cookie, "-e"]
    done = broker._run(command, input=f"{checked}.\n", check=False)
    if done.returncode or not done.stdout.startswith("{ok, "):
        failed = subprocess.CalledProcessError(done.returncode, checked)
        failed.add_note(done.stdout + done.stderr)
        raise failed
    return done.stdout


def run_tool(broker: RabbitMQServer, program: str, *arguments: str) -> None:
    """Run one of RabbitMQ's other programs, as ``rabbitmq-queues``, against a node."""
    broker._run([f"/usr/lib/rabbitmq/bin/{program}", *arguments], check=True)


def listed(broker: RabbitMQServer, expression: str) -> set[str]:
    """Evaluate an Erlang expression whose value is a list; return each as Erlang writes it."""
    line = 'unicode:characters_to_binary(io_lib:format("~0p", [Each]))'
    # Of no character that is written otherwise; rabbitmqctl breaks a long text into several.
    printed = evaluate(broker, f"[base64:encode_to_string({line}) || Each <- {expression}]")
    encoded = re.findall('"(.*?)"', re.sub(r'"\s+"', "", printed))
    return {base64.b64decode(each).decode() for each in encoded}


def bindings(virtual_host: str) -> str:
    """Return the expression that lists all bindings of a virtual host."""
    items = "source_name, routing_key, destination_name, destination_kind"
    return f"rabbit_binding:info_all({text(virtual_host)}, [{items}])"


def text(value: str) -> str:
    """Return a text as Erlang writes its bytes."""
    return f"<<{', '.join(map(str, value.encode()))}>>"


def add_virtual_host(broker: RabbitMQServer, name: str) -> None:
    """Make a virtual host, in which the user ``guest`` may do everything."""
    everything = ", ".join([text(".*")] * 3)
    own = f'<<"guest">>, {text(name)}, {everything}, {ACTOR}'
    evaluate(
        broker,
        f"rabbit_vhost:add({text(name)}, {ACTOR})",
        f"rabbit_auth_backend_internal:set_permissions({own})",
    )


def delete_virtual_host(broker: RabbitMQServer, name: str) -> None:
    """Delete a virtual host."""
    evaluate(broker, f"rabbit_vhost:delete({text(name)}, {ACTOR})")


def add_user(
    broker: RabbitMQServer, name: str, configure: str, write: str, read: str, password: str
) -> None:
    """Make a user with these permissions in the virtual host ``/``."""
    own = ", ".join(map(text, (name, "/", configure, write, read)))
    evaluate(
        broker,
        f"rabbit_auth_backend_internal:add_user({text(name)}, {text(password)}, {ACTOR})",
        f"rabbit_auth_backend_internal:set_permissions({own}, {ACTOR})",
    )


def delete_user(broker: RabbitMQServer, name: str) -> None:
    """Delete a user."""
    evaluate(broker, f"rabbit_auth_backend_internal:delete_user({text(name)}, {ACTOR})")


def change_password(broker: RabbitMQServer, name: str, password: str) -> None:
    """Change the password of a user."""
    own = f"{text(name)}, {text(password)}"
    evaluate(broker, f"rabbit_auth_backend_internal:change_password({own}, {ACTOR})")


def set_tag(broker: RabbitMQServer, name: str, tag: str) -> None:
    """Let a user have one tag."""
    evaluate(broker, f"rabbit_auth_backend_internal:set_tags({text(name)}, [{tag}], {ACTOR})")


def closes(why: str, virtual_host: str = "/") -> str:
    """Return the expression that closes all connections to a virtual host, for a reason.

    Not those that RabbitMQ tracks, as ``rabbitmqctl`` does: it begins to a moment after they open.
    """
    of_host = f"[{{vhost, {text(virtual_host)}}}]"
    return (
        f"[catch rabbit_networking:close_connection(Each, {text(why)})"
        " || Each <- rabbit_networking:local_connections(),"
        f" (catch rabbit_networking:connection_info(Each, [vhost])) =:= {of_host}]"
    )


def close_all_connections(broker: RabbitMQServer, why: str, virtual_host: str = "/") -> None:
    """Close all connections to a virtual host."""
    evaluate(broker, closes(why, virtual_host))


def is_any_blocked(broker: RabbitMQServer) -> bool:
    """Return whether a node blocks any connection."""
    states = "[catch rabbit_networking:connection_info(Each, [state])"
    return "blocked" in evaluate(
        broker, f"{states} || Each <- rabbit_networking:local_connections()]"
    )


def connections_of(broker: RabbitMQServer) -> int:
    """Return how many connections of clients a node has."""
    return len(listed(broker, "rabbit_networking:local_connections()"))


def set_memory_limit(broker: RabbitMQServer, value: str) -> None:
    """Set the most memory that a node uses before it blocks publishers, as Erlang writes it."""
    evaluate(broker, f"vm_memory_monitor:set_vm_memory_high_watermark({value})")


def set_disk_limit(broker: RabbitMQServer, value: str) -> None:
    """Set the disk space below which a node blocks publishers, as Erlang writes it."""
    evaluate(broker, f"rabbit_disk_monitor:set_disk_free_limit({value})")


def set_policy(broker: RabbitMQServer, virtual_host: str, pattern: str, **keys: int | str) -> str:
    """Set a policy for the queues of a pattern; return its name, which is the pattern.

    ``max_length=5`` stands for ``max-length``.
    """
    definition = json.dumps({key.replace("_", "-"): value for key, value in keys.items()})
    own = ", ".join(map(text, (virtual_host, pattern, pattern, definition, "0", "queues")))
    evaluate(broker, f"ok = rabbit_policy:parse_set({own}, {ACTOR})")
    return pattern


def clear_policy(broker: RabbitMQServer, virtual_host: str, name: str) -> None:
    """Delete a policy."""
    evaluate(broker, f"rabbit_policy:delete({text(virtual_host)}, {text(name)}, {ACTOR})")
