"""The command line: a module for each command or family of commands.

Start at `main`, the tree of commands, which also maps errors to messages and exit codes. Nothing heavy is
imported before a command needs it: `millstream --help` answers in 0.3 s.
"""
