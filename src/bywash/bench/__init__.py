"""Measurements that `bywash bench` prints: each beside a baseline in the same run."""
