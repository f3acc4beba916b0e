"""Records as text and files: reading a home's log, export and import.

Start at `record_reading`, the base of every way to read a home. `net_changes` folds a range of records to one change
a row. `records_text` has the text formats, `log_export` and `log_import` move a whole log. `follow_log` divides a log
for readers that follow it.
"""
