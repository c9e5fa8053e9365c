"""A TCP proxy with the faults of a network: it forwards, stalls, loses packets, and cuts.

stall          nothing passes in the given directions, though every byte is acknowledged: a frozen server, or one
               that died behind a load balancer
lose_packets   existing connections become half-open: not even an acknowledgement comes back (a firewall forgot
               them, a host vanished). Linux: a socket filter that drops every segment. New connections work
cut            existing connections are reset
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import sys
import threading

_LINGER_RESET = struct.pack("ii", 1, 0)
_SO_ATTACH_FILTER = 26
CAN_LOSE_PACKETS = sys.platform == "linux"


class Proxy:
    """Listens on a port of its own and forwards to ``port`` on ``host``; two threads per connection."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lost: list[socket.socket] = []
        self._passes = {"to_server": threading.Event(), "to_client": threading.Event()}
        self.resume()
        threading.Thread(target=self._accept, name=f"proxy-{self.port}", daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.close()
        self.resume()
        self.cut()
        for end in self._lost:
            _reset(end)

    @property
    def connections(self) -> int:
        """How many connections are open through it."""
        with self._lock:
            return len(self._pairs)

    def stall(self, *, to_server: bool = True, to_client: bool = True) -> None:
        """Let nothing pass in these directions until ``resume``; new connections are accepted and stall as well."""
        for direction, stalled in (("to_server", to_server), ("to_client", to_client)):
            if stalled:
                self._passes[direction].clear()

    def resume(self) -> None:
        """Let everything pass again, also what waited."""
        for event in self._passes.values():
            event.set()

    def lose_packets(self) -> int:
        """Make the open connections half-open for both ends, for ever; returns how many."""
        with self._lock:
            for pair in self._pairs:
                for end in pair:
                    _drop_segments(end)
                    self._lost.append(end)
            count, self._pairs = len(self._pairs), set()
        return count

    def cut(self) -> int:
        """Reset the open connections; returns how many."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            for end in pair:
                _reset(end)
        return len(pairs)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=10)
            except OSError:
                _reset(client)
                continue
            pair = (client, server)
            for end in pair:
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.add(pair)
            for source, sink, direction in ((client, server, "to_server"), (server, client, "to_client")):
                threading.Thread(target=self._forward, args=(pair, source, sink, direction), daemon=True).start()

    def _forward(
        self, pair: tuple[socket.socket, socket.socket], source: socket.socket, sink: socket.socket, direction: str
    ) -> None:
        passes = self._passes[direction]
        try:
            while chunk := source.recv(65536):
                passes.wait()
                sink.sendall(chunk)
            passes.wait()  # the end of a connection is not seen through a stall either
        except OSError:
            pass
        with self._lock:
            half_open = pair not in self._pairs
            self._pairs.discard(pair)
        if not half_open:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        # shutdown wakes the thread that is in recv; close then sends the reset.
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def _drop_segments(end: socket.socket) -> None:
    """Attach the classic BPF program "return 0": the kernel drops every incoming segment before it acknowledges it."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
