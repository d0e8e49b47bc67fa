"""Checks by topic: functions from a `Snapshot` to findings. None reads anything else; the table is in `examine`."""
