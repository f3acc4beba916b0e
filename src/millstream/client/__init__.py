"""The client of a home behind an address, and the calls that it shares with a home on this machine.

Start at `remote_home`, which is `millstream.connect`; `millstream.aio` has its twin for tasks. `home_calls`
lists the calls of every home, `http_requests` and `http_retries` are the protocol without I/O, and
`write_session` numbers an application's writes. Needs only the core and `millstream[client]`.
"""
