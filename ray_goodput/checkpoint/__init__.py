"""Checkpoints in DCP's own format: plan, stage, read. See README.md for the flow and the formats."""
