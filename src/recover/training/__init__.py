"""The facade: a training script joins a run here."""
