"""The client of a home behind an address, and the calls that it shares with a home on this machine.

Start at `remote_home`, which is `millstream.connect`; `millstream.aio` has its twin for tasks. `call_results`
has results and bounds that all homes share, `http_requests` and `http_retries` are the protocol without I/O, and
`write_session` numbers an application's writes. Needs only the core and `millstream[client]`.
"""
