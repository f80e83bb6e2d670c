"""A planner: what a cluster that fails yields under each way of living with failures.

`model` says what a cluster, a job and its costs are; `engine` runs them event by event; `strategies` are the ways;
`forms` are the closed forms that the engine is tested against; `presets` reproduces published figures; `report` makes
tables and JSON. Read docs/planner.md for what is and is not modelled.
"""
