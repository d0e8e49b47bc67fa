"""What a snapshot's files mean: pure readers of sysfs and of tools' output. They judge nothing; `checks` does.

A reader returns None, or leaves an entry out, where a file is missing or garbled; it never raises.
"""
