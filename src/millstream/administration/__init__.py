"""An operator's commands on a home, each a module: to make it, check it, move its parts, and rebuild what is derived.

`initialize` makes a home, `doctor` checks one with `lake_checks` and `address_checks`, `catalog_move` and `lake_move` put
its parts elsewhere, `fold` and `rebuild` make lake tables again, `route_explain` shows where rows go, and `demo` runs
the whole on a database of its own. Nothing here runs unless a command asks for it.
"""
