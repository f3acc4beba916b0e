"""`millstream.toml`: its keys, and reading it.

Start at `model`: every key, its default and its description; `…_model` has the larger sections. `file` loads the
text, with variables (`interpolation`) and the environment (`environment`). `validation` refuses unknown keys and wrong values, by
the model's types (`section`, `formed_texts`, `quantities`). `rule_checks` and `stream_checks` find settings that are valid
alone and wrong together.
"""
