"""Deterministic simulation: the protocol under seeded failure schedules."""
