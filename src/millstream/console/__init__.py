"""The console: a home's status in a browser, served by `millstream serve` next to the API.

Pages are made on the server (`html`, `pages`), from the status that all viewers share (`shared_status`), and filtered by the
rights of each (`visible_streams`). `troubles` lists what is wrong. `routes` has the paths; `static` the stylesheet and the script, which
request nothing from other hosts.
"""
