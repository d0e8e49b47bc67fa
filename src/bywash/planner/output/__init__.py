"""A plan in words and files: `text` for a terminal, `plan_file` for `bywash run --plan`, `launch` for schedulers,
`folder` puts them together with switch and NIC configuration."""
