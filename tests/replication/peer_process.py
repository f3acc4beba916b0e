"""A node in its own process.

`lead` prints its address, and `follow HOST:PORT` prints that it is connected. Both run until they are
killed.
"""

from __future__ import annotations

import sys

from tests.replication.flight_server import ExchangeServer

from millstream.replication.flight.address import LeaderAddress
from millstream.replication.flight.transport import FlightTransport
from millstream.testing.transport import hello_of

if sys.argv[1] == "lead":
    transport = FlightTransport("web")
    server = ExchangeServer(transport)
    sys.stdout.write(f"{server.place}\n")
    sys.stdout.flush()
    while transport.accept(3600.0):
        pass
else:
    link = FlightTransport("web", LeaderAddress(sys.argv[2])).connect(hello_of(), 30.0)
    sys.stdout.write("connected\n")
    sys.stdout.flush()
    while True:
        link.recv(3600.0)
