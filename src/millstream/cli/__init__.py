"""Commands. Nothing heavy is imported before a command needs it: `millstream --help` answers in 0.3 s."""
