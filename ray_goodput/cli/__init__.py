"""The command `ray-goodput`. See README.md."""
